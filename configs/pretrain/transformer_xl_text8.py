"""Transformer-XL on text8, the base model of 12 x 512: pretrain/transformer_xl_enwik8 on another text.

The original has this script (pytorch/run_text8_base.sh); the paper reports no result of it.
"""

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return load_config("pretrain/transformer_xl_enwik8", PretrainConfig)
