"""Table 5 (Devlin et al., 2019), "No NSP": BERT_BASE without next-sentence prediction."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, objective=replace(base.objective, next_sentence_coefficient=0.0))
