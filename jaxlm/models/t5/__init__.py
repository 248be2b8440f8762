"""The description of T5: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Positive, Range


@dataclass(frozen=True)
class T5Config(FamilyConfig):
    """Configuration of a T5: sizes of both stacks, dropout, feed-forward, output and relative positions.

    Defaults: T5 1.0 base (google-research/text-to-text-transfer-transformer, t5/models/gin/models/bi_v1.gin).
    """

    kind: Literal["t5"] = "t5"
    num_encoder_layers: Count = 12
    """Number of Transformer blocks of the encoder."""
    num_layers: Count = 12
    """Number of Transformer blocks of the decoder."""
    width: Count = 768
    """Width of the states and the embeddings, D."""
    num_heads: Count = 12
    """Attention heads per block."""
    head_width: Count = 64
    """Width of the queries, keys and values of a head. num_heads times it may differ from width."""
    feed_forward_width: Count = 3072
    """Width of the hidden layer of each feed-forward."""
    feed_forward: Literal["relu", "geglu"] = "relu"
    """relu: two layers with a ReLU between them (1.0). geglu: a third layer, whose GELU gates the first (1.1; Shazeer,
    2020)."""
    output: Literal["tied", "untied"] = "tied"
    """tied: the scores are products with the token table (1.0). untied: with a table of their own (1.1)."""
    scaled_output: bool = True
    """Multiply the last states by D^-0.5 before the output layer (1.0)."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the embeddings, the attention weights, the residual branches, the hidden layer of the
    feed-forward and the last states. A mask is shared by all positions of a sequence, as in the original code. 1.1: 0
    in pretraining."""
    num_buckets: Annotated[int, Range(4, fix="give 32, as published")] = 32
    """Buckets of relative positions, each with a bias per head. The encoder has half of them for each direction."""
    max_distance: Count = 128
    """Distance from which on all positions are in the last bucket."""
    init_scale: Positive = 1.0
    """Factor of the standard deviations of all initial weights."""
    norm_eps: Positive = 1e-6
    """Constant added to the mean square in norms."""

    @property
    def init_std(self) -> float:
        """The standard deviation with which new output layers begin."""
        return self.init_scale * self.width**-0.5

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if self.num_buckets % 2:
            raise InputError(f"model.num_buckets must be even, got {self.num_buckets}; give 32, as published")
        if self.max_distance <= self.num_buckets // 2:
            raise InputError(
                f"model.max_distance must be above {self.num_buckets // 2}, half of model.num_buckets, got "
                f"{self.max_distance}; give 128, as published"
            )


# The published sizes: t5/models/gin/models/bi_bert_base.gin and t5.1.1.*.gin. The vocabulary has 32,000 pieces and 100
# sentinels; the table has 28 further rows.
T5_BASE = T5Config(vocab_size=32_128)
T5_SMALL = replace(T5_BASE, num_encoder_layers=6, num_layers=6, width=512, num_heads=8, feed_forward_width=2048)
T5_LARGE = replace(T5_BASE, num_encoder_layers=24, num_layers=24, width=1024, num_heads=16, feed_forward_width=4096)
T5_1_1_BASE = replace(T5_BASE, feed_forward_width=2048, feed_forward="geglu", output="untied", scaled_output=False)
T5_1_1_SMALL = replace(T5_1_1_BASE, num_encoder_layers=8, num_layers=8, width=512, num_heads=6, feed_forward_width=1024)
T5_1_1_LARGE = replace(
    T5_1_1_BASE, num_encoder_layers=24, num_layers=24, width=1024, num_heads=16, feed_forward_width=2816
)

FAMILY = Family(
    config=T5Config,
    title="an encoder-decoder (t5)",
    sizes={
        "t5-base": T5_BASE,
        "t5-small": T5_SMALL,
        "t5-large": T5_LARGE,
        "t5-1.1-base": T5_1_1_BASE,
        "t5-1.1-small": T5_1_1_SMALL,
        "t5-1.1-large": T5_1_1_LARGE,
    },
    role="encoder_decoder",
    input_format="t5",
    finetuning_rate=1e-3,
    sees=lambda config: "source",
    objectives=lambda config: ("sequence_to_sequence",),
    layouts=("spans",),
    other_sizes={"num_encoder_layers": "encoder layers", "num_heads": "heads"},
    stacks={"encoder_blocks": "num_encoder_layers", "decoder_blocks": "num_layers"},
    text_layers="num_encoder_layers",
)
