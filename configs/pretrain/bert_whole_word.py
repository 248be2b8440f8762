"""BERT_BASE with masks of whole words, google-research/bert's option of 2019."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, masking=replace(base.masking, whole_word=True))
