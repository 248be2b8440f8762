"""The description of the MT-LSTM: config, published sizes and properties. The arithmetic is in `model.py`."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.models.family import Family, FamilyConfig, WordTable
from jaxlm.nn.config import Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class MTLSTMConfig(FamilyConfig):
    """Configuration of an MT-LSTM: sizes, dropout and initialization. Defaults: McCann et al. (2017), section 3."""

    kind: Literal["mt_lstm"] = "mt_lstm"
    num_layers: Count = 2
    """Number of LSTM layers of the encoder, and of the decoder."""
    width: Count = 600
    """Units of each layer of the decoder. Each direction of the encoder has half of them."""
    word_width: Count = 300
    """Width of the vectors of the words, of the source and of the target."""
    dropout_rate: Rate = 0.2
    """Dropout rate of the word vectors, between layers, and of the last states of encoder and decoder."""
    init_range: Positive = 0.1
    """Largest absolute value of the initial parameters, which are uniform."""

    @property
    def init_std(self) -> float:
        """The standard deviation with which new output layers begin."""
        return self.init_range / math.sqrt(3)

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        super().check()
        if self.width % 2:
            raise InputError(f"model.width must be even, for two directions, got {self.width}; give another")


# Section 3, with at most 50,000 words of each language (OpenNMT-py/preprocess.py in salesforce/cove).
MT_LSTM = MTLSTMConfig(vocab_size=50_000)

FAMILY = Family(
    config=MTLSTMConfig,
    title="a translation model (mt_lstm)",
    sizes={"mt-lstm": MT_LSTM},
    role="encoder_decoder",
    input_format="t5",
    finetuning_rate=1.0,
    sees=lambda config: "source",
    objectives=lambda config: (),
    layouts=(),
    word_vectors=WordTable("embeddings/source_tokens", "word_width"),
    other_sizes={"word_width": "wide words"},
    keeps_output_layer=False,
    stacks={},
    vocabulary_leaves=("embeddings/(source|target)_tokens",),
)
