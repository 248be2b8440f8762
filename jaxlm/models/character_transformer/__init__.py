"""The description of the character Transformer, T12 and T64. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family
from jaxlm.nn.config import check_above_zero, check_rate


@dataclass(frozen=True)
class CharacterTransformerConfig:
    """Configuration of a character Transformer: sizes, dropout rates and initialization. Defaults: T12."""

    kind: Literal["character_transformer"] = "character_transformer"
    vocab_size: int = 0
    """Rows of the token table, special tokens included. Default 0: taken from the store's tokenizer."""
    num_positions: int = 512
    """Rows of each layer's position table, the length of the longest sequence."""
    num_layers: int = 12
    """Number of Transformer blocks. Each has a position table of its own."""
    width: int = 512
    """Width of the states and the embeddings, D. It must be divisible by num_heads."""
    num_heads: int = 2
    """Attention heads per block."""
    feed_forward_width: int = 2048
    """Width of the hidden layer of each feed-forward."""
    attention_dropout_rate: float = 0.55
    """Dropout rate of the attention weights."""
    relu_dropout_rate: float = 0.55
    """Dropout rate of the hidden layer of each feed-forward, after the ReLU."""
    init_std: float = 0.02
    """Standard deviation of all initial weights. The paper does not give it."""
    norm_eps: float = 1e-5
    """Constant added to the variance in norms."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        check_above_zero(self, "init_std", "norm_eps")
        for name in ("attention_dropout_rate", "relu_dropout_rate"):
            check_rate(f"model.{name}", getattr(self, name))
        for name in ("num_positions", "num_layers", "width", "num_heads", "feed_forward_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} must be above 0, got {getattr(self, name)}; give at least 1")
        if self.width % self.num_heads:
            raise InputError(
                f"model.width must be divisible by model.num_heads {self.num_heads}, got {self.width}; change one"
            )


# Section 3: the two sizes differ in depth alone. The vocabulary is the bytes.
T12 = CharacterTransformerConfig(vocab_size=256)
T64 = replace(T12, num_layers=64)

FAMILY = Family(
    config=CharacterTransformerConfig,
    title="a decoder (character_transformer)",
    role="decoder",
    input_format="gpt1",
    sizes={"t12": T12, "t64": T64},
    vocab_size=T12.vocab_size,
    finetuning_rate=6.25e-5,  # GPT-1's; the paper does not fine-tune
    keeps_output_layer=False,
    positions="num_positions",
    other_sizes={"num_heads": "heads", "num_positions": "positions"},
)
