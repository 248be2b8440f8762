"""BERT_BASE on pairs chosen as in google-research/bert's create_pretraining_data.py, one per row.

A random second part is the first span found, not the nearest in length of several; a chunk of one sentence is always a
random pair; short targets are sampled per document. `jaxlm/data/pairs.py` lists the remaining differences. The original
also stores its pairs and masks ten times: --data.masks static (`pretrain/bert_static_masks`).
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    data = replace(
        base.data, pairs_per_row=1, random_candidates=1, one_sentence="random", short_target_drawn="document"
    )
    return replace(base, data=data)
