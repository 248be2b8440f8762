"""BERT_BASE with whole-word masking, google-research/bert's option of 2019."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    masking = replace(base.objective.masking, whole_word=True)
    return replace(base, objective=replace(base.objective, masking=masking))
