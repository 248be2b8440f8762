"""A small GPT for two CPU cores: 4 x 192, about ten minutes on a folder of books.

GPT-1's recipe at the size of a laptop, without dropout, as the model sees its text less than once. The initial
deviation is 0.02 sqrt(768 / 192): with the paper's 0.02, chosen for width 768, so narrow a post-norm model stays at the
unigram entropy.
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
        batch_size=16,
        length=128,
        log_every=20,
        eval_every=0,
        checkpoint_every=500,
    )
