"""Processes of one run: how they find each other, and how all of them stop at the same step."""

import logging
import os
import signal
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

from jaxlm.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes outside a pod, one a host. On a Cloud TPU pod all of this is found by itself."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    num_processes: int | None = None
    process_id: int | None = None


def start_processes(config: DistributedConfig) -> None:
    """Join the other processes, if there are any; call before anything asks for devices.

    The runtime gives up after 300 s when some do not come.
    """
    given = [config.coordinator is not None, config.num_processes is not None, config.process_id is not None]
    if any(given):
        if not all(given):
            raise InputError("distributed: coordinator, num_processes and process_id belong together: give all three")
        _check(config)
        if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    elif len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        jax.distributed.initialize()


def _check(config: DistributedConfig) -> None:
    host, _, port = (config.coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"distributed.coordinator {config.coordinator}: HOST:PORT of process 0, 10.0.0.1:1234 say")
    if not 0 <= (config.process_id or 0) < (config.num_processes or 0):
        raise InputError(
            f"distributed.process_id {config.process_id}: a number from 0 up to, not including, num_processes "
            f"{config.num_processes}"
        )


class StopSignal:
    """SIGTERM or SIGINT asks for a stop after the current step; a second one ends the process at once.

    With several processes the runtime's preemption service agrees on the step: it listens to SIGTERM itself, and a
    handler of ours would silence it, so only SIGINT is handled, by passing it on as SIGTERM.
    """

    def __init__(self) -> None:
        self.received = False
        self._asked = 0
        self._several = jax.process_count() > 1
        self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._on_signal)}
        if not self._several:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        self.received = True

    def requested(self) -> bool:
        """Whether to stop before the next step; the same answer in every process. To be asked once a step by each."""
        if self._several:
            # Counted here: the runtime agrees on a number ahead of it, and steps begin anew with each seed.
            self._asked += 1
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self.received

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
