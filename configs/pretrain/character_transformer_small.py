"""A small and deep character Transformer for one CPU core: 24 x 64, a few minutes on the bytes of a book.

Batch, length and initial values fit a laptop; the losses, momentum and the constant rate are those of T64. There is no
dropout, as the model sees its text less than once.
"""

from jaxlm.models import without_dropout
from jaxlm.models.character_transformer_config import CharacterTransformerConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=without_dropout(
            CharacterTransformerConfig(
                num_positions=512, num_layers=24, width=64, num_heads=2, feed_forward_width=256, init_std=0.07
            )
        ),
        objective=LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.99, peak_lr=0.003, warmup=0, decay="constant", weight_decay=0.0, clip_norm=1.0
        ),
        num_steps=600,
        batch_size=16,
        length=64,
        log_every=20,
        eval_every=0,
        checkpoint_every=600,
    )
