"""A small MT-LSTM for two CPU cores: 2 x 200 units, ten passes over the 29,000 captions of Multi30k."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/mt_lstm", FinetuneConfig)
    return replace(recipe, model=replace(recipe.model, width=200, word_width=100), num_epochs=10)
