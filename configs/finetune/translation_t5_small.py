"""Translation from scratch on two CPU cores: an encoder-decoder with the parameters of finetune/translation_small.

T5 1.0's form at 2 + 2 x 192. The feed-forward width is chosen for the number of parameters, 3.4 M with a vocabulary of
8,000. The optimizer is T5's, whose rate is relative to the size of each parameter: with the decoder's AdamW at 1e-3 the
model had less than half the BLEU after the same steps (docs/text_to_text.md).
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.t5 import T5_SMALL
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    model = replace(
        T5_SMALL,
        vocab_size=0,
        num_encoder_layers=2,
        num_layers=2,
        width=192,
        num_heads=6,
        head_width=32,
        feed_forward_width=640,
        dropout_rate=0.1,
    )
    recipe = load_config("finetune/translation_small", FinetuneConfig)
    optimizer = replace(recipe.optimizer, kind="adafactor", peak_lr=0.01)
    return replace(recipe, model=model, optimizer=optimizer, length=64)
