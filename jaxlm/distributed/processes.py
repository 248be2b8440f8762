"""Processes of one run: how they find each other, and how all of them stop at the same step."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax._src import cloud_tpu_init  # whether this is a TPU VM has no public name
from jax.experimental import multihost_utils

from jaxlm.errors import EXIT_FAILED, InputError

log = logging.getLogger(__name__)

JOIN_WITHIN = 300
"""Seconds that processes wait for those that have not come yet."""


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes outside a pod, one a host. On a Cloud TPU pod all of this is found by itself."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    num_processes: int | None = None
    process_id: int | None = None


def start_processes(config: DistributedConfig, *, saves: bool = True) -> None:
    """Join the other processes, if there are any; call before anything asks for devices.

    saves: the caller asks a `StopSignal` between its steps. Otherwise SIGTERM ends a process, as it does alone.
    Where they do not all come within JOIN_WITHIN seconds, a line says so and the process ends with EXIT_FAILED.
    """
    jax.config.update("jax_enable_preemption_service", saves)
    given = [config.coordinator is not None, config.num_processes is not None, config.process_id is not None]
    if any(given):
        if not all(given):
            raise InputError("distributed: coordinator, num_processes and process_id belong together: give all three")
        _check(config)
        if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with _giving_up(f"{config.num_processes} processes", f"{config.coordinator} (--distributed.coordinator)"):
            _join(config)
    elif _on_pod():
        with _giving_up("workers of the pod", "worker 0"):
            jax.distributed.initialize(initialization_timeout=2 * JOIN_WITHIN)


@contextlib.contextmanager
def _giving_up(who: str, where: str) -> Iterator[None]:
    """End the process when the body takes longer than JOIN_WITHIN: the runtime, in its time, aborts it instead."""

    def give_up() -> None:
        print(
            f"failed: not all {who} came to {where} within {JOIN_WITHIN} s: start the others too; the logs of those "
            "that were started say why they ended, and each must reach that address",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_FAILED)

    timer = threading.Timer(JOIN_WITHIN, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join(config: DistributedConfig) -> None:
    if config.process_id == 0:
        _check_free(config.coordinator)
    jax.distributed.initialize(
        config.coordinator,
        config.num_processes,
        config.process_id,
        cluster_detection_method="deactivate",  # by Slurm's variables JAX would take one GPU of the machine
        initialization_timeout=2 * JOIN_WITHIN,
    )


def _check_free(coordinator: str | None) -> None:
    """InputError where something listens at the port: the runtime may die of that by a signal."""
    port = int((coordinator or "").rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise InputError(
            f"distributed.coordinator {coordinator}: process 0 cannot join there ({error}); give all the same "
            "free port on the machine of process 0"
        ) from error


def _on_pod() -> bool:
    """Whether this is a worker of a Cloud TPU.

    Google Kubernetes Engine names the workers in a variable. On a TPU VM the machine's metadata does, which JAX asks,
    one host being a pod too; not where only CPUs are wanted.
    """
    if hosts := os.environ.get("TPU_WORKER_HOSTNAMES"):
        return len(hosts.split(",")) > 1
    asked = "TPU_SKIP_MDS_QUERY" not in os.environ  # JAX itself sets it where there is no chip
    platforms = (jax.config.jax_platforms or "tpu").split(",")  # type: ignore[attr-defined]
    return cloud_tpu_init.running_in_cloud_tpu_vm and asked and "tpu" in platforms


def _check(config: DistributedConfig) -> None:
    host, _, port = (config.coordinator or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
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
        signal.signal(signal.SIGINT, self._on_signal)
        if not self._several:
            signal.signal(signal.SIGTERM, self._on_signal)

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
