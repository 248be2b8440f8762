"""T5 1.0 small (Raffel et al., 2020, section 3.7): 6 + 6 x 512, trained as the base model."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.t5 import T5_SMALL
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(load_config("pretrain/t5_base", PretrainConfig), model=replace(T5_SMALL, vocab_size=0))
