"""A toy ELMo whose runs take seconds on a CPU, for experiments and scripts."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.elmo import ELMoConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/elmo", PretrainConfig),
        model=ELMoConfig(width=16, units=24, filters=((1, 4), (3, 8)), character_width=4, num_highways=1, negatives=16),
        num_epochs=None,
        num_steps=100,
        batch_size=8,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
