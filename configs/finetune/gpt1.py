"""GPT-1's fine-tuning (Radford et al. 2018, section 4.1): 3 epochs, batch 32, 6.25e-5, lambda 0.5, head dropout 0.1."""

from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        optimizer=OptimizerConfig(kind="adamw", peak_lr=6.25e-5, warmup=0.002, decay="linear", weight_decay=0.01),
        auxiliary_lm=0.5,
        head_dropout_rate=0.1,
        num_epochs=3,
        batch_size=32,
    )
