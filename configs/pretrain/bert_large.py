"""BERT_LARGE's pretraining (Devlin et al., 2019, section 3): BERT_BASE's settings, 24 x 1024."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.bert import BERT_LARGE
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, model=replace(BERT_LARGE, vocab_size=0))
