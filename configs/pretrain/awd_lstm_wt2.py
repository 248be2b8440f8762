"""AWD-LSTM on WikiText-2, as in the README of the original code (salesforce/awd-lstm-lm).

That README reports perplexities of 68.7 (validation) and 65.6 (test) after 750 epochs. An epoch has about 385 steps.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.awd_lstm import AWD_LSTM_WT2
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/awd_lstm_ptb", PretrainConfig),
        model=replace(AWD_LSTM_WT2, vocab_size=0),
        num_epochs=750,
        batch_size=80,
        eval_every=385,
        checkpoint_every=385,
    )
