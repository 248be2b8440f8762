"""Locks that are objects, for processes that see the same storage: each is created only if there is none.

A lock holds the process, its host and the times of its beginning and of its renewal. The process writes it anew every
RENEWED seconds, in a thread. One that is not written anew while another process watches it for WATCHED seconds is
stale: its process or its host has ended, and the other process removes it. No clocks are compared. A process that was
stopped for so long notices at its next renewal that it has lost the lock.
"""

import datetime
import json
import logging
import os
import socket
import threading
import time
from typing import Any

from jaxlm import storage
from jaxlm.errors import InputError, RunError
from jaxlm.files import parse_json
from jaxlm.host import LockHeld

log = logging.getLogger(__name__)

RENEWED = 5.0  # seconds
WATCHED = 30.0  # seconds, several renewals
_LOOKS = 0.5  # seconds between two looks at a lock


class ObjectLock:
    """A lock that this process holds until `close`."""

    def __init__(self, place: str) -> None:
        """Create the lock, in the place of a stale one too. Raises LockHeld if another process holds it."""
        self._place = place
        self._holder = {"process": os.getpid(), "host": socket.gethostname(), "since": _now()}
        self._is_lost = False
        self._ended = threading.Event()
        while not storage.create(place, self._content()):
            if (holder := holder_of(place)) is not None:
                raise LockHeld(holder)
        self._thread = threading.Thread(target=self._renew, name="jaxlm-lock", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ObjectLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise RunError if another process has replaced the lock, because this one did not renew it."""
        if self._is_lost:
            raise RunError(
                f"{self._place} was replaced by another process, as this one did not renew it for {WATCHED:.0f} s; "
                "run the same command again when the other one has ended"
            )

    def close(self) -> None:
        """Remove the lock. It is left to become stale if the storage is away."""
        self._ended.set()
        self._thread.join(WATCHED)
        if not self._is_lost and not self._thread.is_alive():
            storage.remove(self._place)

    def _content(self) -> bytes:
        return json.dumps(self._holder | {"renewed": _now()}).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            try:
                found = _parsed(storage.read(self._place))
                if {name: found.get(name) for name in self._holder} != self._holder:
                    raise FileNotFoundError
                storage.write(self._place, self._content())
            except FileNotFoundError:
                self._is_lost = True
                return
            except (InputError, RunError) as error:  # the storage is away, which the other threads notice too
                log.debug("%s was not renewed: %s", self._place, error)


def holder_of(place: str) -> str | None:
    """Return the process that holds a lock, or None if there is no lock. A stale lock is removed.

    It watches the lock until it changes, which takes RENEWED seconds if it is held, else WATCHED seconds.
    """
    try:
        first, began, is_said = storage.read(place), time.monotonic(), False
        while (waited := time.monotonic() - began) < WATCHED:
            if waited > 2 * RENEWED and not is_said:
                log.warning(
                    "%s has not renewed the lock %s, which is removed after %.0f s without a renewal",
                    _named(first),
                    place,
                    WATCHED,
                )
                is_said = True
            time.sleep(_LOOKS)
            if (now := storage.read(place)) != first:
                return _named(now)
    except FileNotFoundError:
        return None
    storage.remove(place)
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _named(content: bytes) -> str:
    """Return the process of a lock in words."""
    found = _parsed(content)
    since = str(found.get("since", "?")).partition(".")[0].replace("T", " ")
    return f"process {found.get('process', '?')} on {found.get('host', '?')} since {since} UTC"
