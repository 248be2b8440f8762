"""A toy MT-LSTM whose runs take seconds on a CPU, for experiments and scripts."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/mt_lstm", FinetuneConfig)
    model = replace(recipe.model, width=32, word_width=16)
    return replace(recipe, model=model, num_epochs=2, batch_size=8, log_every=1)
