"""The description of the character Transformer, T12 and T64. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class CharacterTransformerConfig(FamilyConfig):
    """Configuration of a character Transformer: sizes, dropout rates and initialization. Defaults: T12."""

    kind: Literal["character_transformer"] = "character_transformer"
    num_positions: Count = 512
    """Rows of each layer's position table, the length of the longest sequence."""
    num_layers: Count = 12
    """Number of Transformer blocks. Each has a position table of its own."""
    width: Count = 512
    """Width of the states and the embeddings, D. It must be divisible by num_heads."""
    num_heads: Count = 2
    """Attention heads per block."""
    feed_forward_width: Count = 2048
    """Width of the hidden layer of each feed-forward."""
    attention_dropout_rate: Rate = 0.55
    """Dropout rate of the attention weights."""
    relu_dropout_rate: Rate = 0.55
    """Dropout rate of the hidden layer of each feed-forward, after the ReLU."""
    init_std: Positive = 0.02
    """Standard deviation of all initial weights. The paper does not give it."""
    norm_eps: Positive = 1e-5
    """Constant added to the variance in norms."""


# Section 3: the two sizes differ in depth alone. The vocabulary is the bytes.
T12 = CharacterTransformerConfig(vocab_size=256)
T64 = replace(T12, num_layers=64)

FAMILY = Family(
    config=CharacterTransformerConfig,
    title="a decoder (character_transformer)",
    sizes={"t12": T12, "t64": T64},
    keeps_output_layer=False,
    positions="num_positions",
    other_sizes={"num_heads": "heads", "num_positions": "positions"},
)
