"""Table 8 (Devlin et al., 2019), mask 80 %, same 0, random 20."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.objectives.config import MaskingConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, objective=replace(base.objective, masking=MaskingConfig(share_mask=0.8, share_random=0.2)))
