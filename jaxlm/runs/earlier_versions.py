"""Conversion of the config.json of earlier versions to the current format."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxlm.data.config import MEMBERS
from jaxlm.models import DEFAULT_MODEL, FAMILIES
from jaxlm.objectives.config import OBJECTIVES

# Options that config.json lacks in runs of earlier versions, with the values that these runs used. Such a run resumes
# without them, and with no other values.
ADDED_OPTIONS: dict[str, Any] = {
    "optimizer.momentum": 0.0,
    "optimizer.initial_accumulator": 0.1,
    "optimizer.floor": 0.0,
    "optimizer.power": 1.0,
    "optimizer.stable": 0.8,
    "optimizer.layer_decay": 1.0,
    "freeze_layers": 0,
    "freeze_embeddings": False,
    "unfreeze": "all",
    "backprop_window": 0,
    "special_tokens": "gpt1",
    "sample": None,
    "with_inputs": False,
    "ema": 0.0,
    "select_by": None,
    "patience": None,
    "class_weights": [],
    "label_smoothing": 0.0,
    "custom.positive": "",
    "custom.label_separator": ",",
    "custom.separator": "auto",
    "custom.threshold": 0.5,
    "custom.skip_bad_rows": False,
    "spike_factor": 0.0,
    "on_spike": "report",
    "average_iterates": "off",
    "average_interval": 5,
    "objective.activation_regularization": 0.0,
    "objective.temporal_activation_regularization": 0.0,
    "objective.positions": "all",
    "objective.intermediate_coefficient": 0.0,
    "objective.second_target_coefficient": 0.0,
    "select": "last",
    "data.windows": "fixed",
    "data.reset_probability": 0.0,
    "model.adaptive.cutoffs": [],
    "model.adaptive.divisor": 1,
    "model.adaptive.projections": "tails_tied",
    "model.adaptive.clusters": "projected",  # where it makes a difference, unprojected: see `upgraded`
    "start_vocabulary": "same",
}
# The same for all fields. Where the default is another one now, a run keeps what it used (None: see `kind_of_run` and
# `source_of`).
ADDED_FIELDS = {
    "kind": None,
    "start": None,
    "start_with": None,
    "start_trained_length": None,
    "fingerprints.start": None,
    "fingerprints.validation": None,
    "data.random_candidates": 1,
    "data.sentence_tokens": 0,
} | ADDED_OPTIONS


def upgraded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config in the current format.

    Earlier versions wrote the fields of all layouts into `data`; those of another layout had no effect. They wrote the
    fields of the masked language model beside the others, for every model, and chose the objective by the layout. They
    scored the tails of an adaptive softmax from states that did not go through a projection.
    """
    values = with_objective(config)
    model = values.get("model")
    adaptive = model.get("adaptive") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(adaptive, dict) and adaptive.get("divisor", 1) != 1:
        values["model"] = model | {"adaptive": {"clusters": "unprojected"} | adaptive}
    return values | {
        part: _own_fields(values[part], members, discriminator)
        for part, members, discriminator in (("data", MEMBERS, "layout"), ("objective", OBJECTIVES, "kind"))
        if isinstance(values.get(part), dict)
    }


def _own_fields(values: Mapping[str, Any], members: Mapping[str, type], discriminator: str) -> dict[str, Any]:
    """Return the fields of a union's member without those that only other members have."""
    name = values.get(discriminator)
    if name not in list(members):
        return dict(values)
    member = members[name]
    foreign = {field.name for other in members.values() for field in fields(other)}
    foreign -= {field.name for field in fields(member)}
    return {name: value for name, value in values.items() if name not in foreign}


def with_objective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with its objective, where an earlier version wrote `masking` in its place."""
    values = dict(config)
    data, model = values.get("data"), values.get("model")
    if "masking" not in values or not isinstance(data, dict) or not isinstance(model, dict):
        return values
    masking, coefficient = values.pop("masking"), values.pop("next_sentence_coefficient", 1.0)
    objective: dict[str, Any] = {"kind": "language_model"}
    if data.get("layout") == "pairs" and model.get("attention") != "causal":
        objective = {"kind": "masked_lm", "masking": masking, "next_sentence_coefficient": coefficient}
    return values | {"objective": objective}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with missing fields filled in with the values that the run used."""
    values = {name: before for name, before in ADDED_OPTIONS.items() if "." not in name} | dict(config)
    for name, before in ADDED_FIELDS.items():
        part, _, field = name.partition(".")
        if field and "." not in field and isinstance(values.get(part), dict):
            values[part] = {field: before} | values[part]
    if isinstance(values.get("model"), dict):
        values["model"] = _with_adaptive(values["model"])
    return upgraded(values)


def _with_adaptive(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved config of a model with all fields of `adaptive`, if its family has that now."""
    family, own = FAMILIES.get(str(model.get("kind", DEFAULT_MODEL.kind))), model.get("adaptive", {})
    if family is None or not isinstance(own, dict) or "adaptive" not in {field.name for field in fields(family.config)}:
        return dict(model)
    prefix = "model.adaptive."
    added = {name.removeprefix(prefix): value for name, value in ADDED_OPTIONS.items() if name.startswith(prefix)}
    return {**model, "adaptive": added | own}
