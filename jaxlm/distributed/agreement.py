"""Decisions that one process takes for all of them.

Several processes (one per host) run the same program on one run directory. Process 0 does everything that touches that
directory or must have the same outcome everywhere, and broadcasts the outcome, or the error, to the others. Every
process must call these functions, in the same order; with one process they cost nothing.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm.errors import InputError, RunError


def first_process_decides(decide: Callable[[], Any]) -> Any:
    """Call `decide` on process 0 and return its outcome (a JSON value) on every process; also acts as a barrier.

    An InputError or a RunError of process 0 is raised on every process, with the same message; any other exception is
    raised unchanged on process 0 and as a RunError on the others, so that no process waits forever.
    """
    if jax.process_count() == 1:
        return decide()
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            outcome = {"value": decide()}
        except Exception as error:  # broadcast to the other processes and raised again below
            failure = error
            kind = "input" if isinstance(error, InputError) else "run"
            known = isinstance(error, InputError | RunError)
            outcome = {kind: str(error) if known else f"process 0 failed: {type(error).__name__}: {error}"}
    outcome = _broadcast(outcome)
    if failure is not None:
        raise failure
    if "input" in outcome:
        raise InputError(outcome["input"])
    if "run" in outcome:
        raise RunError(outcome["run"])
    return outcome["value"]


def of_every_process(flags: np.ndarray) -> np.ndarray:
    """Return the flags of all processes. flags: bool (n,), n equal on all; returns bool (processes, n)."""
    if jax.process_count() == 1:
        return flags[None]
    return np.asarray(multihost_utils.process_allgather(flags.astype(np.uint8))).astype(bool)


def _broadcast(value: Any) -> Any:
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(payload))))
    buffer = np.zeros(length, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = payload
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8)
    return json.loads(received.tobytes().decode())
