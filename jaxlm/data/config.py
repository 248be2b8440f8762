"""Data configs of a run: stores, their mixture, and the layout of text in rows.

Each layout is a dataclass with its own fields in `jaxlm/data/layouts/`; `DataConfig` is their union, discriminated by
`layout`. This module does not import JAX.
"""

import typing
from collections.abc import Mapping

from jaxlm.data.layouts.packed import Packed
from jaxlm.data.layouts.pairs import SentencePairs
from jaxlm.data.layouts.sentence_streams import SentenceStreams
from jaxlm.data.layouts.spans import Spans
from jaxlm.data.layouts.streams import LONGER, Streams
from jaxlm.data.layouts.windows import Windows
from jaxlm.errors import InputError
from jaxlm.wording import either

__all__ = [
    "LONGER",
    "MEMBERS",
    "DataConfig",
    "Packed",
    "SentencePairs",
    "SentenceStreams",
    "Spans",
    "Streams",
    "Windows",
    "check_carries",
    "check_order",
]

DataConfig = Windows | Packed | SentencePairs | Streams | Spans | SentenceStreams

# Dataclass of each layout.
MEMBERS: dict[str, type[DataConfig]] = {member.layout: member for member in typing.get_args(DataConfig)}


def check_carries(data: DataConfig, option: str) -> None:
    """Raise InputError if `option` is given for a layout whose rows do not continue each other."""
    if not data.carries:
        names = either([name for name, member in MEMBERS.items() if member.carries and member.whole_text])
        raise InputError(f"layout must be {names} with {option}, got {data.layout}; give --layout {names}")


def check_order(saved: Mapping[str, typing.Any], name: str) -> None:
    """Raise InputError if the rows of a run are of another version than this jaxlm makes.

    saved: its config.json. name: of the run, for messages.
    """
    order = saved.get("fingerprints", {}).get("data_order")
    layout = saved.get("data", {}).get("layout", Windows.layout)
    known = MEMBERS.get(layout, Windows).data_order
    if order is not None and order != known:
        raise InputError(
            f"{name}: data_order must be {known} for data.layout {layout}, got {order}; use the version of jaxlm that "
            "made the run"
        )
