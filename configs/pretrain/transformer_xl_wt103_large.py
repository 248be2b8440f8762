"""Transformer-XL on WikiText-103, the large model of 18 x 1024 (the original code's scripts for wt103 large).

The paper's table 1 has a test perplexity of 18.3 for it. Evaluate with longer memory, as in the original:
`--length 128 --memory.length 1600 --memory.clamp-length 1000 --memory.same-length yes`.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.transformer_xl import WT103_LARGE
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/transformer_xl_enwik8", PretrainConfig)
    return replace(
        base,
        model=replace(WT103_LARGE, vocab_size=0),
        optimizer=replace(base.optimizer, warmup=16_000),
        num_steps=4_000_000,
        batch_size=128,
        length=384,
    )
