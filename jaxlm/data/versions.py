"""Versions of the schemes that make rows from a store; each run records the versions it began with.

A version changes when the same store, config and seed may give other rows. `config.json` holds the versions of a run's
layout as `fingerprints.data_order`, so that a resumed run continues with the same rows.
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
    """Versions under which a run reads its stores. The defaults are those of a new run.

    order: windows, and the order of rows. packed: packed rows; in version 1 the end-of-document id is not an input and
    the first token of a document is not a target. chunks: chunks of sentence pairs. pairs: sampling of pairs; in
    version 1 a random second segment is the first span found, regardless of data.random_candidates. streams: rows of
    streams.
    """

    order: int = 1
    packed: int = 2
    chunks: int = 1
    pairs: int = 2
    streams: int = 1

    def recorded(self, layout: str) -> int | list[int]:
        """Return the versions that rows of a layout depend on, as recorded in `fingerprints.data_order`."""
        versions = [getattr(self, name) for name in _OF_LAYOUT.get(layout, _OF_LAYOUT["windows"])]
        return versions if len(versions) > 1 else versions[0]

    def begins_documents(self, end: int | None) -> bool:
        """Return whether a packed document begins with `end`, the end-of-document id (None: the tokenizer has none)."""
        return self.packed >= 2 and end is not None


CURRENT = DataVersions()


def saved_versions(config: Mapping[str, Any], name: str) -> DataVersions:
    """Return the versions recorded in a run's saved config, or the current ones if it has no data order.

    name: of the run, for messages. Raises InputError if a version is newer than this jaxlm's.
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
