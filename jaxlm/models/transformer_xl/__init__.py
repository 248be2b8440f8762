"""The description of Transformer-XL: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, field, replace
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Adaptive, Rate
from jaxlm.ranges import Count, Natural, Positive


@dataclass(frozen=True)
class TransformerXLConfig(FamilyConfig):
    """Configuration of a Transformer-XL: sizes, memory, dropout rates, norms and initialization.

    Defaults: the base model for enwik8 (kimiyoung/transformer-xl, pytorch/run_enwik8_base.sh).
    """

    kind: Literal["transformer_xl"] = "transformer_xl"
    num_layers: Count = 12
    """Number of Transformer blocks."""
    width: Count = 512
    """Width of the states and the embeddings, D. It must be divisible by num_heads, and even."""
    num_heads: Count = 8
    """Attention heads per block."""
    feed_forward_width: Count = 2048
    """Width of the hidden layer of each feed-forward."""
    memory_length: Natural = 512
    """Tokens before a row whose states are kept for it, with data.layout streams. 0: none."""
    clamp_length: Natural = 0
    """Largest distance with an encoding of its own; larger distances have the same one. 0: no limit."""
    same_length: bool = False
    """Each token attends to itself and the memory_length tokens before it, wherever it is in its row. Otherwise a token
    attends to the whole memory and to all tokens before it in its row."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the embeddings, the encodings of distances, the residual branches, the hidden layer of the
    feed-forward, and the last states."""
    attention_dropout_rate: Rate = 0.0
    """Dropout rate of the attention weights."""
    norm: Literal["post", "pre"] = "post"
    """Position of the norms. post: after each residual sum. pre: before each branch, memory included; none at the
    end."""
    attention_biases: Literal["shared", "per_layer"] = "shared"
    """The biases u and v of the attention. shared: one pair for all layers. per_layer: one pair per layer."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    init_std: Positive = 0.02
    """Standard deviation of all initial weights."""
    norm_eps: Positive = 1e-5
    """Constant added to the variance in norms."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if self.width % 2:
            raise InputError(f"model.width must be even, got {self.width}; change it")


# The original scripts, pytorch/run_*.sh. Vocabularies: the symbols of enwik8 as the original reads it, without line
# breaks, and the words of WikiText-103.
ENWIK8 = TransformerXLConfig(vocab_size=204)
ENWIK8_LARGE = replace(
    ENWIK8,
    num_layers=24,
    width=1024,
    feed_forward_width=3072,
    memory_length=768,
    dropout_rate=0.15,
    attention_dropout_rate=0.15,
)
WT103 = TransformerXLConfig(
    vocab_size=267_735,
    num_layers=16,
    width=410,
    num_heads=10,
    feed_forward_width=2100,
    memory_length=150,
    adaptive=Adaptive(cutoffs=(20_000, 40_000, 200_000)),
)
WT103_LARGE = replace(
    WT103,
    num_layers=18,
    width=1024,
    num_heads=16,
    feed_forward_width=4096,
    memory_length=384,
    dropout_rate=0.2,
    attention_dropout_rate=0.2,
    adaptive=replace(WT103.adaptive, divisor=4),
)

FAMILY = Family(
    config=TransformerXLConfig,
    title="a decoder with a memory (transformer_xl)",
    sizes={
        "transformer-xl-enwik8": ENWIK8,
        "transformer-xl-enwik8-large": ENWIK8_LARGE,
        "transformer-xl-wt103": WT103,
        "transformer-xl-wt103-large": WT103_LARGE,
    },
    layouts=("streams", "windows"),
    other_sizes={"num_heads": "heads"},
    carries=True,
    memory_fields=("memory_length", "clamp_length", "same_length"),
    vocabulary_leaves=(r"embeddings/tokens(_\d+)?", "embeddings/output_bias"),
)
