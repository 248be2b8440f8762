"""Fine-tuning of pretrain/lstm_small: finetune/lstm with the rate, warmup and batch of a small model."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/lstm", FinetuneConfig)
    return replace(
        recipe,
        model=load_config("pretrain/lstm_small", PretrainConfig).model,  # for runs from scratch; --start brings its own
        optimizer=replace(recipe.optimizer, peak_lr=5e-4, warmup=0.1),
        num_epochs=3,
        batch_size=16,
    )
