"""ULMFiT's language model on general text (Howard and Ruder, 2018, section 4.1): AWD-LSTM with Adam.

Sizes and dropout rates are the paper's, which trains on WikiText-103; 12 epochs at a rate of 1e-3 are the README's of
its code. The code halves the dropout rates of the target task's model instead, and has a sampled softmax and lower
rates for the first layers. Nothing is published about the schedule of the learning rate; this one is ours.
"""

from jaxlm.data.config import Streams
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=AWDLSTMConfig(
            word_dropout_rate=0.05,
            embedding_dropout_rate=0.4,
            recurrent_dropout_rate=0.5,
            dropout_rate=0.3,
            output_dropout_rate=0.4,
            output_bias=False,
        ),
        objective=LanguageModel(activation_regularization=2.0, temporal_activation_regularization=1.0),
        data=Streams(windows="varied"),
        optimizer=OptimizerConfig(
            kind="adamw",
            peak_lr=1e-3,
            warmup=0.1,
            decay="slanted_triangular",
            floor=1 / 32,
            beta1=0.7,
            beta2=0.99,
            weight_decay=1e-7,
            clip_norm=0.3,
        ),
        num_epochs=12,
        batch_size=64,
        length=70,
        log_every=50,
        eval_every=1000,
        checkpoint_every=1000,
    )
