"""BERT_BASE on ten fixed copies of pairs and masks, as in google-research/bert's files (dupe_factor 10)."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, data=replace(base.data, masks="static", mask_copies=10))
