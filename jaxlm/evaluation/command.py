"""The run, the sizes, the output and the progress of an evaluation: what the evaluations share."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import RunError
from jaxlm.files import atomic_output
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.prediction import default_batch_size
from jaxlm.progress import Progress
from jaxlm.training.config import check_sizes
from jaxlm.training.start import check_trained
from jaxlm.wording import finite

DEFAULT_BATCH_SIZE = 32
log = logging.getLogger("jaxlm")
# True in a call in Python, whose lines go to the logger, and which shows no progress.
_is_call: ContextVar[bool] = ContextVar("is_call", default=False)


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Raise RunError, of one line, if the block exhausts the memory of a device."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            "out of device memory: give a smaller --batch-size, a smaller --length, or a shorter memory "
            f"({str(error).splitlines()[0][:200]})"
        ) from error


@contextlib.contextmanager
def as_call() -> Iterator[None]:
    """Send the lines of the block to the logger `jaxlm` instead of the standard streams; explain exhausted memory."""
    token = _is_call.set(True)
    try:
        with explained_memory():
            yield
    finally:
        _is_call.reset(token)


def shows_progress() -> bool:
    """Return True on process 0 of a command."""
    return jax.process_index() == 0 and not _is_call.get()


def opened(arguments: Any, **options: Any) -> LoadedRun:
    """Return the run or the published weights of the arguments, on their mesh. options: of `load_model`."""
    return load_model(arguments.run, mesh=make_mesh(arguments.mesh), weights=arguments.weights, **options)


def length_for(arguments: Any, run: LoadedRun, default: int) -> int:
    """Return the length of the arguments, or the default. InputError unless the model has been trained on it."""
    length = default if arguments.length is None else arguments.length
    check_sizes(length, 1, run.model.config)
    check_trained("--length", length, run.trained_length, run.name, beyond=arguments.beyond_length)
    return int(length)


def batch_size_for(given: int | None, run: LoadedRun) -> int:
    """Return the given batch size, or the default of the run, rounded for its mesh."""
    if given is not None:
        check_batch(given, 1, run.mesh)
        return given
    config = run.config
    return default_batch_size(config.eval_batch_size or config.batch_size or DEFAULT_BATCH_SIZE, run.mesh)


class Counted(Progress):
    """Progress with a counter."""

    done = 0

    def count(self, value: Any) -> Any:
        """Count one item and return it."""
        self.done += 1
        self.update(self.done)
        return value


@contextlib.contextmanager
def progress_of(
    what: str, total: int | None = None, *, active: bool = True, compiles: bool = False
) -> Iterator[Counted]:
    """Show a progress line on process 0 while the block runs. compiles: see `Progress`."""
    progress = Counted(what, total, active=active and shows_progress(), compiles=compiles)
    yield progress
    if progress.done and active and not _is_call.get():
        progress.close()


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """Open `path` for an atomic write, or the null device without a path or on processes other than 0."""
    if path is None or jax.process_index() > 0:
        with open(os.devnull, "w", encoding="utf-8") as null:
            yield null
        return
    with atomic_output(path) as file:
        yield file


def write_values(path: Path | None, values: dict[str, Any]) -> None:
    """Write metrics as JSON to `path`, if there is one."""
    if path is not None:
        with output_file(path) as file:
            file.write(values_json(values) + "\n")


def values_json(values: dict[str, Any]) -> str:
    """Return metrics as one line of JSON, with NaN and infinities as strings."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on process 0, or log them in a call in Python. stream: default, standard output."""
    if jax.process_index() > 0:
        return
    if _is_call.get():
        for line in lines:
            log.info("%s", line)
    else:
        print(*lines, sep="\n", file=stream or sys.stdout, flush=True)
