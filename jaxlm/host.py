"""The host of a program: CPU cores, locks on files, and the versions of the packages that decide what it computes."""

import fcntl
import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO


class LockHeld(Exception):
    """A lock that another process holds; the text of the error names that process."""


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_cache() -> Path:
    """Return jaxlm's folder among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxlm"


def lock_file(path: Path, *, shared: bool = False) -> TextIO | None:
    """Lock a file for this process alone, or with others that share the lock, and write the process into it.

    Closing the returned file, or the end of the process, releases the lock. Returns None on a file system without
    locks. Raises LockHeld if another process holds the lock and does not share it.
    """
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise LockHeld(holder) from None
    except OSError:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


RECORDED = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
"""Packages whose versions a run records at each start, besides those of COMPILERS."""

PLATFORM_COMPILERS = {"cpu": (), "tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
"""Packages that compile programs for a platform, besides jax and jaxlib."""

COMPILERS = ("jax", "jaxlib", *(package for packages in PLATFORM_COMPILERS.values() for package in packages))
"""Packages that compile programs: with other versions of them the last bits of a result may differ."""


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of the packages that is installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compilers(platform: str) -> dict[str, str]:
    """Return the versions of what compiles programs for a platform: `cpu`, `gpu` or `tpu`."""
    return installed(("jax", "jaxlib", *PLATFORM_COMPILERS[platform]))


def in_words(versions: Mapping[str, str]) -> str:
    """Return `jax 0.11.2, jaxlib 0.11.2`."""
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def recorded() -> dict[str, str]:
    """Return the versions that a run records at a start: of Python, RECORDED and COMPILERS."""
    return {"python": ".".join(map(str, sys.version_info[:3]))} | installed(dict.fromkeys((*RECORDED, *COMPILERS)))


def compiler_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return `package before -> now` for each of COMPILERS that both have in different versions."""
    both = [name for name in COMPILERS if name in before and name in now]
    return [f"{name} {before[name]} -> {now[name]}" for name in both if before[name] != now[name]]
