"""Table 6 (Devlin et al., 2019): 12 layers of width 1024, 16 heads."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.bert import TABLE_6
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, model=replace(TABLE_6["12x1024x16"], vocab_size=0))
