"""AWD-LSTM on the Penn Treebank, as in the README of the original code (salesforce/awd-lstm-lm).

That README reports perplexities of 61.2 (validation) and 58.8 (test) after 500 epochs. An epoch has about 686 steps; at
its end the original compares validation losses, over 10 streams (here over as many as in training).
"""

from dataclasses import replace

from jaxlm.data.config import Streams
from jaxlm.models.awd_lstm import AWD_LSTM_PTB
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(AWD_LSTM_PTB, vocab_size=0),
        objective=LanguageModel(activation_regularization=2.0, temporal_activation_regularization=1.0),
        data=Streams(windows="varied"),
        optimizer=OptimizerConfig(
            kind="sgd", peak_lr=30.0, warmup=0, decay="constant", weight_decay=1.2e-6, clip_norm=0.25
        ),
        average_iterates="non_monotone",
        num_epochs=500,
        batch_size=20,
        length=70,
        log_every=50,
        eval_every=686,
        checkpoint_every=686,
    )
