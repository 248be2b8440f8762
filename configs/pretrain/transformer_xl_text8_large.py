"""Transformer-XL on text8, the large model of 24 x 1024 (kimiyoung/transformer-xl, pytorch/run_text8_large.sh).

It is pretrain/transformer_xl_enwik8_large without a warmup. The paper's table 3 has 1.08 bits per character for it.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/transformer_xl_enwik8_large", PretrainConfig)
    return replace(base, optimizer=replace(base.optimizer, warmup=0))
