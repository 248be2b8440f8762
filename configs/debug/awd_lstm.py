"""A toy AWD-LSTM whose runs take seconds on a CPU, for experiments and scripts. Its state is carried over streams."""

from jaxlm.data.config import Streams
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=AWDLSTMConfig(
            width=32,
            units=48,
            word_dropout_rate=0.02,
            embedding_dropout_rate=0.1,
            recurrent_dropout_rate=0.1,
            dropout_rate=0.1,
            output_dropout_rate=0.1,
        ),
        objective=LanguageModel(activation_regularization=2.0, temporal_activation_regularization=1.0),
        data=Streams(windows="varied"),
        optimizer=OptimizerConfig(
            kind="sgd", peak_lr=10.0, warmup=0, decay="constant", weight_decay=1.2e-6, clip_norm=0.25
        ),
        average_iterates="non_monotone",
        num_steps=100,
        batch_size=8,
        length=32,
        log_every=1,
        eval_every=10,
        checkpoint_every=50,
    )
