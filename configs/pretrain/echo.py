"""An echo, a toy model that no paper has, with the schedule of pretrain/gpt1 for a small model."""

from jaxlm.models.echo import EchoConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=EchoConfig(),
        optimizer=OptimizerConfig(kind="adamw", peak_lr=1e-3, warmup=200, decay="cosine", weight_decay=0.01),
        num_steps=10_000,
        batch_size=64,
        length=128,
        log_every=100,
        eval_every=1000,
        checkpoint_every=1000,
    )
