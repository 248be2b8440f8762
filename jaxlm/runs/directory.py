"""A run directory: its config, its starts, and a lock, so that only one program trains in it.

    config.json     the resolved config; its identity fields never change
    starts.jsonl    one line per start: command, commit, versions, devices, the checkpoint it started from
    tokenizer/      a copy, so that a run is usable on its own
    checkpoints/ metrics.jsonl tensorboard/ log.txt   (written by checkpoints.py, metrics_log.py and text_log.py)
    lock            held with flock while a program writes here; released when the process ends, however it ends

Every process calls these methods; process 0 does the work and all processes return or raise the same. The directory
must be on a file system that all processes share, or at a URL (gs://BUCKET/RUN). At a URL only process 0 has the files
other than checkpoints on its machine, and `upload` copies them there.
"""

import contextlib
import datetime
import fnmatch
import functools
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

from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError, RunError
from jaxlm.files import parse_json, read_object, read_regular, rename_synced, write_json
from jaxlm.host import LockHeld, compiler_changes, cpu_cores, lock_file, recorded
from jaxlm.runs import text_log
from jaxlm.runs.config import (
    ADDED_FIELDS,
    ADDED_OPTIONS,
    RELEASE,
    differing,
    flat,
    has_earlier_masks,
    in_words,
    is_later,
    shown,
    upgraded,
)
from jaxlm.runs.remote import LOCK, Mirror, entries
from jaxlm.storage import is_url
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.version import __version__
from jaxlm.wording import similar_directory

log = logging.getLogger(__name__)

CONTINUED = ("num_steps", "num_epochs", "optimizer.")  # fields that a run which continues another's state may change
FEATURES = "features"  # states of other models, which fine-tuning computes before the run begins
_locks: list[TextIO] = []  # referenced here, so that the lock outlives a RunDirectory that is garbage-collected


