"""A toy T5 whose runs take seconds on a CPU, for experiments and scripts."""

from jaxlm.data.config import Spans
from jaxlm.models.t5 import T5Config
from jaxlm.objectives.config import SequenceToSequence
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=T5Config(num_encoder_layers=2, num_layers=2, width=32, num_heads=4, head_width=8, feed_forward_width=128),
        objective=SequenceToSequence(),
        data=Spans(),
        optimizer=OptimizerConfig(
            kind="adafactor",
            peak_lr=0.03,
            warmup=0,
            decay="constant_inverse_sqrt",
            weight_decay=0.0,
            clip_norm=0.0,
        ),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
