"""Table 8 (Devlin et al., 2019), mask 100 %, same 0, random 0: BERT_BASE with every chosen token masked."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.objectives.config import MaskingConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, objective=replace(base.objective, masking=MaskingConfig(share_mask=1.0, share_random=0.0)))
