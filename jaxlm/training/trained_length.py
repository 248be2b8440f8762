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
from jaxlm.interop.sources import KINDS
from jaxlm.models import DEFAULT_MODEL, FAMILIES
from jaxlm.models.family import UNLIMITED
from jaxlm.runs.directory import RunDirectory, split_start
from jaxlm.runs.earlier_versions import completed
from jaxlm.runs.remote import is_url
from jaxlm.training.config import FINETUNING, kind_of_run

# The field of config.json with the trained length of the run's start; runs made by earlier versions lack it.
OF_START = "start_trained_length"
_LONGEST_CHAIN = 32  # of runs without that field, which are read in turn


def trained_length(run: RunDirectory, step: int) -> int:
    """Return the trained length of a run's checkpoint of `step`; UNLIMITED for a model without positions.

    It is the length of the longest rows up to that step, or the trained length of the run's start if that is longer. An
    imported model has all its positions, or fewer if its tokenizer said so. Runs made by earlier versions did not save
    the trained length of their start: it is read from there, if the start is still at its location.
    """
    return _trained_length(run, step, _LONGEST_CHAIN)


def _trained_length(run: RunDirectory, step: int, chain: int) -> int:
    saved = run.config
    field = FAMILIES[saved["model"].get("kind", DEFAULT_MODEL.kind)].positions
    if field is None:
        return UNLIMITED
    positions = int(saved["model"][field])
    if "published" in saved:
        return min(positions, saved.get("length") or positions)
    of_start = saved[OF_START] if OF_START in saved else _of_earlier_start(run, positions, chain)
    return min(positions, max(_own_length(saved, step, positions), of_start or 0))


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


def _of_earlier_start(run: RunDirectory, positions: int, chain: int) -> int | None:
    """Return the trained length of the start of an earlier version's run, or None if it is not easily found."""
    start = run.config.get("start") or _started_from(run)
    if start is None or start.startswith(KINDS):
        return None if start is None else positions
    if is_url(start) or not chain:
        return None
    try:
        path, step = split_start(start)
        return None if step is None else _trained_length(RunDirectory(path), step, chain - 1)
    except (InputError, KeyError):  # moved or damaged
        return None


def _started_from(run: RunDirectory) -> str | None:
    """Return the source of a pretraining run's parameters or state, as starts.jsonl has it."""
    for start in run.starts():
        kind, of, name = str(start.get("started_from")).partition(" of ")
        if of and kind in ("parameters", "state"):
            return name
    return None
