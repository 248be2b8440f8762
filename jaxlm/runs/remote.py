"""A run at a URL, gs://BUCKET/RUN: its checkpoints are read and written there, its small files on this machine.

A program that writes has the small files in a folder of the user's cache: fetched when the run is opened, so that what
an earlier program left there never counts, and uploaded whole when they have changed. A program that reads fetches what
it needs into a folder of its own, which goes when it ends. file:///DIRECTORY is reached in the same way.
"""

import atexit
import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from jaxlm.atomic_write import atomic_file
from jaxlm.distributed.devices import user_cache
from jaxlm.errors import InputError, RunError
from jaxlm.runs.storage_errors import failure_reason

LARGE = ("checkpoints", "kept")  # folders that Orbax alone reads and writes, where they lie
LOCK = "lock"  # of the folder on this machine


def is_url(place: Path | str) -> bool:
    """Whether a run lies elsewhere."""
    return isinstance(place, str) and "://" in place


def entries(folder: epath.Path) -> Iterator[epath.Path]:
    """What is in a folder; the object that makes an empty one visible in a bucket is listed by the folder's name."""
    for entry in folder.iterdir():
        if entry.name != folder.name or entry.exists():
            yield entry


class Mirror:
    """The small files of the run at `url`. root: the run there; path: the folder here of a program that writes.

    InputError for a URL that this machine cannot read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = _root(url)
        name = f"{self.root.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:16]}"
        self.path = user_cache() / "runs" / name
        self._sent: dict[Path, tuple[int, int]] = {}

    def fetched(self) -> Path:
        """A folder with what a program needs that reads the run: the files at the top and the tokenizer."""
        folder = Path(tempfile.mkdtemp(prefix="jaxlm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        with self.reached():
            if not (self.root / "config.json").exists():
                raise InputError(f"{self.url} is no run directory: it has no config.json; give the --run of one")
            _download(self.root, folder, lambda name: name == "tokenizer")
        return folder

    def fetch(self) -> None:
        """Put what is there in the place of all that is here."""
        for old in self.path.iterdir():
            if old.name != LOCK:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        if (self.root / "config.json").exists():
            _download(self.root, self.path, lambda name: name not in LARGE)
        self._sent = {file: _version(file) for file in self._files()}

    def upload(self) -> None:
        """Upload what has changed, in the order in which it was written."""
        for file in self._files():
            version = _version(file)
            if self._sent.get(file) != version:
                _upload(file, self.root / file.relative_to(self.path))
                self._sent[file] = version

    @contextlib.contextmanager
    def reached(self, kind: type[Exception] = InputError) -> Iterator[None]:
        """Errors of the storage, whose kinds are many, as one line; a RunError where another try may do."""
        try:
            yield
        except (InputError, RunError):
            raise
        except Exception as error:
            raise (RunError if _is_away(error) else kind)(
                f"{self.url} cannot be reached: {type(error).__name__}: {failure_reason(error)}; look at its name and "
                "at your access to it, then give the same command again"
            ) from error

    def _files(self) -> list[Path]:
        files = (file for file in self.path.rglob("*") if file.is_file() and file.name != LOCK)
        return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def _is_away(error: Exception) -> bool:
    """Whether the storage, or the way there, is down: its name and the access to it may well be right."""
    client = type(error).__module__.partition(".")[0]
    code = getattr(error, "code", None)  # of gcsfs's errors
    down = isinstance(code, int) and (code == 429 or code >= 500)
    return down or client == "aiohttp" or isinstance(error, ConnectionError | TimeoutError)


def _root(url: str) -> epath.Path:
    scheme, _, place = url.partition("://")
    if scheme == "file" and place.startswith("/") and place.strip("/"):
        return epath.Path(place)
    if scheme != "gs" or not all(place.partition("/")):
        raise InputError(f"{url}: a run lies in a directory or at gs://BUCKET/RUN; give one of these")
    if importlib.util.find_spec("gcsfs") is None:
        raise InputError(f"{url}: gs:// needs gcsfs, which is not installed: launch/setup.sh tpu, or pip install gcsfs")
    import fsspec

    os.environ.setdefault("EPATH_USE_TF", "false")  # one client for gs://, whatever else is installed
    # What was listed once may have changed: TensorStore and the other processes write there too.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # failures reach the user as our line, not as a traceback
    return epath.Path(url)


def _download(source: epath.Path, target: Path, wanted: Callable[[str], bool]) -> None:
    """Copy the files of a folder, and the folders in it that are wanted."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in entries(source):
        if not entry.is_dir():
            (target / entry.name).write_bytes(entry.read_bytes())
        elif wanted(entry.name):
            _download(entry, target / entry.name, wanted)


def _upload(file: Path, target: epath.Path) -> None:
    """Copy a file; it is there whole or not at all, as objects of a store always are."""
    if is_url(str(target)):
        epath.Path(file).copy(target, overwrite=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source, atomic_file(Path(target), "wb") as copy:
        shutil.copyfileobj(source, copy)


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
