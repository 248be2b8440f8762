"""Trackers, with stand-ins of the services: what they receive, continue after a resume, and cannot break.

A stand-in is a module of the service's name with the calls that jaxlm makes; the real packages are not installed.
"""

import importlib.util
import json
import logging
import sys
import threading
import time
import types

import pytest
from toy_runs import assert_one_line, make_stores, pretrain_arguments, run_here

from jaxlm.runs import trackers
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.runs.trackers import Tracker, scalars

pytestmark = pytest.mark.usefixtures("two_devices")


class Recorded:
    """A run of a stand-in: the arguments that opened it, the lines it was given, and whether it was finished."""

    def __init__(self, **opened):
        self.opened, self.lines, self.finished = opened, [], False

    def log(self, values, step=None):
        self.lines.append({"step": step, **values} if step is not None else values)

    def define_metric(self, *_, **__):
        pass

    def finish(self):
        self.finished = True


@pytest.fixture
def service(monkeypatch):
    """(name) -> the runs of a stand-in for wandb or trackio."""

    def install(name):
        runs = []
        module = types.ModuleType(name)
        module.init = lambda **opened: runs.append(Recorded(**opened)) or runs[-1]
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        monkeypatch.setitem(sys.modules, name, module)
        return runs

    return install


@pytest.fixture
def mlflow(monkeypatch):
    """The runs of a stand-in for MLflow, by id."""
    runs = {}

    class Client:
        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id="7") if runs else None

        def create_experiment(self, name):
            return "7"

        def search_runs(self, experiments, query, max_results):
            assert experiments == ["7"]
            found = [i for i, run in runs.items() if f"'{run['tags']['jaxlm.key']}'" in query]
            return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=i)) for i in found]

        def create_run(self, experiment, tags, run_name):
            runs[run_name] = {"tags": tags, "params": {}, "lines": [], "ended": 0}
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))

        def log_batch(self, run_id, metrics=(), params=()):
            assert len(params) <= 100
            runs[run_id]["params"] |= {param.key: param.value for param in params}
            if metrics:
                runs[run_id]["lines"].append({"step": metrics[0].step} | {one.key: one.value for one in metrics})

        def set_terminated(self, run_id):
            runs[run_id]["ended"] += 1

    entities, tracking = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow.tracking")
    entities.Param = lambda key, value: types.SimpleNamespace(key=key, value=value)
    entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(key=key, value=value, step=step)
    tracking.MlflowClient = Client
    package = types.ModuleType("mlflow")
    package.__spec__ = importlib.util.spec_from_loader("mlflow", loader=None)
    for name, module in (("mlflow", package), ("mlflow.entities", entities), ("mlflow.tracking", tracking)):
        monkeypatch.setitem(sys.modules, name, module)
    return runs


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


def pretrain(run, stores, *more):
    flags = ["--num-steps", 4, "--checkpoint-every", 2, "--length", 32, "--log-every", 1]
    return run_here("pretrain", *pretrain_arguments(run, stores, *flags, *more))


