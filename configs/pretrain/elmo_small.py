"""ELMo's language model at a size for two CPU cores: two layers of 256 units with projections of 64.

The vocabulary is small enough for a whole softmax. Three million words are an epoch of the books.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.elmo import ELMoConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/elmo", PretrainConfig),
        model=ELMoConfig(
            width=128,
            units=256,
            filters=((1, 16), (2, 16), (3, 32), (4, 64)),
            num_highways=1,
            negatives=0,
        ),
        num_epochs=1,
        batch_size=32,
        log_every=50,
        eval_every=1_000,
        checkpoint_every=500,
    )
