"""Translation from scratch on two CPU cores: the decoder of pretrain/gpt_small, with dropout and smoothed targets.

Dropout and label smoothing of 0.1 are those of Vaswani et al. (2017, section 5.4), as 29,000 pairs are seen ten times.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    rates = {"dropout_rate": 0.1, "embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.1}
    return FinetuneConfig(
        model=replace(load_config("pretrain/gpt_small", PretrainConfig).model, **rates),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=0.05, decay="cosine"),
        label_smoothing=0.1,
        num_epochs=10,
        batch_size=64,
        length=192,
        eval_rows=200,
        log_every=50,
    )
