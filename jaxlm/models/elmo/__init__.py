"""The description of ELMo's language model: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig, check_filters
from jaxlm.models.views import OF_DIRECTIONS
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Natural, NotNegative, Range


@dataclass(frozen=True)
class ELMoConfig(FamilyConfig):
    """Configuration of ELMo's bidirectional language model: sizes, clips and dropout. Defaults: bin/train_elmo.py."""

    kind: Literal["elmo"] = "elmo"
    num_layers: Count = 2
    """Number of LSTM layers of each direction."""
    width: Count = 1024
    """Width of the states of both directions together. The token vectors and each direction have half of it."""
    units: Count = 4096
    """Units of each LSTM, before its projection."""
    filters: tuple[tuple[Count, Count], ...] = (
        *((1, 32), (2, 32), (3, 64), (4, 128)),
        *((5, 256), (6, 512), (7, 1024)),
    )
    """Width and number of the filters of each convolution over the characters of a token."""
    character_width: Count = 16
    """Width of the vector of a character."""
    num_characters: Annotated[int, Range(3, 10_000)] = 50
    """Characters of a token, its two marks and padding included. Longer words are truncated."""
    num_highways: Natural = 2
    """Number of highway layers after the convolutions."""
    cell_clip: NotNegative = 3.0
    """Largest absolute value of an LSTM's cell. 0: no limit."""
    projection_clip: NotNegative = 3.0
    """Largest absolute value of an LSTM's output, before the residual connection. 0: no limit."""
    residual: bool = True
    """Add the input of each layer but the first to its output."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the input of each layer, and of the output of the last one."""
    negatives: Natural = 8192
    """Sampled ids of the softmax in training. 0, or at least the vocabulary: all ids. Evaluation uses all ids."""

    @property
    def init_std(self) -> float:
        """The standard deviation of the output layer, with which task heads begin."""
        return self.projection**-0.5

    @property
    def projection(self) -> int:
        """The width of the token vectors and of the states of one direction."""
        return self.width // 2

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if self.width % 2:
            raise InputError(f"model.width must be even, for two directions, got {self.width}; give another")
        check_filters(self.filters, self.num_characters)


# Section 3.4 with the vocabulary of the One Billion Word Benchmark, <S>, </S> and <UNK> included.
ELMO = ELMoConfig(vocab_size=793_471)
# Published later, with 28.0 and 13.6 million parameters without the softmax, of 93.6 million.
ELMO_MEDIUM = replace(ELMO, width=512, units=2048, num_highways=1)
ELMO_SMALL = replace(ELMO, width=256, units=1024, num_highways=1)

FAMILY = Family(
    config=ELMoConfig,
    title="a bidirectional language model (elmo)",
    sizes={"elmo": ELMO, "elmo-medium": ELMO_MEDIUM, "elmo-small": ELMO_SMALL},
    role="bidirectional",
    input_format="words",
    sees=lambda config: "both",
    objectives=lambda config: ("bidirectional_lm",),
    layouts=("sentence_streams",),
    characters="num_characters",
    views=OF_DIRECTIONS,
    sentence_marks=("<S>", "</S>"),
    other_sizes={"units": "units"},
    carries=True,
    keeps_output_layer=False,
    stacks={},
    vocabulary_leaves=(),
)
