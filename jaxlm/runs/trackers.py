"""Trackers: the records of metrics.jsonl for Weights & Biases, MLflow or trackio, besides the run's own files.

A thread of its own passes the records on, so no step waits for a service. A service that fails is reported once and
has no effect on the training; metrics.jsonl has every record. A resumed run continues the tracker's run: its id is
derived from the first start in starts.jsonl. The packages are optional, and imported by the thread.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxlm.errors import InputError
from jaxlm.runs.config import TrackerKind as Kind
from jaxlm.runs.config import flat
from jaxlm.runs.directory import RunDirectory

log = logging.getLogger(__name__)

PROJECT = "jaxlm"  # unless the tracker's own variable names another one
FLUSH_SECONDS = 60.0  # the longest wait for a tracker after the training has ended
LONGEST_PARAMETER = 500  # characters of a parameter in MLflow
_NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "trackio"}


class Identity(NamedTuple):
    """A run as a tracker knows it. key: the same for every start of the run. config: the content of its config.json."""

    name: str
    key: str
    config: Mapping[str, Any]


class Tracker:
    """A listener of records that passes them on to a tracker.

    run: the run directory, which has its config and its first start when the first record comes.
    InputError if the tracker's package is not installed.
    """

    def __init__(self, kind: Kind, run: str) -> None:
        if importlib.util.find_spec(kind) is None:
            raise InputError(f"--tracker must be installed, got {kind}, which is not; run pip install {kind}")
        self.kind, self._run = kind, run
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Accept a record of metrics.jsonl."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker {self.kind}", daemon=True)
            self._thread.start()
        self._records.put(dict(record))

    def close(self) -> None:
        """Wait until the records have been passed on, at most FLUSH_SECONDS."""
        if self._thread is None:
            return
        self._records.put(None)
        self._thread.join(FLUSH_SECONDS)
        if self._thread.is_alive():
            log.warning("%s does not answer; metrics.jsonl has every record", _NAMES[self.kind])

    def _work(self) -> None:
        try:
            service = SERVICES[self.kind](identity_of(self._run))
            while (record := self._records.get()) is not None:
                service.log(record["step"], scalars(record))
            service.finish()
        except Exception as error:  # a service may fail in any way, and none of them may reach the training
            message = (str(error) or type(error).__name__).splitlines()[0]
            log.warning("%s gets no more records: %s; metrics.jsonl has every record", _NAMES[self.kind], message)


@contextmanager
def tracking(kind: Kind | None, run: str) -> Iterator[list[Callable[[Mapping[str, Any]], None]]]:
    """Give the listeners of a training for `--tracker`, and close them at its end."""
    tracker = None if kind is None else Tracker(kind, run)
    try:
        yield [] if tracker is None else [tracker]
    finally:
        if tracker is not None:
            tracker.close()


def identity_of(run: str) -> Identity:
    """Return a run as trackers know it."""
    directory = RunDirectory(run)
    first = json.dumps(directory.starts()[0], sort_keys=True)
    key = hashlib.sha256(first.encode()).hexdigest()[:16]
    return Identity(run.rstrip("/").rpartition("/")[2], key, directory.config)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name: those of a trial below its seed and rate, those of lists by index.

    Names have only characters that every tracker accepts.
    """
    prefix = "".join(f"{name}_{record[name]}/" for name in ("seed", "peak_lr") if name in record)
    values = {name: value for name, value in record.items() if name not in ("step", "seed", "peak_lr")}
    return dict(_numbers(values, prefix))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}{key}/")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}{index}/")
    elif isinstance(value, bool | int | float) and math.isfinite(value):
        yield name.removesuffix("/"), float(value)


class _Wandb:
    """A run of Weights & Biases. The step is a metric, because W&B's step counter rejects repeated steps."""

    def __init__(self, identity: Identity) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity.key,
            name=identity.name,
            config=dict(identity.config),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, found again by its tag `jaxlm.key`."""

    def __init__(self, identity: Identity) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([self._experiment], f"tags.`jaxlm.key` = '{identity.key}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            return
        run = self._client.create_run(self._experiment, tags={"jaxlm.key": identity.key}, run_name=identity.name)
        self._id = run.info.run_id
        values = [Param(field, str(value)[:LONGEST_PARAMETER]) for field, value in flat(identity.config).items()]
        for start in range(0, len(values), 100):  # the most that one request accepts
            self._client.log_batch(self._id, params=values[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    """A run of trackio, which knows its runs by name."""

    def __init__(self, identity: Identity) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{identity.name}-{identity.key[:6]}",
            config=dict(identity.config),
            resume="allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


# Open runs of the trackers. `log` adds the values of a step, which may come again after a run was resumed; `finish`
# sends what is left.
SERVICES: Mapping[str, Callable[[Identity], Any]] = {"wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio}
