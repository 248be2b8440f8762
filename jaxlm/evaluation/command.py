"""What the evaluations share: their arguments, where figures go, progress."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxlm.atomic_write import atomic_output
from jaxlm.distributed.mesh import MeshConfig, check_batch
from jaxlm.distributed.processes import DistributedConfig
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.prediction import default_batch_size
from jaxlm.progress import Progress
from jaxlm.runs.metrics_log import finite

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every evaluation has."""

    run: str
    """A run, RUN or RUN@STEP."""
    batch_size: int | None = None
    """Sequences that run together; it does not change the figures."""
    output: Path | None = None
    """A file for the results: a JSON object, or JSONL with a line a row."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def batch_size_for(arguments: Any, run: LoadedRun, mesh: jax.sharding.Mesh) -> int:
    if arguments.batch_size is not None:
        check_batch(arguments.batch_size, 1, mesh)
        return arguments.batch_size
    config = run.config
    return default_batch_size(config.eval_batch_size or config.batch_size or DEFAULT_BATCH_SIZE, mesh)


class Counted(Progress):
    """Progress that counts by itself."""

    done = 0

    def count(self, value: Any) -> Any:
        self.done += 1
        self.update(self.done)
        return value


@contextlib.contextmanager
def progress_of(what: str, total: int | None = None, *, active: bool = True) -> Iterator[Counted]:
    progress = Counted(what, total, active=active and jax.process_index() == 0)
    yield progress
    if progress.done and active:
        progress.close()


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """A file that has its name once it is whole; nowhere without a path, and on processes other than the first."""
    if path is None or jax.process_index() > 0:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere
        return
    with atomic_output(path) as file:
        yield file


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        with output_file(path) as file:
            file.write(figures_json(figures) + "\n")


def figures_json(figures: dict[str, Any]) -> str:
    return json.dumps(finite(figures), ensure_ascii=False, allow_nan=False)


def say(*lines: str) -> None:
    if jax.process_index() == 0:
        print(*lines, sep="\n", flush=True)
