"""Table 8 (Devlin et al., 2019), mask 0 %, same 20, random 80."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.objectives.config import MaskingConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, objective=replace(base.objective, masking=MaskingConfig(share_mask=0.0, share_random=0.8)))
