"""Differences between the configs of two runs, or of a run and a command, in words."""

import json
from collections.abc import Mapping
from typing import Any

# Fields of config.json that are hashes of contents, with what a difference means. The first that differs is named.
CONTENTS = {
    "fingerprints.task_data": "the training files have changed",
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