def expected(run):
    return [{"step": record["step"], **scalars(record)} for record in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_tracker_receives_every_record(kind, service, stores, tmp_path):
    """Fails when a record or a number is left out, when a resumed run gets another id, or is opened as a new one."""
    runs, run = service(kind), tmp_path / "run"
    assert pretrain(run, stores, "--tracker", kind).code == 0
    (first,) = runs
    assert first.lines == expected(run) and first.finished
    assert first.opened["config"]["batch_size"] == 8 and first.opened["resume"] == "allow"
    assert {"loss", "learning_rate", "gradient_norm"} <= first.lines[1].keys()
    assert pretrain(run, stores, "--tracker", kind, "--num-steps", 4, "--log-every", 2).code == 0  # complete: no record
    assert len(runs) == 1
    assert pretrain(tmp_path / "other", stores, "--tracker", kind).code == 0
    identity = "id" if kind == "wandb" else "name"
    assert runs[1].opened[identity] != first.opened[identity]
    continued = trackers.SERVICES[kind](trackers.identity_of(str(run)))
    continued.finish()
    assert runs[2].opened[identity] == first.opened[identity]


def test_mlflow_receives_every_record_and_continues_its_run(mlflow, stores, tmp_path):
    """Fails when a second start creates a second run, or parameters are written again."""
    run = tmp_path / "run"
    assert pretrain(run, stores, "--tracker", "mlflow").code == 0
    (found,) = mlflow.values()
    assert found["lines"] == expected(run) and found["ended"] == 1
    assert found["params"]["batch_size"] == "8" and found["params"]["model.width"] == "32"
    again = trackers.SERVICES["mlflow"](trackers.identity_of(str(run)))
    again.log(5, {"loss": 1.0})
    assert len(mlflow) == 1 and found["lines"][-1] == {"step": 5, "loss": 1.0}


def test_a_service_that_fails_does_not_reach_the_training(service, stores, tmp_path, monkeypatch):
    """Fails when an error of the service ends the run or is not reported, or when a step waits for the service."""
    runs, run = service("wandb"), tmp_path / "run"
    monkeypatch.setattr(Recorded, "log", lambda *_, **__: 1 / 0)
    ended = pretrain(run, stores, "--tracker", "wandb")
    assert ended.code == 0 and len(runs) == 1
    assert ended.errors.count("Weights & Biases gets no more records: division by zero") == 1
    assert len(expected(run)) >= 4

    release = threading.Event()
    monkeypatch.setattr(Recorded, "log", lambda *_, **__: release.wait(30))
    tracker = Tracker("wandb", str(run))
    started = time.monotonic()
    for step in range(1000):
        tracker({"step": step, "loss": 1.0})
    assert time.monotonic() - started < 10 and not release.is_set()
    release.set()
    tracker.close()


def test_a_service_that_hangs_is_left_behind(service, stores, tmp_path, monkeypatch, caplog):
    """Fails when the end of a run waits for a service without limit, or in silence."""
    runs, run = service("trackio"), tmp_path / "run"
    assert pretrain(run, stores).code == 0
    release = threading.Event()
    monkeypatch.setattr(Recorded, "log", lambda *_, **__: release.wait(30))
    monkeypatch.setattr(trackers, "FLUSH_SECONDS", 0.1)
    tracker = Tracker("trackio", str(run))
    tracker({"step": 1, "loss": 1.0})
    with caplog.at_level(logging.WARNING, logger="jaxlm"):
        tracker.close()
    release.set()
    assert "trackio does not answer; metrics.jsonl has every record" in caplog.text and not runs[0].finished


def test_a_package_that_is_missing_is_one_line(stores, tmp_path, monkeypatch):
    """Fails when the run begins without its tracker."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    ended = pretrain(tmp_path / "run", stores, "--tracker", "wandb")
    assert_one_line(ended, 2, "--tracker must be installed, got wandb", "pip install wandb")
    assert not (tmp_path / "run").exists()


def test_scalars_are_named_by_their_trial():
    """Fails when two trials share a name, or a value that is not a finite number is passed on."""
    record = {"step": 3, "seed": 1, "peak_lr": 5e-05, "loss": 0.5, "update_norm/w": [1.0, 2.0], "mfu": None}
    record |= {"spike": {"median": 2.0, "rows": "4 to 8", "skipped": True}, "validation_loss": float("nan")}
    prefix = "seed_1/peak_lr_5e-05/"
    assert scalars(json.loads(json.dumps(record))) == {
        f"{prefix}loss": 0.5,
        f"{prefix}update_norm/w/0": 1.0,
        f"{prefix}update_norm/w/1": 2.0,
        f"{prefix}spike/median": 2.0,
        f"{prefix}spike/skipped": 1.0,
    }
