"""Storage of a run: a directory, or a URL, gs://BUCKET/RUN; and its errors in one line each.

Checkpoints are read and written at the URL, small files are mirrored on this machine. A program that writes keeps the
small files in a directory of the user's cache. They are downloaded when the run is opened, which replaces what an
earlier program left there, and uploaded when they have changed. A program that reads downloads what it needs into a
temporary directory. file:///DIRECTORY works in the same way.
"""

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path

import jax
from etils import epath

from jaxlm.errors import InputError, RunError
from jaxlm.files import atomic_file
from jaxlm.host import user_cache
from jaxlm.storage import filesystem, is_away, is_url
from jaxlm.wording import byte_size, shortened

LARGE = ("checkpoints", "kept")  # directories that Orbax reads and writes at the URL
LOCK = "lock"  # of the directory on this machine
NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")  # reasons of failed writes
_WORDS = {"DATA_LOSS": "corrupted", "OUT_OF_RANGE": "truncated", "NOT_FOUND": "missing"}  # TensorStore's codes
_NOT_DAMAGE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
    "Forbidden",
)
_CLIENTS = ("gcsfs", "google", "aiohttp", "requests")  # of gs://: their errors do not mean damaged files


def entries(folder: epath.Path) -> Iterator[epath.Path]:
    """Yield the entries of a directory, without the object that makes an empty directory visible in a bucket."""
    for entry in folder.iterdir():
        if entry.name != folder.name or entry.exists():
            yield entry


class Mirror:
    """Mirror of the small files of the run at `url`. root: the run there. path: the local directory for writing.

    Raises InputError for a URL that this machine cannot read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = _root(url)
        name = f"{self.root.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:16]}"
        self.path = user_cache() / "runs" / name
        self._sent: dict[Path, tuple[int, int]] = {}

    def fetched(self) -> Path:
        """Download the top-level files and the tokenizer for reading, and return their temporary directory."""
        folder = Path(tempfile.mkdtemp(prefix="jaxlm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        with self.reached():
            if not (self.root / "config.json").exists():
                raise InputError(f"{self.url} is not a run directory: it has no config.json; give the URL of a run")
            _download(self.root, folder, lambda name: name == "tokenizer")
        return folder

    def fetch(self) -> None:
        """Replace the local files by those at the URL."""
        for old in self.path.iterdir():
            if old.name != LOCK:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        if (self.root / "config.json").exists():
            _download(self.root, self.path, lambda name: name not in LARGE)
        self._sent = {file: _version(file) for file in self._files()}

    def upload(self) -> None:
        """Upload changed files, in the order in which they were written."""
        for file in self._files():
            version = _version(file)
            if self._sent.get(file) != version:
                _upload(file, self.root / file.relative_to(self.path))
                self._sent[file] = version

    @contextlib.contextmanager
    def reached(self, kind: type[Exception] = InputError) -> Iterator[None]:
        """Convert errors of the storage to `kind`, or to RunError if a retry may succeed."""
        try:
            yield
        except (InputError, RunError):
            raise
        except Exception as error:
            raise (RunError if is_away(error) else kind)(
                f"{self.url} cannot be reached: {type(error).__name__}: {failure_reason(error)}; check its name and "
                "your access to it, then run the same command again"
            ) from error

    def _files(self) -> list[Path]:
        files = (file for file in self.path.rglob("*") if file.is_file() and file.name != LOCK)
        return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def root_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def failure_reason(error: BaseException) -> str:
    """Return the informative part of an error's text, without TensorStore's specifications."""
    text = " ".join(str(root_cause(error)).split()) or type(error).__name__
    for known in NO_ROOM:
        if known in text:
            return known
    files = re.findall(r'local file "([^"]+)"', text)
    if files and (word := _WORDS.get(text.split(":", 1)[0])):
        return f"{files[-1]} is {word}"
    text = text.split(" [tensorstore_spec", 1)[0].split(" [source locations", 1)[0]
    return shortened(text)


def raise_unless_damage(place: PathLike, error: Exception) -> None:
    """Re-raise errors that do not mean damaged files at `place`: out of memory, permissions, an unreachable server."""
    if isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
        raise error
    cause = root_cause(error)
    away = isinstance(cause, PermissionError | ConnectionError | TimeoutError) or str(cause).startswith(_NOT_DAMAGE)
    if away or type(cause).__module__.partition(".")[0] in _CLIENTS:
        raise RunError(f"{place} could not be read: {failure_reason(cause)}; try again") from error


def not_a_file(directory: PathLike) -> str | None:
    """Return the first path below a local directory that is not a file or directory; reading a pipe would block."""
    if is_url(str(directory)):
        return None
    for folder, _, names in os.walk(str(directory)):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                return path
    return None


def free_space(directory: PathLike) -> str:
    """Return the free space of the file system of `directory` in parentheses, or an empty string if unknown."""
    try:
        return f" ({byte_size(shutil.disk_usage(directory).free)} free)"
    except OSError:
        return ""


def check_room(directory: PathLike, size: int, kept: int) -> str | None:
    """Return a note if the file system of `directory` has no room for `kept` more checkpoints of `size` bytes.

    A directory that does not exist yet is on the file system of its parent. InputError if not even one fits.
    """
    if is_url(str(directory)):
        return None
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise InputError(
            f"--run must be on a disk with room for a checkpoint, which takes {byte_size(size)}, got {directory} with "
            f"{byte_size(free)} free; make room, or name another --run"
        )
    if free < kept * size:
        return (
            f"{byte_size(free)} are free in {directory}, and {kept} more checkpoints of {byte_size(size)} take "
            f"{byte_size(kept * size)}; make room, or keep fewer (--keep-newest)"
        )
    return None


def _root(url: str) -> epath.Path:
    scheme, _, place = url.partition("://")
    if scheme == "file" and place.startswith("/") and place.strip("/"):
        return epath.Path(place)
    if scheme != "gs" or not all(place.partition("/")):
        raise InputError(f"--run must be a directory or gs://BUCKET/RUN, got {url}; give one of these")
    filesystem(url)  # gcsfs is there, and no client caches listings
    os.environ.setdefault("EPATH_USE_TF", "false")  # one client for gs://, also if TensorFlow is installed
    return epath.Path(url)


def _download(source: epath.Path, target: Path, wanted: Callable[[str], bool]) -> None:
    """Copy the files of a directory, and its subdirectories for which `wanted` is true."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in entries(source):
        if not entry.is_dir():
            (target / entry.name).write_bytes(entry.read_bytes())
        elif wanted(entry.name):
            _download(entry, target / entry.name, wanted)


def _upload(file: Path, target: epath.Path) -> None:
    """Copy a file atomically, as object storage always does."""
    if is_url(str(target)):
        epath.Path(file).copy(target, overwrite=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source, atomic_file(Path(target), "wb") as copy:
        shutil.copyfileobj(source, copy)


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
