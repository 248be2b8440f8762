"""A toy Transformer-XL whose runs take seconds on a CPU, for experiments. It carries a memory over streams."""

from jaxlm.data.config import Streams
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=TransformerXLConfig(
            num_layers=2, width=32, num_heads=4, feed_forward_width=128, memory_length=64, init_std=0.1
        ),
        data=Streams(),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=10),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
