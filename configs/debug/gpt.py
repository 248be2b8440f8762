"""A toy GPT whose runs take seconds on a CPU, for experiments and scripts."""

from jaxlm.models.gpt import GPTConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=GPTConfig(num_positions=512, num_layers=2, width=32, num_heads=4, feed_forward_width=128, init_std=0.1),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=10),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
