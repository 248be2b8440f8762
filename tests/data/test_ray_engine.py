"""Decisions of jaxlm.data.ray_engine that need no Ray: which units are given again, and which engines are refused."""

import importlib.util
import re
import socket
import sys
import unicodedata
from collections import deque
from importlib.metadata import version

import pytest

from jaxlm.data import ray_engine
from jaxlm.data.prepare_config import PrepareConfig, check
from jaxlm.data.ray_engine import LATE, MOST_DEATHS, PATIENCE, UNKNOWN, Schedule, check_engine, named, worker_functions
from jaxlm.data.sources import Slice, Unit
from jaxlm.errors import InputError
from jaxlm.storage import Entry


def test_units_are_given_once_and_a_window_bounds_them():
    """Fails if a unit is given twice without a reason, or more are in flight than asked for."""
    schedule = Schedule(deque(range(5)))
    assert schedule.give(2, 0.0) == [0, 1] and schedule.give(2, 1.0) == []
    assert schedule.done(1, 3.0) and not schedule.done(1, 4.0), "the copy of a unit that is done counts twice"
    assert schedule.give(2, 5.0) == [2] and schedule.give(1, 5.0) == []
    assert schedule.give(9, 6.0) == [3, 4] and not schedule.is_done
    assert all(schedule.done(number, 9.0) for number in (0, 2, 3, 4)) and schedule.is_done


def test_a_unit_may_end_fewer_workers_than_three():
    """Fails if deaths of different units are summed, or a unit whose worker ended is given last or never."""
    schedule = Schedule(deque(range(4)))
    schedule.give(2, 0.0)
    for deaths in range(1, MOST_DEATHS):
        assert schedule.died(0) and schedule.waiting[0] == 0 and schedule.deaths[0] == deaths
        assert schedule.give(2, 1.0) == [0]
    assert schedule.died(1), "another unit has its own count"
    assert not schedule.died(0)


def test_late_units():
    """Fails if a unit is late before the time, is late at each look, or the time ignores how long units take."""
    schedule = Schedule(deque(range(3)))
    schedule.give(3, 0.0)
    assert schedule.late(UNKNOWN - 1) == [] and schedule.late(UNKNOWN) == [0, 1, 2]
    assert schedule.late(2 * UNKNOWN) == [], "given again, a unit has twice the time"
    assert schedule.late(3 * UNKNOWN) == [0, 1, 2]
    schedule.done(0, 1000.0)
    assert schedule.patience() == LATE * 1000.0
    schedule.seconds = [1.0, 2.0, 900.0]
    assert schedule.patience() == PATIENCE


@pytest.mark.parametrize(
    "engine", ["spark", "Ray", "ray:", "ray:host", "ray://host:1", "ray:host:0", "ray:host:port", "ray:a b:1", ""]
)
def test_an_engine_that_is_none_is_refused(engine):
    """Fails if a misspelt engine is taken for another one, or is refused after the text was read."""
    rule = f"--engine must be local, ray or ray:HOST:PORT, got {engine}; give"
    with pytest.raises(InputError, match=re.escape(rule)):
        check_engine(engine)


def test_engines_that_cannot_be_used_are_refused(monkeypatch):
    """Fails if a missing extra or an address where nothing listens costs more than one line and a moment."""
    assert check_engine("local") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"without Ray, got ray:h:1; run launch/setup\.sh cpu ray, or pip install"):
        check_engine("ray:h:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert check_engine("ray") == ""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        engine = f"ray:127.0.0.1:{listens.getsockname()[1]}"
        assert f"ray:{check_engine(engine)}" == engine
    for refused in (engine, "ray:127.0.0.1:99999", "ray:no-such-host.invalid:6379"):
        with pytest.raises(InputError, match=f"must name a Ray cluster that runs, got {re.escape(refused)} \\(.+\\);"):
            check_engine(refused)


def test_parts_and_ray_exclude_each_other():
    """Fails if a part of the units would be given to a cluster, and the rest to nobody."""
    config = PrepareConfig(("text:*",), "bytes", "store", engine="ray", part="0/2")
    with pytest.raises(InputError, match="--part must be left out with --engine ray, got 0/2; Ray distributes"):
        check(config)


def test_a_unit_is_named_with_its_files():
    """Fails if a user could not tell which file ends the workers, or a message lists thousands."""
    unit = Unit(0, tuple(Slice(Entry(f"{k // 2}.txt", 9, 0), k, k + 1) for k in range(10)), 10)
    assert named(7, unit) == "unit 7 (0.txt, 1.txt, 2.txt, 2 more)"
    assert named(0, Unit(0, (Slice(None, 0, 9),), 1)) == "unit 0 (records of a data set)"


def test_versions_of_a_worker(monkeypatch):
    """Fails if a worker with another Python, Unicode or library would pass, or one without jaxlm could not say so.

    The reference is what Python and its package index of this environment report.
    """
    versions, work = worker_functions()
    found = versions(["tokenizers", "no-such-package"])
    assert found.pop("jaxlm").startswith("with code ")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    libraries = {"tokenizers": version("tokenizers"), "no-such-package": "none"}
    assert found == {"Python": python, "Unicode": unicodedata.unidata_version} | libraries
    for name in found:
        kind, message = work(versions(found.keys() - {"Python", "Unicode"}) | {name: "0"}, [], 0, ())
        assert kind == "input" and f"must have {name} 0 like this process, got " in message
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert versions([])["jaxlm"] == "none"
    for function in (versions, work):  # Ray sends the code of a function that no module has
        assert "<locals>" in function.__qualname__ and not hasattr(ray_engine, function.__name__)


def test_the_digest_follows_the_code(tmp_path, monkeypatch):
    """Fails if workers with another checkout of the same version pass."""
    digests = set()
    for text in ("a = 1\n", "a = 2\n"):
        package = tmp_path / text[-2] / "jaxlm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        spec = importlib.util.spec_from_file_location(
            "jaxlm", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        digests.add(worker_functions()[0]([])["jaxlm"])
    assert len(digests) == 2
