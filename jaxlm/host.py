"""Resources of the host that processes share: CPU cores and locks on files."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO


class LockHeld(Exception):
    """A lock that another process holds; the text of the error names that process."""


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lock_file(path: Path) -> TextIO | None:
    """Lock a file for this process alone and write the process into it.

    Closing the returned file, or the end of the process, releases the lock. Returns None on a file system without
    locks. Raises LockHeld if another process holds the lock.
    """
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
