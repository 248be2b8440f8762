"""A small character Transformer for one CPU core: 12 x 48, a few minutes on the bytes of books.

The losses are those of T12. There is no dropout, as the model sees its text less than once. The momentum is 0.9 and the
rate 0.05: after a few hundred steps, a momentum of 0.99 has hardly begun to act.
"""

from jaxlm.models import without_dropout
from jaxlm.models.character_transformer import CharacterTransformerConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=without_dropout(
            CharacterTransformerConfig(num_layers=12, width=48, num_heads=2, feed_forward_width=192, init_std=0.08)
        ),
        objective=LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.9, peak_lr=0.05, warmup=40, decay="constant", weight_decay=0.0, clip_norm=1.0
        ),
        num_steps=300,
        batch_size=16,
        length=64,
        log_every=20,
        eval_every=0,
        checkpoint_every=300,
    )
