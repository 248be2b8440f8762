"""A small GPT of music for two CPU cores: 4 x 192, rows of 512 events.

The model of `pretrain/gpt_small` on longer rows, as a second of music takes about ten events. It has no dropout, as a
piece is seen in many transpositions. The Music Transformer (Huang et al., 2019) has 8 x 384, rows of 2,048, relative
positions and dropout of 0.2.
"""

from jaxlm.models.gpt import GPTConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=GPTConfig(
            num_positions=512,
            num_layers=4,
            width=192,
            num_heads=6,
            feed_forward_width=768,
            init_std=0.04,
            dropout_rate=0.0,
            embedding_dropout_rate=0.0,
            attention_dropout_rate=0.0,
        ),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=0.05, decay="cosine"),
        num_steps=1300,
        batch_size=8,
        length=512,
        log_every=20,
        eval_every=0,
        checkpoint_every=500,
    )
