"""A small GPT of music for two CPU cores: 4 x 192, rows of 512 events.

The model of `pretrain/gpt_small` on longer rows, as a second of music takes about ten events. It has no dropout, as a
piece is seen in many transpositions. The Music Transformer (Huang et al., 2019) has 8 x 384, rows of 2,048, relative
positions and dropout of 0.2.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(load_config("pretrain/gpt_small", PretrainConfig), batch_size=8, length=512)
