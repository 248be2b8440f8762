"""The task network of `finetune/bilstm` at a toy size. A run takes seconds on a CPU."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    return replace(
        load_config("finetune/bilstm", FinetuneConfig),
        model=BiLSTMConfig(word_width=12, character_width=6, filters=((3, 8),), width=16, units=(12, 10), init_std=0.1),
        num_epochs=3,
        batch_size=8,
        length=64,
        log_every=1,
    )
