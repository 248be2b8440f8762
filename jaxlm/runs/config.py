"""Configs that runs save: the choices of trackers, the format of earlier versions, and differences in words.

Runs made by commit 192edfa and later can be read. A field that is added to the configs gets a line here. A run of a
later release is refused, because a field that this release does not know may change what the others mean. This module
does not import JAX.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from jaxlm.data.config import MEMBERS
from jaxlm.models import DEFAULT_MODEL, FAMILIES
from jaxlm.version import __version__

TrackerKind = Literal["wandb", "mlflow", "trackio"]

RELEASE = "jaxlm"  # the field of config.json with the version that wrote it; runs from before 0.1.0 lack it

# Options that config.json lacks in runs of earlier versions, with the values that these runs used. Such a run resumes
# without them, and with no other values.
ADDED_OPTIONS: dict[str, Any] = {
    "special_tokens": "gpt1",
    "patience": None,
    "eval_rows": None,
    "as_text": False,
    "options.languages": "",
    "options.prefix": "",
    "options.target_length": 128,
    "options.beams": 1,
    "options.length_penalty": 1.0,
    "select": "last",
    "loss_per": "token",
    "data.cache": "",
    "data.cache_size": 64.0,
    "word_features": [],
    "word_vectors": None,
    "freeze_words": False,
    "mix_penalty": 0.0,
    "model.feature_norm": "none",
    "ema_of": "after",
    "views": None,
    "unlabelled_dropout_rate": 0.2,
    "unlabelled_mask_rate": 0.15,
    "biattention": "pair",
    "maxout_reduction": 2,
    "unlabelled": None,
    "custom.separator": "auto",
    "data.reset_probability": 0.0,
    "data.order": "rows",
    "execution.deterministic": False,
    "model.input_feed_forward_width": 0,
    "model.input_feed_forward_dropout_rate": 0.5,
    "model.adaptive.clusters": "projected",  # where it makes a difference, unprojected: see `upgraded`
}
_MASKS = "dropout_bits"  # the option that earlier versions had, of `execution`
# The same for all fields.
ADDED_FIELDS = dict.fromkeys(f"fingerprints.{name}" for name in ("validation", "unlabelled", "word_vectors"))
ADDED_FIELDS |= ADDED_OPTIONS


def upgraded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config in the current format.

    Earlier versions scored the tails of an adaptive softmax from states that did not go through a projection. They had
    other dropout masks, and an option for their generator; and JAX's splash kernel in place of `flash`.
    """
    execution = config.get("execution")
    if isinstance(execution, dict):
        execution = {name: value for name, value in execution.items() if name != _MASKS}
        if execution.get("attention") == "splash":
            execution["attention"] = "flash"
        config = {**config, "execution": execution}
    model = config.get("model")
    adaptive = model.get("adaptive") if isinstance(model, dict) else None
    if isinstance(adaptive, dict) and adaptive.get("divisor", 1) != 1:
        return _with_missing(config, ("model", "adaptive", "clusters"), "unprojected")
    return dict(config)


def is_later(version: object) -> bool:
    """Return True for a version of a later minor release than this one. ValueError if it is not a version."""
    found, own = (re.match(r"(\d+)\.(\d+)", str(text)) for text in (version, __version__))
    if found is None or own is None:
        raise ValueError(f"{RELEASE} must be a version such as {__version__}, got {version!r}")
    return tuple(map(int, found.groups())) > tuple(map(int, own.groups()))


def has_earlier_masks(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json, as it was read, of a run with the dropout masks of earlier versions."""
    rates = (value for name, value in flat(config).items() if name.endswith("dropout_rate"))
    return _MASKS in (config.get("execution") or {}) and any(isinstance(rate, float) and rate > 0 for rate in rates)


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with missing options filled in with the values that the run used."""
    values = upgraded(config)
    data, model = values.get("data"), values.get("model")
    kinds = {"data": MEMBERS.get(str(data.get("layout"))) if isinstance(data, dict) else None}
    if isinstance(model, dict) and (family := FAMILIES.get(model.get("kind", DEFAULT_MODEL.kind))):
        kinds["model"] = family.config
    for name, before in ADDED_OPTIONS.items():
        part, *fields = name.split(".")
        if part not in kinds or fields[0] in _fields(kinds[part]):  # a layout or a model has no fields of another one
            values = _with_missing(values, name.split("."), before)
    return values


def _fields(kind: type | None) -> Collection[str]:
    return getattr(kind, "__dataclass_fields__", ())


def _with_missing(values: Mapping[str, Any], name: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a config with `value` for the field `name`, if its part is there and lacks it."""
    first, *rest = name
    if not rest:
        return {first: value, **values}
    part = values.get(first)
    return {**values, first: _with_missing(part, rest, value)} if isinstance(part, dict) else dict(values)


# Fields of config.json that are hashes of contents, with what a difference means. The first that differs is named.
CONTENTS = {
    "fingerprints.task_data": "the training files have changed",
    "fingerprints.unlabelled": "the unlabelled sentences have changed",
    "fingerprints.word_vectors": "the word vectors have changed",
    "fingerprints.stores": "the token stores hold another text",
    "fingerprints.validation": "the validation stores hold another text, and training depends on their losses",
    "fingerprints.tokenizer": "the tokenizer is another one",
    "fingerprints.start": "the start has other parameters",
}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def shown(fields: Mapping[str, Any], name: str) -> str:
    """Return the value of a field as JSON, or `absent`."""
    return json.dumps(fields[name]) if name in fields else "absent"


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the fields that differ between two flat configs, sorted."""
    return [name for name in sorted(one.keys() | other.keys()) if not _same(one, other, name)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Return True if a field has the same value in two flat configs. 10 and 10.0 are the same number."""
    values = (one.get(name), other.get(name))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return values[0] == values[1]
    return shown(one, name) == shown(other, name)


def in_words(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the differences of two flat configs, as `field: saved -> given`.

    Contents that differ are named in a sentence. Fields that follow from others that differ are left out.
    """
    names = differing(saved, given)
    sentences = [sentence for name, sentence in CONTENTS.items() if name in names][:1]
    names = [name for name in names if not name.startswith("fingerprints.")]
    derived = {"start_trained_length", "num_steps" if given.get("num_epochs") is not None else ""}
    if given.get("learning_rates") == [given.get("optimizer.peak_lr")]:
        derived.add("learning_rates")
    typed = [name for name in names if name not in derived] if sentences or set(names) - derived else names
    return sentences + [f"{name}: {shown(saved, name)} -> {shown(given, name)}" for name in typed]
