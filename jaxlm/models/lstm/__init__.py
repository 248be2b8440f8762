"""The description of the LSTM: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, field
from typing import Literal

from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Adaptive, Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class LSTMConfig(FamilyConfig):
    """Configuration of an LSTM language model: sizes, dropout rates and initialization."""

    kind: Literal["lstm"] = "lstm"
    num_layers: Count = 1
    """Number of LSTM layers."""
    width: Count = 768
    """Width of the embedding, and of each layer's output after its linear layer."""
    units: Count = 2048
    """Units of each LSTM layer."""
    dropout_rate: Rate = 0.1
    """Dropout rate of each layer's output."""
    embedding_dropout_rate: Rate = 0.1
    """Dropout rate of the embedding."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    forget_bias: float = 1.0
    """Initial bias of the forget gate (Gers et al., 2000; Jozefowicz et al., 2015)."""
    init_std: Positive = 0.02
    """Standard deviation of the token table and of the linear layers; LSTM kernels are uniform within 1 /
    sqrt(units)."""


# Section 5, with GPT-1's vocabulary: 56 million parameters, of GPT-1's 117 million.
GPT1_LSTM = LSTMConfig(vocab_size=40_478)

FAMILY = Family(
    config=LSTMConfig,
    title="a recurrent decoder (lstm)",
    sizes={"lstm": GPT1_LSTM},
    other_sizes={"units": "units"},
    carries=True,
    stacks={},
)
