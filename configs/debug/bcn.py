"""The classification network of `finetune/bcn` at a toy size. A run takes seconds on a CPU."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/bcn", FinetuneConfig)
    sizes = {"word_width": 16, "input_feed_forward_width": 16, "width": 16, "units": (8,)}
    return replace(
        recipe,
        model=replace(recipe.model, **sizes),
        maxout_reduction=4,
        num_epochs=3,
        batch_size=8,
        length=64,
        log_every=1,
    )
