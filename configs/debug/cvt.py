"""Cross-view training at a size whose runs take seconds on a CPU, with an average that follows 20 updates."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/cvt", FinetuneConfig)
    sizes = {"word_width": 16, "character_width": 8, "filters": ((3, 16),), "width": 32, "units": (32, 24)}
    return replace(
        recipe,
        model=replace(recipe.model, **sizes),
        optimizer=replace(recipe.optimizer, warmup=10),
        ema=0.95,
        num_steps=60,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=20,
    )
