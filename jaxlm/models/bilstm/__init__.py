"""The description of the BiLSTM over words: config, published sizes and properties. The arithmetic is in `model.py`."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig, WordTable, check_filters
from jaxlm.models.views import OF_DIRECTIONS
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Natural, Positive
from jaxlm.wording import counted

NUM_CHARACTERS = 50  # of a word in the rows of tasks, as in jaxlm/text/characters.py


@dataclass(frozen=True)
class BiLSTMConfig(FamilyConfig):
    """Configuration of a BiLSTM over words: the vectors of the words, the layers, and dropout rates.

    Defaults: the tagger of Clark et al. (2018), cvt_text in tensorflow/models.
    """

    kind: Literal["bilstm"] = "bilstm"
    word_width: Natural = 300
    """Width of the trained word vectors. 0: a word is known by its characters alone."""
    character_width: Natural = 50
    """Width of the vector of a character. 0: a word is known by its id alone."""
    filters: tuple[tuple[Count, Count], ...] = ((2, 100), (3, 100), (4, 100))
    """Width and number of the filters of each convolution over the characters of a word."""
    feature_shapes: tuple[tuple[Count, Count], ...] = ()
    """Layers and width of the features of each run in --word-features, from which it is set."""
    feature_norm: Literal["none", "batch"] = "none"
    """Normalization of each layer of --word-features before the layers are added. batch: mean 0 and variance 1 over all
    real words of a batch (bilm-tf), on which the outputs then depend."""
    input_feed_forward_width: Natural = 0
    """Width of a linear layer with a ReLU between the vectors of the words and the first layer. 0: none."""
    num_layers: Count = 2
    """Number of layers."""
    width: Count = 1024
    """Width of the states of both directions together."""
    units: tuple[Count, ...] = (1024, 512)
    """Units of each layer, per direction. Without a projection they are half of the width."""
    projected: bool = True
    """Project the hidden state of each direction to half of the width, in each step."""
    embedding_dropout_rate: Rate = 0.5
    """Dropout rate of the vectors of the words and of their characters."""
    input_feed_forward_dropout_rate: Rate = 0.5
    """Dropout rate of the output of the linear layer before the first layer."""
    dropout_rate: Rate = 0.5
    """Dropout rate of each layer's output."""
    init_std: Positive = 0.02
    """Standard deviation of the word vectors and of heads; kernels of a layer are uniform within 1 / sqrt(units)."""

    @property
    def projection(self) -> int:
        """The width to which the hidden state of each direction is projected; 0: it is not."""
        return self.width // 2 if self.projected else 0

    @property
    def num_characters(self) -> int:
        """The characters of a word that a model reads."""
        return NUM_CHARACTERS if self.character_width else 0

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if not self.word_width and not self.character_width:
            raise InputError("model.word_width and model.character_width must not both be 0; give one of them")
        if len(self.units) != self.num_layers or self.width % 2:
            raise InputError(
                f"model.units must have a number for each of the {counted(self.num_layers, 'layer')}, and model.width "
                f"must be even, got {' '.join(map(str, self.units)) or 'none'} and {self.width}; change one of them"
            )
        if not self.projected and set(self.units) != {self.width // 2}:
            raise InputError(
                f"model.units must be {self.width // 2} each, half of model.width, without model.projected, got "
                f"{' '.join(map(str, self.units))}; change one"
            )
        if self.character_width:
            check_filters(self.filters, self.num_characters)


# The encoder of the taggers of Clark et al. (2018), whose vectors are those of GloVe's 400,000 words.
CVT = BiLSTMConfig(vocab_size=400_000)

FAMILY = Family(
    config=BiLSTMConfig,
    title="a network over words (bilstm)",
    sizes={"bilstm": CVT},
    role="bidirectional",
    input_format="words",
    finetuning_rate=1e-3,
    sees=lambda config: "both",
    objectives=lambda config: (),
    layouts=(),
    characters="num_characters",
    features="feature_shapes",
    word_vectors=WordTable("embeddings/tokens", "word_width"),
    views=OF_DIRECTIONS,
    other_sizes={"units": "units"},
    keeps_output_layer=False,
    stacks={},
)
