"""Fine-tuning of pretrain/awd_lstm_small: finetune/lstm_small with that model."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    return replace(
        load_config("finetune/lstm_small", FinetuneConfig),
        model=load_config("pretrain/awd_lstm_small", PretrainConfig).model,
    )
