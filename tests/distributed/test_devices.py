"""Memory in use, against what the kernel says of the process."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlm.distributed.devices import memory_in_use


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
