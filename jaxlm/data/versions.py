"""The versions of the schemes that make rows of a store: a run records those it began with, and keeps them.

A version changes when the same store, config and seed may give other rows. `config.json` holds those of a run's layout
as `fingerprints.data_order`, so that a run which is resumed goes on with the rows it was made with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.errors import InputError

# The versions that rows of a layout depend on.
_OF_LAYOUT = {
    "windows": ("order",),
    "packed": ("packed",),
    "pairs": ("order", "chunks", "pairs"),
    "streams": ("streams",),
}


@dataclass(frozen=True)
class DataVersions:
    """The versions that a run reads its stores under; without arguments those of a new run.

    order: which row an index is, and windows. packed: rows of packed documents; in version 1 the id that ends documents
    is no input and the first token of a document no target. chunks: what sentence pairs are made from. pairs: what is
    drawn of them; in version 1 a random second part is the first stretch found, whatever data.random_candidates says.
    streams: which tokens a row of a stream has.
    """

    order: int = 1
    packed: int = 2
    chunks: int = 1
    pairs: int = 2
    streams: int = 1

    def recorded(self, layout: str) -> int | list[int]:
        """The versions that rows of a layout depend on, as `fingerprints.data_order` has them."""
        versions = [getattr(self, name) for name in _OF_LAYOUT.get(layout, _OF_LAYOUT["windows"])]
        return versions if len(versions) > 1 else versions[0]

    def begins_documents(self, end: int | None) -> bool:
        """Return whether a packed document begins with `end`, the id that ends documents; None: there is no such id."""
        return self.packed >= 2 and end is not None


CURRENT = DataVersions()


def saved_versions(config: Mapping[str, Any], name: str) -> DataVersions:
    """The versions that a run's saved config names; the current ones where it has no data order.

    name: of the run, for people. InputError where a version is newer than this jaxlm's.
    """
    order = config.get("fingerprints", {}).get("data_order")
    layout = config.get("data", {}).get("layout", "windows")
    if order is None:
        return CURRENT
    fields = _OF_LAYOUT.get(layout, _OF_LAYOUT["windows"])
    values = order if isinstance(order, list) else [order]
    known = [range(1, getattr(CURRENT, field) + 1) for field in fields]
    if len(values) != len(fields) or any(value not in those for value, those in zip(values, known, strict=True)):
        raise InputError(
            f"{name}: data_order must be at most {CURRENT.recorded(layout)} for data.layout {layout}, got {order}; use "
            "the version of jaxlm that made the run"
        )
    return replace(CURRENT, **dict(zip(fields, values, strict=True)))
