"""A run directory: whose it is, how it was started, and that only one program trains in it.

    config.json     the resolved config; its identity fields never change
    starts.jsonl    one line a start: command, commit, versions, devices, the checkpoint it began from
    tokenizer/      a copy, so that a run is usable on its own
    checkpoints/ metrics.jsonl tensorboard/   (written by checkpoints.py and logs.py)
    lock            held with flock while a program writes here; it goes when the process does, however it ends

Every process calls these methods; process 0 does the work and all see its outcome. The directory must lie on a file
system that all processes share, or at a URL (gs://BUCKET/RUN): then process 0 alone has the files beside the
checkpoints on its machine, and `upload` brings them there.
"""

import contextlib
import datetime
import fnmatch
import functools
import importlib.metadata
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TextIO

import jax
from etils import epath

from jaxlm.atomic_write import rename_synced, write_json
from jaxlm.bounded_read import parse_json, read_object, read_regular
from jaxlm.distributed.agreement import first_process_decides
from jaxlm.errors import InputError, RunError
from jaxlm.host import LockHeld, cpu_cores, lock_file
from jaxlm.runs.earlier_versions import ADDED_FIELDS, upgraded
from jaxlm.runs.remote import LOCK, Mirror, entries, is_url
from jaxlm.text import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_PACKAGES = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_locks: list[TextIO] = []  # those held, so that a RunDirectory that nobody refers to any more keeps its lock


