"""The description of GPT-1 and GPT-2: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, field, replace
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import ActivationName, Adaptive, Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class GPTConfig(FamilyConfig):
    """Configuration of a GPT: sizes, dropout rates, norms and initialization."""

    kind: Literal["gpt"] = "gpt"
    num_positions: Count = 512
    """Rows of the position table, the length of the longest sequence."""
    num_layers: Count = 12
    """Number of Transformer blocks."""
    width: Count = 768
    """Width of the states and the embeddings, D. It must be divisible by num_heads."""
    num_heads: Count = 12
    """Attention heads per block."""
    feed_forward_width: Count = 3072
    """Width of the hidden layer of each feed-forward."""
    dropout_rate: Rate = 0.1
    """Dropout rate of each residual branch."""
    embedding_dropout_rate: Rate = 0.1
    """Dropout rate of the sum of the embeddings."""
    attention_dropout_rate: Rate = 0.1
    """Dropout rate of the attention weights."""
    norm: Literal["post", "pre"] = "post"
    """Position of the norms. post: after each residual sum (GPT-1). pre: before each branch and at the end (GPT-2)."""
    activation: ActivationName = "gelu_tanh"
    """Activation of the feed-forward. gelu_tanh: the tanh approximation. gelu_erf: exact."""
    tables: Literal["two", "one"] = "two"
    """two: separate token and position tables, as in the paper. one: a joint table, as in GPT-1's original code. Its
    dropout is applied to the table, and the softmax includes the rows of the positions (train.py:149-178)."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    init_std: Positive = 0.02
    """Standard deviation of all initial weights. 0.02 is the papers' for width 768. Use 0.02 sqrt(768 / D) for a
    narrow model."""
    residual_init: Literal["plain", "scaled"] = "plain"
    """Initialization of residual output projections. scaled: std init_std / sqrt(2 N) (GPT-2, section 2.3). plain:
    std init_std, as in both original codes."""
    norm_eps: Positive = 1e-5
    """Constant added to the variance in norms."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if self.tables == "one" and self.adaptive.cutoffs:
            cutoffs = " ".join(map(str, self.adaptive.cutoffs))
            raise InputError(
                f"model.adaptive.cutoffs must be empty with model.tables one, got {cutoffs}; give --model.tables two"
            )


# Section 4.1. The published vocabulary has 40,478 entries (40,000 merges); fine-tuning adds three.
GPT1 = GPTConfig(vocab_size=40_478)

# GPT-2's table 2, smallest to largest (its counts, 117M and 345M, are of the models with 124M and 355M parameters).
GPT2 = GPTConfig(vocab_size=50_257, num_positions=1024, norm="pre", residual_init="scaled")
GPT2_MEDIUM = replace(GPT2, num_layers=24, width=1024, num_heads=16, feed_forward_width=4096)
GPT2_LARGE = replace(GPT2, num_layers=36, width=1280, num_heads=20, feed_forward_width=5120)
GPT2_XL = replace(GPT2, num_layers=48, width=1600, num_heads=25, feed_forward_width=6400)

FAMILY = Family(
    config=GPTConfig,
    title="a decoder (gpt)",
    sizes={"gpt1": GPT1, "gpt2": GPT2, "gpt2-medium": GPT2_MEDIUM, "gpt2-large": GPT2_LARGE, "gpt2-xl": GPT2_XL},
    positions="num_positions",
    other_sizes={"num_heads": "heads", "num_positions": "positions"},
)
