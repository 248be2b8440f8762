"""The character Transformer of 64 layers, T64, on enwik8 (Al-Rfou et al., 2019, section 3). The paper reports 1.06."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.character_transformer import T64
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(load_config("pretrain/t12_enwik8", PretrainConfig), model=replace(T64, vocab_size=0))
