"""The trained length of a checkpoint: the number of positions of its table that were trained.

A model of 512 positions that was trained in rows of 128 has 384 rows in its table with their initial values. Commands
that use a model stay within the trained length, unless --beyond-length is given.
"""

from collections.abc import Mapping
from typing import Any

from jaxlm.config import from_json
from jaxlm.data.config import DataConfig
from jaxlm.data.phases import phases, trained_phase
from jaxlm.errors import InputError
from jaxlm.models import DEFAULT_MODEL, FAMILIES
from jaxlm.models.family import UNLIMITED
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.earlier_versions import completed
from jaxlm.training.config import FINETUNING, kind_of_run

# The field of config.json with the trained length of the run's start.
OF_START = "start_trained_length"


def trained_length(run: RunDirectory, step: int) -> int:
    """Return the trained length of a run's checkpoint of `step`; UNLIMITED for a model without positions.

    It is the length of the longest rows up to that step, or the trained length of the run's start if that is longer. An
    imported model has all its positions, or fewer if its tokenizer said so.
    """
    saved = run.config
    field = FAMILIES[saved["model"].get("kind", DEFAULT_MODEL.kind)].positions
    if field is None:
        return UNLIMITED
    positions = int(saved["model"][field])
    if "published" in saved:
        return min(positions, saved.get("length") or positions)
    return min(positions, max(_own_length(saved, step, positions), saved.get(OF_START) or 0))


def kept_start_length(saved: Mapping[str, Any] | None, of_source: int | None) -> int | None:
    """Return the value of OF_START for a run's config.json: the saved one, as the start may have been moved or changed.

    saved: the run's config.json, None for a new run. of_source: the trained length of its start.
    """
    return saved[OF_START] if saved is not None and OF_START in saved else of_source


def check_trained(name: str, length: int, trained: int, of: str, *, beyond: bool) -> None:
    """Raise InputError for a length above the trained one, unless `beyond` allows it. of: the model, for people."""
    if length > trained and not beyond:
        raise InputError(
            f"{name} must be at most {trained}, the trained length of {of}, got {length}; give a shorter one, or "
            "--beyond-length to use positions that were never trained"
        )


def limited(length: int, positions: int, of: str) -> str:
    """Return a note that a command stays within the trained length `length` of a model with more positions."""
    return f"{of} was trained on {length} of its {positions} positions; --beyond-length uses the others too"


def _own_length(saved: Mapping[str, Any], step: int, positions: int) -> int:
    length = saved.get("length") or positions
    if kind_of_run(saved) == FINETUNING or not saved.get("num_steps"):
        return length
    data = from_json(DataConfig, completed(saved)["data"], "data")
    return trained_phase(step, phases(data, length=length, num_steps=saved["num_steps"])).length
