"""Fine-tuning of T5 on a task as text to text (Raffel et al., 2020, section 3.1): Adafactor at 0.001, dropout 0.1.

The paper trains 2^18 steps of 128 texts of 512 tokens, and keeps the best of the checkpoints.
"""

from jaxlm.models.t5 import T5_BASE
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=T5_BASE,  # for runs from scratch; --start brings its own sizes
        optimizer=OptimizerConfig(
            kind="adafactor",
            peak_lr=1e-3,
            warmup=0,
            decay="constant",
            weight_decay=0.0,
            clip_norm=0.0,
        ),
        num_epochs=3,
        batch_size=32,
        length=512,
        log_every=10,
    )
