"""pretrain/lstm over streams: the state is carried from one batch to the next, and emptied in 1 % of the rows.

Without emptied states, training sees an empty one only at the beginning of its streams, and text that begins with one,
as in jaxlm.generate and in fine-tuning, may be predicted badly (docs/lstm.md). The probability is that of Melis et al.
(2018).
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.data.config import Streams
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(load_config("pretrain/lstm", PretrainConfig), data=Streams(reset_probability=0.01))