class RunDirectory:
    """A run directory for reading; `open` locks it for writing. place: a directory or a URL.

    name: the directory or URL as given. root: its path, where checkpoints are read and written.
    """

    def __init__(self, place: Path | str):
        self.name = str(place)
        self._mirror = Mirror(str(place)) if is_url(place) else None
        self.root = epath.Path(place) if self._mirror is None else self._mirror.root
        self._lock: TextIO | None = None
        self._writes = False
        self._has_earlier_masks = False

    @functools.cached_property
    def path(self) -> Path:
        """Directory of the files other than checkpoints, on this machine."""
        return Path(self.name) if self._mirror is None else self._mirror.fetched()

    @property
    def checkpoints(self) -> epath.Path:
        """Directory of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer."""
        return self.path / "tokenizer"

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Saved config in the current format.

        Raises InputError if there is no run, or if config.json is damaged or of a later release.
        """
        file = self.path / "config.json"
        try:
            values = upgraded(read_object(file))
            later = is_later(values.pop(RELEASE, "0.0"))
        except FileNotFoundError:
            raise InputError(self._not_a_run()) from None
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read: {error}; put it back from a copy") from error
        if later:
            raise InputError(
                f"{self.name} must be a run of jaxlm {__version__} or earlier, got one of a later release; install "
                f"that version, which {file} names in the field {RELEASE!r}"
            )
        return values

    def check_config(self, saved: Mapping[str, Any], place: str, free: Sequence[str]) -> None:
        """Raise InputError if config.json differs from the config `saved` in a checkpoint, which has a checksum.

        place: name of the checkpoint in the error. free: names, as in `open`, of fields that may differ. A run of an
        earlier version that was resumed lacks ADDED_FIELDS, which its later checkpoints have.
        """
        own, other = flat(self.config), flat(upgraded(saved))
        for name in sorted(other.keys() - (set(ADDED_FIELDS) - own.keys())):
            if own.get(name, other) != other[name] and not any(fnmatch.fnmatchcase(name, pattern) for pattern in free):
                raise InputError(
                    f"{self.name}/config.json: {name} must be {json.dumps(other[name])}, as in {place}, got "
                    f"{shown(own, name)}; put it back from a copy, or set that value"
                )

    def exists(self) -> bool:
        """Return True if a run exists there."""
        with contextlib.nullcontext() if self._mirror is None else self._mirror.reached():
            return (self.root / "config.json").exists()

    def open(self, config: Mapping[str, Any], *, run_fields: Sequence[str] = ()) -> list[str]:
        """Create the directory, or check that it holds this run; lock it until `close` or the end of the process.

        config: resolved JSON values. run_fields: dotted names, with `*` as a wildcard, of the fields that may change
        when a run resumes (`mesh.*`, `log_every`); all others are its identity and must equal the saved ones.
        Returns the run fields that changed, as `field: saved -> given`. Raises InputError on every process for the
        directory of another run, a directory in use, and one with other files.
        """
        given = json.loads(json.dumps(config))
        if self._mirror is not None:
            self.path = self._mirror.path
        changed = first_process_decides(lambda: self._open(given, run_fields))
        self.__dict__.pop("config", None)
        if self._mirror is None and not (self.path / "config.json").exists():
            raise InputError(
                f"--run must be on a file system that all processes share, got {self.path}, which process "
                f"{jax.process_index()} does not see; choose another directory"
            )
        return changed

    def located(self, path: str) -> str:
        """Return a path of the run's config where it exists now: as it is, or below a directory of its starts."""
        began = [start.get("directory") for start in self.starts() if isinstance(start, dict)]
        places = [path, *(str(Path(place, path)) for place in reversed(began) if isinstance(place, str))]
        return next((place for place in places if Path(place).exists()), path)

    def record_start(self, *, started_from: str | None, **more: Any) -> dict[str, Any]:
        """Append this start to starts.jsonl and return it. started_from: `RUN@STEP`, `resumed at step 50`, or None."""
        devices = jax.devices()
        start = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "directory": str(Path.cwd()),
            "commit": _commit(),
            "versions": recorded(),
            "devices": {
                "count": len(devices),
                "kind": devices[0].device_kind,
                "platform": devices[0].platform,
                "processes": jax.process_count(),
                "cpu_cores": cpu_cores(),  # on a CPU the number of cores changes the last bits of a result
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
            text_log.begin(self.path, f"== {start['time']}  {start['command']}")
            self.upload()

        first_process_decides(append)
        return start

    def version_notes(self) -> list[str]:
        """Return sentences on what differs from the last recorded start: JAX or a compiler, and the dropout masks."""
        masks = "the dropout masks of earlier versions are no longer available; the run continues with new ones"
        return [*filter(None, [self._compiler_note()]), *([masks] if self._has_earlier_masks else [])]

    def _compiler_note(self) -> str | None:
        starts = self.starts()
        before = starts[-1].get("versions") if starts else None
        changes = compiler_changes(before, recorded()) if isinstance(before, dict) else []
        if not changes:
            return None
        return (
            f"the versions differ from those of the last start: {', '.join(changes)}; losses may differ in the last "
            "bits from those of an uninterrupted run"
        )

    def starts(self) -> list[dict[str, Any]]:
        """Return the lines of starts.jsonl, oldest first, without incomplete lines."""
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
            except ValueError:  # the process was killed while it wrote the line
                continue
        return starts

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Save a copy of the tokenizer atomically, unless there is one; a damaged copy is replaced.

        InputError if the copy has other sentinels.
        """

        def save() -> None:
            if self.tokenizer.exists() and self._mirror is None:  # at a URL, an upload may be incomplete
                try:
                    kept = load_tokenizer(self.tokenizer)
                except InputError:
                    log.warning("%s is damaged and is written again", self.tokenizer)
                else:
                    if kept.fingerprint == tokenizer.fingerprint:
                        self._check_sentinels(kept, tokenizer)
                        return
            fresh = self.path / "tokenizer.tmp"
            shutil.rmtree(fresh, ignore_errors=True)
            tokenizer.save(fresh)
            if self.tokenizer.exists():
                shutil.rmtree(self.tokenizer)
            rename_synced(fresh, self.tokenizer)

        first_process_decides(save)

    def _check_sentinels(self, kept: Tokenizer, tokenizer: Tokenizer) -> None:
        """Raise InputError for other sentinels than those of the copy; the fingerprint does not cover them."""
        if kept.sentinels != tokenizer.sentinels:
            raise InputError(
                f"the tokenizer must have the {len(kept.sentinels)} sentinels of {self.tokenizer}, got "
                f"{len(tokenizer.sentinels)}; restore the files that it was read from, or choose another --run"
            )

    def upload(self) -> None:
        """Upload the files that process 0 has changed to the URL of the run, if it has one. Raises RunError."""
        if self._mirror is not None and self._writes:
            with self._mirror.reached(RunError):
                self._mirror.upload()

    def remove(self, part: PurePath) -> None:
        """Remove a directory of the run, if it exists, on process 0."""
        if jax.process_index() > 0:
            return
        shutil.rmtree(self.path / part, ignore_errors=True)
        if self._mirror is not None:
            with self._mirror.reached(RunError):
                (self.root / part).rmtree(missing_ok=True)

    def close(self) -> None:
        """Upload changed files and release the lock."""
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
        text_log.end(error)
        try:
            self.close()
        except RunError as failure:
            if error is None:
                raise
            log.warning("%s", failure)  # the error that ended the run is more informative

    def _not_a_run(self) -> str:
        """Return the message for a directory that is missing, or holds something else."""
        if self._mirror is None and not self.path.is_dir():
            hint = similar_directory(self.name, "config.json", "give the directory of a run")
            return f"{self.name}: no such run directory; {hint}"
        return f"{self.name} is not a run directory: it has no config.json; give the directory of a run"

    def _open(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        try:
            with contextlib.nullcontext() if self._mirror is None else self._mirror.reached():
                return self._opened(given, run_fields)
        except InputError:
            self._writes = False
            self.close()
            raise
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be a run directory: {error.strerror or error}; choose another --run"
            ) from error

    def _opened(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        if self.root.exists() and not self.root.is_dir():
            raise InputError(f"--run must be a directory, got the file {self.name}; choose another")
        if self.root.is_dir() and not (self.root / "config.json").exists():
            strange = [path.name for path in entries(self.root) if not _is_ours(path.name)]
            if strange:
                raise InputError(
                    f"{self.name} must be empty or a run directory, got other files ({min(strange)}); choose another "
                    "--run"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (LOCK, "config.json", "starts.jsonl", "metrics.jsonl", text_log.FILE):
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise InputError(f"{self.path / name} must be a regular file; remove it")
        self._take_lock()
        if self._mirror is not None:
            self._mirror.fetch()
        config_file = self.path / "config.json"
        changed = []
        if known := config_file.exists():
            self.__dict__.pop("config", None)
            saved = flat(self.config)
            self._has_earlier_masks = has_earlier_masks(read_object(config_file))
            asked = flat(given)
            kept = {name for name, value in ADDED_OPTIONS.items() if asked.get(name, value) != value}
            given = _without(given, [name for name in ADDED_FIELDS if name not in saved and name not in kept])
            changed = self._compare(given, run_fields)
        if changed or not known:
            write_json(config_file, {RELEASE: __version__} | given)
        if self._mirror is not None:
            self._mirror.upload()
            log.info(
                "%s: files other than checkpoints are kept in %s and uploaded at each checkpoint; the run is not "
                "locked against other machines",
                self.name,
                self.path,
            )
        self._writes = True
        return changed

    def _compare(self, given: dict[str, Any], run_fields: Sequence[str]) -> list[str]:
        """Return the run fields that changed. Raise InputError if others did: the directory holds another run."""
        saved, new = flat(self.config), flat(given)
        names = differing(saved, new)
        free = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in run_fields)}
        if len(free) == len(names):
            return [f"{name}: {shown(saved, name)} -> {shown(new, name)}" for name in names]
        kinds = [fields.get("kind") for fields in (saved, new)]
        if None not in kinds and kinds[0] != kinds[1]:
            raise InputError(f"{self.name} holds a {kinds[0]} run, this is a {kinds[1]} run; choose another --run")
        identity = in_words(*({key: value for key, value in part.items() if key not in free} for part in (saved, new)))
        remedy = "give the saved values to resume it, or choose another --run"
        if kinds[1] == "pretraining" and all(name.startswith(CONTINUED) for name in set(names) - free):
            remedy += f"; to train longer or at another learning rate: --run NEW --start {self.name} --start-with state"
        raise InputError(
            f"{self.name} holds a run with another config (saved -> given): {'; '.join(identity)}; {remedy}"
        )

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
        elif self._mirror is None:
            log.warning(
                "%s is on a file system without locks: make sure that only one program trains in it, as two would mix "
                "their checkpoints and metrics",
                self.name,
            )


def saved_config(place: Path | str) -> dict[str, Any] | None:
    """Return the config.json of the run at `place`, or None without a run. Raises InputError if it is damaged."""
    run = RunDirectory(place)
    return run.config if run.exists() else None


def split_start(start: str) -> tuple[Path | str, int | None]:
    """Split `RUN` or `RUN@STEP` into a path or URL and a step.

    Raises InputError if the text after the @ of a path is not a step.
    """
    if is_url(start):
        run, _, step = start.rpartition("@")
        return (run.rstrip("/"), int(step)) if run and step.isdecimal() else (start.rstrip("/"), None)
    if Path(start).exists() or "@" not in start:
        return Path(start), None
    run, _, step = start.rpartition("@")
    if not step.isdecimal():
        raise InputError(f"--start {start}: {step!r} is not a step; use RUN@STEP, for example runs/gpt1@2000")
    return Path(run), int(step)


def _is_ours(name: str) -> bool:
    """Return True if an early kill, a user or a shell may leave this name in the directory of a run to be."""
    return (
        name in (LOCK, FEATURES, "config.json.tmp", "config.json.partial")
        or name.startswith(".")
        or name.endswith(".log")
    )


def _without(config: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Remove the fields of these dotted names from nested dictionaries, and those that this leaves empty."""
    kept = {}
    for name, value in config.items():
        if f"{prefix}{name}" not in names:
            inner = _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
            if inner != {} or value == {}:
                kept[name] = inner
    return kept


def _commit() -> str | None:
    """Return the commit of the sources, with a + for uncommitted changes, or None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes else "")
