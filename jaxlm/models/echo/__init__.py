"""The description of echo: config, sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class EchoConfig(FamilyConfig):
    """Configuration of an echo: sizes, dropout rate and initialization."""

    kind: Literal["echo"] = "echo"
    num_layers: Count = 2
    """Number of layers."""
    width: Count = 256
    """Width of the states and the embeddings, D."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the embedding and of each layer's branch."""
    init_std: Positive = 0.02
    """Standard deviation of all initial weights."""


ECHO = EchoConfig(vocab_size=8_000)

FAMILY = Family(
    config=EchoConfig,
    title="a toy decoder (echo)",
    role="decoder",
    input_format="gpt1",
    sizes={"echo": ECHO},
    vocab_size=ECHO.vocab_size,
    finetuning_rate=6.25e-5,  # GPT-1's
    carries=True,
    layers=None,
)