class RunDirectory:
    """A run directory, for reading; `open` makes it this program's for writing. place: a directory, or a URL.

    name: the place, for people. root: the place, where checkpoints are read and written.
    """

    def __init__(self, place: Path | str):
        self.name = str(place)
        self._mirror = Mirror(str(place)) if is_url(place) else None
        self.root = epath.Path(place) if self._mirror is None else self._mirror.root
        self._lock: TextIO | None = None
        self._writes = False

    @functools.cached_property
    def path(self) -> Path:
        """Where its other files are on this machine."""
        return Path(self.name) if self._mirror is None else self._mirror.fetched()

    @property
    def checkpoints(self) -> epath.Path:
        """Where its checkpoints are."""
        return self.root / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Where its tokenizer is."""
        return self.path / "tokenizer"

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The saved config, with the fields of today. InputError where there is no run, or config.json is damaged."""
        file = self.path / "config.json"
        try:
            return upgraded(read_object(file))
        except FileNotFoundError:
            raise InputError(f"{self.name} is no run directory: it has no config.json; give the --run of one") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read: {error}; put it back from a copy") from error

    def check_config(self, saved: Mapping[str, Any], place: str, free: Sequence[str]) -> None:
        """InputError where config.json is not the config that a checkpoint, which proves itself, was saved with.

        place: of that config, for people. free: names, as in `open`, of fields that may differ. A run of an earlier
        version that went on lacks ADDED_FIELDS, which its later checkpoints have.
        """
        own, other = _fields(self.config), _fields(upgraded(saved))
        for name in sorted(other.keys() - (set(ADDED_FIELDS) - own.keys())):
            if own.get(name, other) != other[name] and not any(fnmatch.fnmatchcase(name, pattern) for pattern in free):
                raise InputError(
                    f"{self.name}/config.json must say of {name} what {place} was saved with, "
                    f"{json.dumps(other[name])}, got {_shown(own, name)}; put it back from a copy, or that value in"
                )

    def exists(self) -> bool:
        """Whether there is a run."""
        with contextlib.nullcontext() if self._mirror is None else self._mirror.reached():
            return (self.root / "config.json").exists()

    def open(self, config: Mapping[str, Any], *, run_fields: Sequence[str] = ()) -> list[str]:
        """Create the directory, or check that it is this run's; lock it until `close` or the end of the process.

        config: JSON values, as resolved. run_fields: names in dots, `*` for any, of the fields that may change when
        a run goes on (`mesh.*`, `log_every`); all others are its identity and must equal the saved ones.
        Returns the run fields that changed, as `field: saved -> given`. InputError, one line and on every process,
        for another run's directory, a directory in use, and one that holds something else.
        """
        given = json.loads(json.dumps(config))
        if self._mirror is not None:
            self.path = self._mirror.path
        changed = first_process_decides(lambda: self._open(given, run_fields))
        self.__dict__.pop("config", None)
        if self._mirror is None and not (self.path / "config.json").exists():
            raise InputError(
                f"{self.path} is not seen by process {jax.process_index()}: put --run on a file system that all "
                "processes share"
            )
        return changed

    def record_start(self, *, started_from: str | None, **more: Any) -> dict[str, Any]:
        """Append a line about this start to starts.jsonl. started_from: `RUN@STEP`, `resumed at step 50`, or None."""
        devices = jax.devices()
        start = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "commit": _commit(),
            "versions": {"python": ".".join(map(str, sys.version_info[:3]))} | _versions(),
            "devices": {
                "count": len(devices),
                "kind": devices[0].device_kind,
                "platform": devices[0].platform,
                "processes": jax.process_count(),
                "cpu_cores": cpu_cores(),  # another number changes the last bits on the CPU
            },
            "started_from": started_from,
        } | more

        def append() -> None:
            file = self.path / "starts.jsonl"
            torn = file.exists() and not file.read_bytes().endswith(b"\n") and file.stat().st_size > 0
            with file.open("a", encoding="utf-8") as stream:
                stream.write(("\n" if torn else "") + json.dumps(start) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            self.upload()

        first_process_decides(append)
        return start

    def starts(self) -> list[dict[str, Any]]:
        """The lines of starts.jsonl, oldest first; a torn line is left out."""
        try:
            lines = read_regular(self.path / "starts.jsonl").decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(
                f"{error.filename} cannot be read: {error.strerror}; put it back from a copy, or remove it"
            ) from error
        starts = []
        for line in lines:
            try:
                starts.append(parse_json(line))
            except ValueError:  # a start that was killed while it wrote
                continue
        return starts

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Keep a copy of the tokenizer, once; it is there whole or not at all, and a damaged one is written anew."""

        def save() -> None:
            if self.tokenizer.exists() and self._mirror is None:  # an upload of several files may have been cut short
                try:
                    if load_tokenizer(self.tokenizer).fingerprint == tokenizer.fingerprint:
                        return
                except InputError:
                    log.warning("%s is damaged, and is written anew", self.tokenizer)
            fresh = self.path / "tokenizer.tmp"
            shutil.rmtree(fresh, ignore_errors=True)
            tokenizer.save(fresh)
            if self.tokenizer.exists():
                shutil.rmtree(self.tokenizer)
            rename_synced(fresh, self.tokenizer)

        first_process_decides(save)

    def upload(self) -> None:
        """Bring what process 0 has written to where the run lies; nothing where that is a directory. RunError."""
        if self._mirror is not None and self._writes:
            with self._mirror.reached(RunError):
                self._mirror.upload()

    def remove(self, part: PurePath) -> None:
        """Remove a folder of the run, if it is there; process 0 does it."""
        if jax.process_index() > 0:
            return
        shutil.rmtree(self.path / part, ignore_errors=True)
        if self._mirror is not None:
            with self._mirror.reached(RunError):
                (self.root / part).rmtree(missing_ok=True)

    def close(self) -> None:
        """Upload what is new, and let another program have the directory."""
        try:
            self.upload()
        finally:
            self._writes = False
            if self._lock is not None:
                _locks.remove(self._lock)
                self._lock.close()
                self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RunError as failure:
            if error is None:
                raise
            log.warning("%s", failure)  # why the run ended says more

    def _open(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        try:
            with contextlib.nullcontext() if self._mirror is None else self._mirror.reached():
                return self._opened(given, run_fields)
        except InputError:
            self._writes = False
            self.close()
            raise
        except OSError as error:
            raise InputError(f"{self.name} cannot be a run directory: {error.strerror or error}") from error

    def _opened(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        if self.root.is_dir() and not (self.root / "config.json").exists():
            strange = [path.name for path in entries(self.root) if not _is_ours(path.name)]
            if strange:
                raise InputError(f"{self.name} holds something else ({min(strange)}) and no run; choose another --run")
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (LOCK, "config.json", "starts.jsonl", "metrics.jsonl"):
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise InputError(f"{self.path / name} must be a regular file; remove what is there")
        self._take_lock()
        if self._mirror is not None:
            self._mirror.fetch()
        config_file = self.path / "config.json"
        changed = []
        if known := config_file.exists():
            self.__dict__.pop("config", None)
            saved = _fields(self.config)
            given = _without(given, [name for name in ADDED_FIELDS if name not in saved])
            changed = self._compare(given, run_fields)
        if changed or not known:
            write_json(config_file, given)
        if self._mirror is not None:
            self._mirror.upload()
            log.info(
                "%s: its files but the checkpoints are kept in %s and uploaded at each checkpoint; another machine "
                "is not kept from writing there",
                self.name,
                self.path,
            )
        self._writes = True
        return changed

    def _compare(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        saved_fields, given_fields = _fields(self.config), _fields(given)
        identity: list[str] = []
        changed: list[str] = []
        for name in sorted(saved_fields.keys() | given_fields.keys()):
            old, new = (_shown(fields, name) for fields in (saved_fields, given_fields))
            if old != new:
                may_change = any(fnmatch.fnmatchcase(name, pattern) for pattern in run_fields)
                (changed if may_change else identity).append(f"{name}: {old} -> {new}")
        if identity:
            raise InputError(
                f"{self.name} holds a run with another config (saved -> given): {'; '.join(identity)}; give the saved "
                "values to go on with it, or choose another --run"
            )
        return changed

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        try:
            self._lock = lock_file(self.path / LOCK)
        except LockHeld as holder:
            raise InputError(
                f"{self.name} is in use by {holder}; wait for it, stop it, or choose another --run"
            ) from None
        if self._lock is not None:
            _locks.append(self._lock)


def saved_config(place: Path | str) -> dict[str, Any] | None:
    """The config.json of the run at `place`; None where there is no run yet. InputError where it is damaged."""
    run = RunDirectory(place)
    return run.config if run.exists() else None


def split_start(start: str) -> tuple[Path | str, int | None]:
    """`RUN` or `RUN@STEP` as a path, or a URL, and a step. InputError when what follows the @ of a path is no step."""
    if is_url(start):
        run, _, step = start.rpartition("@")
        return (run.rstrip("/"), int(step)) if run and step.isdecimal() else (start.rstrip("/"), None)
    if Path(start).exists() or "@" not in start:
        return Path(start), None
    run, _, step = start.rpartition("@")
    if not step.isdecimal():
        raise InputError(f"--start {start}: {step!r} after the @ is no step; write RUN@STEP, runs/gpt1@2000 say")
    return Path(run), int(step)


def _is_ours(name: str) -> bool:
    """What a start that was killed early leaves, or what people and shells put beside a run."""
    return name in (LOCK, "config.json.tmp", "config.json.partial") or name.startswith(".") or name.endswith(".log")


def _fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as names in dots."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= _fields(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def _without(config: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries without the fields of these names in dots."""
    return {
        name: _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{prefix}{name}" not in names
    }


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "absent"


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from the sources
            continue
    return versions


def _commit() -> str | None:
    """The commit of the sources, with a + when they were changed; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if dirty else "")
