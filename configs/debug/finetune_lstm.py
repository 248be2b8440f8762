"""GPT-1's fine-tuning at the size of `debug/lstm`, whose runs it takes as --start. A run takes seconds on a CPU."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/gpt1", FinetuneConfig)
    return replace(
        recipe,
        model=load_config("debug/lstm", PretrainConfig).model,  # for runs from scratch; --start brings its own sizes
        optimizer=replace(recipe.optimizer, peak_lr=3e-3, warmup=0.1),
        batch_size=8,
        length=64,
        log_every=1,
    )
