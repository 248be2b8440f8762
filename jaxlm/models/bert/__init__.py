"""The description of BERT: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from jaxlm.models.family import Family, FamilyConfig
from jaxlm.models.views import OF_MASKED_WORDS
from jaxlm.nn.config import ActivationName, Rate
from jaxlm.ranges import Count, Positive, Range


@dataclass(frozen=True)
class BertConfig(FamilyConfig):
    """Configuration of a BERT: sizes, dropout rates, attention and initialization."""

    kind: Literal["bert"] = "bert"
    num_positions: Count = 512
    """Rows of the position table, the length of the longest sequence."""
    num_types: Annotated[int, Range(2, fix="give one for each segment of a pair")] = 2
    """Rows of the segment-type table, at least 2: A and B."""
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
    """Dropout rate of the normed sum of the embeddings. The original has one rate for this and the branches."""
    attention_dropout_rate: Rate = 0.1
    """Dropout rate of the attention weights."""
    activation: ActivationName = "gelu_tanh"
    """gelu_tanh: that of google-research/bert. gelu_erf: that of Hugging Face and most checkpoints trained there."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """causal: a token attends only to itself and those before it (the paper's left-to-right ablation)."""
    init_std: Positive = 0.02
    """Deviation of the normal, truncated at two deviations, of all initial weights. Their own deviation is 0.88 of it.
    0.02 is the original's for width 768. Use 0.02 sqrt(768 / D) for a narrow model."""
    norm_eps: Positive = 1e-12
    """Constant added to the variance in norms."""


# Section 3. The published uncased vocabulary has 30,522 entries, the cased one 28,996.
BERT_BASE = BertConfig(vocab_size=30_522)
BERT_LARGE = replace(BERT_BASE, num_layers=24, width=1024, num_heads=16, feed_forward_width=4096)

# Table 6: layers x width x heads; the feed-forward is four times as wide (section 3). Two rows are BASE and LARGE.
TABLE_6 = {
    f"{layers}x{width}x{heads}": replace(
        BERT_BASE, num_layers=layers, width=width, num_heads=heads, feed_forward_width=4 * width
    )
    for layers, width, heads in [(3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16)]
}

FAMILY = Family(
    config=BertConfig,
    title="an encoder (bert)",
    role="encoder",
    input_format="bert",
    sizes={"bert-base": BERT_BASE, "bert-large": BERT_LARGE},
    finetuning_rate=2e-5,  # from the example of google-research/bert's README
    sees=lambda config: "left" if config.attention == "causal" else "both",
    objectives=lambda config: ("language_model",) if config.attention == "causal" else ("masked_lm",),
    layouts=("pairs", "windows", "packed"),
    positions="num_positions",
    segment_types="num_types",
    other_sizes={"num_heads": "heads", "num_positions": "positions"},
    keeps_output_layer=False,
    pooler="pooler",
    views=OF_MASKED_WORDS,
)
