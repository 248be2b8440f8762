"""A small LSTM for two CPU cores: one layer of 576 units and width 192, about as many parameters as pretrain/gpt_small.

Batch, length and schedule are those of pretrain/gpt_small. There is no dropout, as the model sees its text less than
once.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.lstm import LSTMConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/gpt_small", PretrainConfig),
        model=LSTMConfig(
            num_layers=1, width=192, units=576, dropout_rate=0.0, embedding_dropout_rate=0.0, init_std=0.04
        ),
    )
