"""A small T5 for two CPU cores: 3 + 3 x 192, a few minutes on a folder of books.

T5 1.1's form and T5's recipe at the size of a laptop, without dropout, as the model sees its text about once.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.t5 import T5_1_1_BASE
from jaxlm.nn.config import Execution
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    model = replace(
        T5_1_1_BASE,
        vocab_size=0,
        num_encoder_layers=3,
        num_layers=3,
        width=192,
        num_heads=6,
        head_width=32,
        feed_forward_width=512,
        dropout_rate=0.0,
    )
    return replace(
        load_config("pretrain/t5_base", PretrainConfig),
        model=model,
        execution=Execution(),
        num_steps=2000,
        batch_size=16,
        length=128,
        log_every=20,
        eval_every=500,
        checkpoint_every=500,
    )
