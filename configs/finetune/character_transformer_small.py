"""Fine-tuning of pretrain/character_transformer_small: finetune/gpt_small with that model.

There is no auxiliary language-model loss: the head takes the place of the output layer, which is not tied to the table.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig


def config() -> FinetuneConfig:
    return replace(
        load_config("finetune/gpt_small", FinetuneConfig),
        model=load_config("pretrain/character_transformer_small", PretrainConfig).model,
        auxiliary_lm=0.0,
    )
