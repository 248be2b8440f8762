"""BERT's fine-tuning at the size of `debug/bert`, whose runs it takes as --start. A run takes seconds on a CPU."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/bert", FinetuneConfig)
    return replace(
        recipe,
        model=load_config("debug/bert", PretrainConfig).model,  # for runs from scratch; --start brings its own sizes
        optimizer=replace(recipe.optimizer, peak_lr=3e-3),
        num_epochs=3,
        batch_size=8,
        length=64,
        log_every=1,
    )
