"""GPT-1's ablation: one LSTM layer of 2,048 units instead of the Transformer (Radford et al., 2018, table 5).

Batch, length, schedule and optimizer are those of pretrain/gpt1. The state is zero at the beginning of each window, as
in the paper's "same framework"; pretrain/lstm_streams carries it from one batch to the next.
"""

from jaxlm.models.lstm import LSTMConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=LSTMConfig(),
        optimizer=OptimizerConfig(kind="adamw", peak_lr=2.5e-4, warmup=2000, decay="cosine", weight_decay=0.01),
        num_steps=3_000_000,
        batch_size=64,
        length=512,
        log_every=100,
        eval_every=5000,
        checkpoint_every=5000,
        keep_every=100_000,
    )
