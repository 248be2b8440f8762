"""The views of a sentence in cross-view training: what the modules of its head read of an encoder.

Clark, Luong, Manning and Le, "Semi-supervised sequence modeling with cross-view training", 2018, section 3.3, and the
authors' code (tensorflow/models, cvt_text/task_specific/word_level/tagging_module.py:39-66) for encoders of two
directions. The views of an encoder with MASK are our own. This module does not import JAX.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

ViewName = Literal["full", "forwards", "backwards", "future", "past", "masked", "middle"]
PRIMARY = "primary"  # the module that labels train, whose predictions are the targets of the others


class Part(NamedTuple):
    """The states of a layer, or the half of them that one direction has. middle: layer floor(N / 2) of N."""

    layer: Literal["first", "middle", "last"]
    half: Literal["both", "forward", "backward"] = "both"


class View(NamedTuple):
    """A module of the head.

    parts: the parts of the model's states that it reads. shift: the word whose tag it predicts, counted from the one
    that it reads. activates: False for a module without a ReLU. masks: True if some words of the unlabelled sentences
    are replaced by MASK for it.
    """

    parts: tuple[Part, ...]
    shift: int = 0
    activates: bool = True
    masks: bool = False


_BOTH = (Part("first"), Part("last"))
_FORWARD, _BACKWARD = (Part("first", "forward"),), (Part("first", "backward"),)
OF_DIRECTIONS: Mapping[str, View] = MappingProxyType(
    {
        PRIMARY: View(_BOTH),
        "full": View(_BOTH, activates=False),
        "forwards": View(_FORWARD),
        "backwards": View(_BACKWARD),
        "future": View(_FORWARD, shift=1),
        "past": View(_BACKWARD, shift=-1),
    }
)
"""The modules on states [forward; backward]. A direction of the first layer has read nothing of the other side of the
word."""
OF_MASKED_WORDS: Mapping[str, View] = MappingProxyType(
    {
        PRIMARY: View((Part("last"),)),
        "masked": View((Part("last"),), masks=True),
        "middle": View((Part("middle"),)),
    }
)
"""The modules on an encoder that was pretrained with MASK, whose states have read the whole sentence in each layer."""
