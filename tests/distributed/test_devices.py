"""Memory in use, against what the kernel says of the process."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlm.distributed.devices import memory_in_use

CACHED = """
import warnings
import jax, jax.numpy as jnp
from jaxlm.distributed.devices import enable_compilation_cache

enable_compilation_cache()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(float(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))[0, 0]))
print([str(one.message)[:50] for one in caught])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_kernel():
    """Fails for another unit, or for the memory of now instead of the peak."""
    before = memory_in_use()["host_memory_gib"]
    taken = np.ones(int(before * 2**30) // 8 + 2**25)  # above the peak so far
    after = memory_in_use()["host_memory_gib"]
    del taken
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None and after > before + 0.1
    assert memory_in_use()["host_memory_gib"] == pytest.approx(int(found[1]) / 2**20, rel=0.02)


def test_peak_memory_of_a_device(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 2**29, "peak_bytes_in_use": 3 * 2**29})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory_in_use()["device_memory_gib"] == 1.5
    device.memory_stats = lambda: None  # as of a CPU
    assert memory_in_use()["device_memory_gib"] is None


@pytest.mark.parametrize("size", [None, 10**9], ids=["unbounded", "bounded"])
def test_a_torn_program_in_the_cache_is_replaced(tmp_path, size):
    """Fails if a cache entry that a kill has cut is read, refused and compiled anew at every start."""

    def start() -> list[str]:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        if size is not None:
            environment["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(size)
        ended = subprocess.run(
            [sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True, check=True
        )
        return ended.stdout.splitlines()

    intact = start()
    entries = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    assert entries and intact[1] == "[]"
    for path, content in entries.items():
        path.write_bytes(content[: len(content) // 2])
    torn = start()
    assert torn[0] == intact[0] and "Error reading persistent compilation cache entry" in torn[1]
    assert all(len(path.read_bytes()) > len(content) * 3 // 4 for path, content in entries.items())
    assert start() == intact
    assert not list(tmp_path.glob(".*.partial"))
