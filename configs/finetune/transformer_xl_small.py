"""Fine-tuning of pretrain/transformer_xl_small: finetune/gpt_small with that model."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    return replace(
        load_config("finetune/gpt_small", FinetuneConfig),
        model=load_config("pretrain/transformer_xl_small", PretrainConfig).model,
    )
