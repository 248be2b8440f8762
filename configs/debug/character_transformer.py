"""A toy character Transformer whose runs take seconds on a CPU, for experiments and scripts. It reads any store."""

from jaxlm.models.character_transformer import CharacterTransformerConfig
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=CharacterTransformerConfig(
            num_layers=4,
            width=32,
            num_heads=4,
            feed_forward_width=128,
            attention_dropout_rate=0.1,
            relu_dropout_rate=0.1,
            init_std=0.1,
        ),
        objective=LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.9, peak_lr=0.03, warmup=0, decay="constant", weight_decay=0.0, clip_norm=1.0
        ),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
