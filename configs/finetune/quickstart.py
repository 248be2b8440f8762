"""The quickstart's fine-tuning: GPT-1's recipe (lambda 0.5, classifier dropout 0.1, linear decay) at the toy's size."""

from jaxlm.models.gpt import GPTConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=GPTConfig(  # for runs from scratch; --start brings its own sizes
            num_positions=64,
            num_layers=4,
            width=128,
            num_heads=4,
            feed_forward_width=512,
            dropout_rate=0.0,
            embedding_dropout_rate=0.0,
            attention_dropout_rate=0.0,
            init_std=0.049,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=0.1, decay="linear"),
        auxiliary_lm=0.5,
        head_dropout_rate=0.1,
        batch_size=16,
        length=64,
    )
