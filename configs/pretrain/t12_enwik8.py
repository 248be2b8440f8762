"""The character Transformer of 12 layers, T12, on enwik8 (Al-Rfou et al., 2019, section 3).

The paper reports 1.11 bits per byte. It does not state the norms, the initial values or the clipping. Here norms
precede each branch, the initial values are the defaults of the model, and gradients are not clipped.
"""

from dataclasses import replace

from jaxlm.models.character_transformer import T12
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(T12, vocab_size=0),
        objective=LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.99, peak_lr=0.003, warmup=0, decay="constant", weight_decay=0.0, clip_norm=0.0
        ),
        num_steps=4_000_000,
        batch_size=16,
        length=512,
        log_every=100,
        eval_every=10_000,
        checkpoint_every=10_000,
    )
