"""The description of BERT: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family
from jaxlm.nn.config import ActivationName, check_above_zero, check_rate


@dataclass(frozen=True)
class BertConfig:
    """Configuration of a BERT: sizes, dropout rates, attention and initialization."""

    kind: Literal["bert"] = "bert"
    vocab_size: int = 0
    """Rows of the token table, special tokens included. Default 0: taken from the store's tokenizer."""
    num_positions: int = 512
    """Rows of the position table, the length of the longest sequence."""
    num_types: int = 2
    """Rows of the segment-type table, at least 2: A and B."""
    num_layers: int = 12
    """Number of Transformer blocks."""
    width: int = 768
    """Width of the states and the embeddings, D. It must be divisible by num_heads."""
    num_heads: int = 12
    """Attention heads per block."""
    feed_forward_width: int = 3072
    """Width of the hidden layer of each feed-forward."""
    dropout_rate: float = 0.1
    """Dropout rate of each residual branch."""
    embedding_dropout_rate: float = 0.1
    """Dropout rate of the normed sum of the embeddings. The original has one rate for this and the branches."""
    attention_dropout_rate: float = 0.1
    """Dropout rate of the attention weights."""
    activation: ActivationName = "gelu_tanh"
    """gelu_tanh: that of google-research/bert. gelu_erf: that of Hugging Face and most checkpoints trained there."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """causal: a token attends only to itself and those before it (the paper's left-to-right ablation)."""
    init_std: float = 0.02
    """Deviation of the normal, truncated at two deviations, of all initial weights. Their own deviation is 0.88 of it.
    0.02 is the original's for width 768. Use 0.02 sqrt(768 / D) for a narrow model."""
    norm_eps: float = 1e-12
    """Constant added to the variance in norms."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        check_above_zero(self, "init_std", "norm_eps")
        for name in ("num_positions", "num_types", "num_layers", "width", "num_heads", "feed_forward_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} must be above 0, got {getattr(self, name)}; give at least 1")
        if self.width % self.num_heads:
            raise InputError(
                f"model.width must be divisible by model.num_heads {self.num_heads}, got {self.width}; change one"
            )
        for name in ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"):
            check_rate(f"model.{name}", getattr(self, name))
        if self.num_types < 2:
            raise InputError(
                f"model.num_types must be at least 2, got {self.num_types}; give one for each segment of a pair"
            )


# Section 3. The published uncased vocabulary has 30,522 entries, the cased one 28,996.
BERT_BASE = BertConfig(vocab_size=30_522)


BERT_LARGE = replace(BERT_BASE, num_layers=24, width=1024, num_heads=16, feed_forward_width=4096)


# Table 6: layers x width x heads; the feed-forward is four times as wide (section 3). Two rows are BASE and LARGE.
TABLE_6 = {
    f"{layers}x{width}x{heads}": replace(
        BERT_BASE, num_layers=layers, width=width, num_heads=heads, feed_forward_width=4 * width
    )
    for layers, width, heads in [
        (3, 768, 12),
        (6, 768, 3),
        (6, 768, 12),
        (12, 768, 12),
        (12, 1024, 16),
        (24, 1024, 16),
    ]
}

FAMILY = Family(
    config=BertConfig,
    title="an encoder (bert)",
    role="encoder",
    input_format="bert",
    sizes={"bert-base": BERT_BASE, "bert-large": BERT_LARGE},
    vocab_size=BERT_BASE.vocab_size,
    finetuning_rate=2e-5,  # from the example of google-research/bert's README
    sees=lambda config: "left" if config.attention == "causal" else "both",
    objectives=lambda config: ("language_model",) if config.attention == "causal" else ("masked_lm",),
    layouts=("pairs", "windows", "packed"),
    positions="num_positions",
    segment_types="num_types",
    other_sizes={"num_heads": "heads", "num_positions": "positions"},
    keeps_output_layer=False,
    pooler="pooler",
)
