"""A small Transformer-XL for two CPU cores: 4 x 192, about as many parameters as pretrain/gpt_small.

Batch, length, optimizer and schedule are those of pretrain/gpt_small. There is no dropout, as the model sees its text
less than once. The feed-forward is a little narrower, as each layer projects the distances too.
The memory is as long as a row.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.data.config import Streams
from jaxlm.models import without_dropout
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    model = TransformerXLConfig(
        num_layers=4, width=192, num_heads=6, feed_forward_width=736, memory_length=128, init_std=0.04
    )
    return replace(load_config("pretrain/gpt_small", PretrainConfig), model=without_dropout(model), data=Streams())
