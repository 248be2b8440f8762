"""The description of the LSTM: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, field
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family
from jaxlm.nn.config import Adaptive, check_above_zero, check_rate


@dataclass(frozen=True)
class LSTMConfig:
    """Configuration of an LSTM language model: sizes, dropout rates and initialization."""

    kind: Literal["lstm"] = "lstm"
    vocab_size: int = 0
    """Rows of the token table, special tokens included. Default 0: taken from the store's tokenizer."""
    num_layers: int = 1
    """Number of LSTM layers."""
    width: int = 768
    """Width of the embedding, and of each layer's output after its linear layer."""
    units: int = 2048
    """Units of each LSTM layer."""
    dropout_rate: float = 0.1
    """Dropout rate of each layer's output."""
    embedding_dropout_rate: float = 0.1
    """Dropout rate of the embedding."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    forget_bias: float = 1.0
    """Initial bias of the forget gate (Gers et al., 2000; Jozefowicz et al., 2015)."""
    init_std: float = 0.02
    """Standard deviation of the token table and of the linear layers; LSTM kernels are uniform in 1 / sqrt(units)."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        check_above_zero(self, "init_std")
        for name in ("num_layers", "width", "units"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} must be positive, got {getattr(self, name)}; give at least 1")
        for name in ("dropout_rate", "embedding_dropout_rate"):
            check_rate(f"model.{name}", getattr(self, name))
        self.adaptive.check(self.width)


# Section 5, with GPT-1's vocabulary: 56 million parameters, of GPT-1's 117 million.
GPT1_LSTM = LSTMConfig(vocab_size=40_478)

FAMILY = Family(
    config=LSTMConfig,
    title="a recurrent decoder (lstm)",
    role="decoder",
    input_format="gpt1",
    sizes={"lstm": GPT1_LSTM},
    vocab_size=GPT1_LSTM.vocab_size,
    finetuning_rate=6.25e-5,  # GPT-1's, the same framework
    other_sizes={"units": "units"},
    carries=True,
    layers=None,
)
