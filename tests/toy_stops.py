"""Stops of a fine-tuning at chosen moments: in this process by an exception, in another one by its death.

Moments are counted: each step, each part that is labelled, each save of a checkpoint, each file that is written and
each folder that is removed are one before they happen and one in their middle (half of a file, half of a folder), or
right after. As a program `python toy_stops.py NUMBER CACHE ARGUMENTS` runs `jaxlm.finetune` and dies at that moment, as
by kill -9.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlm import finetune
from jaxlm.distributed import devices
from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.finetuning import trial, vectorized
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.recorder import Recorder


class Killed(BaseException):
    """The stop; nothing catches it."""


class Moments:
    """Counts the moments of a start and ends it at number `at`, or at a name and its number; names: those met."""

    def __init__(self, at: int | tuple[str, int] | None, end: Callable[[], None]) -> None:
        self.at, self.end = at, end
        self.names: list[str] = []

    def meet(self, name: str) -> bool:
        """One moment, and one in its middle; whether the start ends there."""
        self.names.append(name)
        if self.at in (len(self.names), (name, self.names.count(name))):
            self.end()
        self.names.append(f"in {name}")
        return len(self.names) == self.at

    @contextlib.contextmanager
    def watched(self) -> Iterator["Moments"]:
        """Count while this is open."""
        changed: list[tuple[Any, str, Any]] = []

        def put(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            changed.append((owner, name, original))
            setattr(owner, name, made(original))

        for owner in (trial, vectorized):
            put(owner, "evaluate_split", self._before("labelling"))
        for owner in (trial, finetune):
            put(owner, "write_json", self._before("JSON"))
            put(owner, "write_file", self._writing)
        put(Recorder, "training", self._before("a step"))
        put(vectorized.VectorizedRecorder, "training", self._before("a step"))
        put(Checkpoints, "save", self._before("a save"))
        put(RunDirectory, "remove", self._removing)
        try:
            yield self
        finally:
            for owner, name, original in reversed(changed):
                setattr(owner, name, original)

    def _before(self, name: str) -> Callable[[Any], Any]:
        """A call that has no middle is followed by a moment instead."""

        def made(original: Any) -> Any:
            def call(*arguments: Any, **settings: Any) -> Any:
                after = self.meet(name)
                found = original(*arguments, **settings)
                if after:
                    self.end()
                return found

            return call

        return made

    def _writing(self, original: Any) -> Any:
        def write(path: Path, content: Any) -> None:
            if self.meet(f"writing {path.name}"):
                path.write_bytes((content if isinstance(content, bytes) else content.encode())[: len(content) // 2])
                self.end()
            original(path, content)

        return write

    def _removing(self, original: Any) -> Any:
        def remove(run: RunDirectory, part: Any) -> None:
            if self.meet(f"removing {part}"):
                files = sorted(path for path in (run.path / part).rglob("*") if path.is_file())
                for file in files[: len(files) // 2]:
                    file.unlink()
                for folder in list((run.path / part).glob("*"))[:1]:
                    shutil.rmtree(folder, ignore_errors=True)
                self.end()
            original(run, part)

        return remove


def prepare(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """One device, programs compiled once for all starts, and an accuracy that moves from step to step."""
    patch.setattr(devices, "enable_compilation_cache", lambda: None)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    patch.setattr(finetune, "make_mesh", lambda config: mesh)
    original = trial.evaluate_split

    def evaluate_split(*arguments: Any) -> Any:
        predicted, figures = original(*arguments)
        return predicted, figures | {"accuracy": figures["loss"] * 1e3 % 1}

    for owner in (trial, vectorized):
        patch.setattr(owner, "evaluate_split", evaluate_split)


def raise_killed() -> None:
    """The stop within a process."""
    raise Killed


if __name__ == "__main__":
    from jaxlm.errors import run_command

    number, cache, sys.argv = int(sys.argv[1]), Path(sys.argv[2]), ["finetune", *sys.argv[3:]]
    prepare(pytest.MonkeyPatch(), cache)
    with Moments(number, lambda: os._exit(137)).watched():
        run_command(finetune.main)
