"""The description of AWD-LSTM: config, published sizes and properties. The arithmetic is in `model.py`."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxlm.models.family import Family, FamilyConfig
from jaxlm.nn.config import Adaptive, Rate
from jaxlm.ranges import Count, Positive


@dataclass(frozen=True)
class AWDLSTMConfig(FamilyConfig):
    """Configuration of an AWD-LSTM: sizes, dropout rates and initialization.

    Defaults: the README of the original code for the Penn Treebank (salesforce/awd-lstm-lm).
    """

    kind: Literal["awd_lstm"] = "awd_lstm"
    num_layers: Count = 3
    """Number of LSTM layers."""
    width: Count = 400
    """Width of the embedding, and units of the last layer, whose output is scored by the token table."""
    units: Count = 1150
    """Units of each LSTM layer but the last."""
    word_dropout_rate: Rate = 0.1
    """Dropout rate of whole words: a dropped word is zero at all its occurrences in a batch. The output layer uses the
    whole table."""
    embedding_dropout_rate: Rate = 0.4
    """Dropout rate of the embedding. The mask is the same at all positions of a row."""
    recurrent_dropout_rate: Rate = 0.5
    """Dropout rate of the recurrent kernels (weight drop). The mask is the same for all rows and positions."""
    dropout_rate: Rate = 0.25
    """Dropout rate between two layers. The mask is the same at all positions of a row."""
    output_dropout_rate: Rate = 0.4
    """Dropout rate of the last layer's output. The mask is the same at all positions of a row."""
    output_bias: bool = True
    """Add a bias to the scores of the words. ULMFiT's code has none."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    init_range: Positive = 0.1
    """The token table is uniform from -init_range to init_range; LSTM parameters within 1 / sqrt(units)."""

    @property
    def init_std(self) -> float:
        """The standard deviation of the token table, with which task heads begin."""
        return self.init_range / math.sqrt(3)

    def units_of(self, layer: int) -> int:
        """Return the units of a layer, counted from 0."""
        return self.width if layer == self.num_layers - 1 else self.units


# The README's commands, with the vocabularies of the data sets.
AWD_LSTM_PTB = AWDLSTMConfig(vocab_size=10_000)
AWD_LSTM_WT2 = replace(AWD_LSTM_PTB, vocab_size=33_278, embedding_dropout_rate=0.65, dropout_rate=0.2)

FAMILY = Family(
    config=AWDLSTMConfig,
    title="a recurrent decoder (awd_lstm)",
    sizes={"awd-lstm-ptb": AWD_LSTM_PTB, "awd-lstm-wt2": AWD_LSTM_WT2},
    finetuning_rate=1e-2,  # ULMFiT's
    other_sizes={"units": "units"},
    carries=True,
    stacks={},
    vocabulary_leaves=(r"embeddings/tokens(_\d+)?", "embeddings/output_bias"),
)
