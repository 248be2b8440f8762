"""Transformer-XL on enwik8, the large model of 24 x 1024 (kimiyoung/transformer-xl, pytorch/run_enwik8_large.sh).

The paper's table 2 has 0.99 bits per character for it. Evaluate with longer memory, as in the original:
`--length 128 --memory.length 3800 --memory.clamp-length 1000 --memory.same-length yes`.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.transformer_xl import ENWIK8_LARGE
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/transformer_xl_enwik8", PretrainConfig)
    return replace(
        base,
        model=replace(ENWIK8_LARGE, vocab_size=0),
        optimizer=replace(base.optimizer, warmup=4000),
        batch_size=64,
        length=768,
    )
