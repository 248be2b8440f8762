"""Table 6 (Devlin et al., 2019): 6 layers of width 768, 3 heads."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.bert import TABLE_6
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, model=replace(TABLE_6["6x768x3"], vocab_size=0))
