"""A small AWD-LSTM for two CPU cores: layers of 492 and 192 units, about as many parameters as pretrain/gpt_small.

Batch, length, optimizer and schedule are those of pretrain/gpt_small. There is no dropout, as the model sees its text
less than once. What is left of AWD-LSTM are its layers, windows of varied lengths whose state is carried on, and the
regularization of activations.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.data.config import Streams
from jaxlm.models import without_dropout
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/gpt_small", PretrainConfig),
        model=without_dropout(AWDLSTMConfig(num_layers=2, width=192, units=492)),
        objective=LanguageModel(activation_regularization=2.0, temporal_activation_regularization=1.0),
        data=Streams(windows="varied"),
    )
