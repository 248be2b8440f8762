"""BERT_BASE on whole rows of text without next-sentence prediction (Liu et al., 2019, "RoBERTa", table 2).

Rows are consecutive tokens across documents, the paper's FULL-SENTENCES; --data.layout packed gives its DOC-SENTENCES.
Each epoch has new masks.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.data.config import Windows
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, data=Windows(), objective=replace(base.objective, next_sentence_coefficient=0.0))
