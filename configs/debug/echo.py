"""A toy echo whose runs take seconds on a CPU, for experiments and scripts. Its state is carried over streams."""

from jaxlm.data.config import Streams
from jaxlm.models.echo import EchoConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=EchoConfig(width=32, init_std=0.1),
        data=Streams(reset_probability=0.01),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=10),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
