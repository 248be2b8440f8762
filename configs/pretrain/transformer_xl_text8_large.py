"""Transformer-XL on text8, the large model of 24 x 1024 (kimiyoung/transformer-xl, tf/scripts/text8_large_tpu.sh).

It is pretrain/transformer_xl_enwik8_large. The paper's table 3 has 1.08 bits per character for it, from that script,
with a warmup of 4,000 steps; pytorch/run_text8_large.sh has none.
"""

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return load_config("pretrain/transformer_xl_enwik8_large", PretrainConfig)
