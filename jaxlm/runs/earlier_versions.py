"""Conversion of the config.json of earlier versions to the current format.

Runs made by commit 192edfa and later can be read. A field that is added to the configs gets a line here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.data.config import MEMBERS

# Options that config.json lacks in runs of earlier versions, with the values that these runs used. Such a run resumes
# without them, and with no other values.
ADDED_OPTIONS: dict[str, Any] = {
    "special_tokens": "gpt1",
    "patience": None,
    "select": "last",
    "custom.separator": "auto",
    "data.reset_probability": 0.0,
    "model.adaptive.clusters": "projected",  # where it makes a difference, unprojected: see `upgraded`
}
# The same for all fields.
ADDED_FIELDS = {"fingerprints.validation": None} | ADDED_OPTIONS


def upgraded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config in the current format.

    Earlier versions scored the tails of an adaptive softmax from states that did not go through a projection.
    """
    model = config.get("model")
    adaptive = model.get("adaptive") if isinstance(model, dict) else None
    if isinstance(adaptive, dict) and adaptive.get("divisor", 1) != 1:
        return _with_missing(config, ("model", "adaptive", "clusters"), "unprojected")
    return dict(config)


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with missing options filled in with the values that the run used."""
    values = upgraded(config)
    data = values.get("data")
    layout = MEMBERS.get(str(data.get("layout"))) if isinstance(data, dict) else None
    for name, before in ADDED_OPTIONS.items():
        part, _, field = name.partition(".")
        if part != "data" or hasattr(layout, field):  # a layout has no fields of another one
            values = _with_missing(values, name.split("."), before)
    return values


def _with_missing(values: Mapping[str, Any], name: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a config with `value` for the field `name`, if its part is there and lacks it."""
    first, *rest = name
    if not rest:
        return {first: value, **values}
    part = values.get(first)
    return {**values, first: _with_missing(part, rest, value)} if isinstance(part, dict) else dict(values)
