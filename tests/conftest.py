"""Shared fixtures. All tests run on a CPU that plays eight devices."""

import os
import shutil
import signal
import tempfile

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs beside it; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub outside this machine
# A thread of XLA's CPU client waits in each collective, and in each launch on a device that has 32 computations to do.
# If there are eight, one for each device, which is what a small machine gets, a launch can hold the one that a
# collective needs, and both wait until XLA ends the process.
os.environ.setdefault("PJRT_NPROC", "32")
# Toy models are compiled far longer than they run: without LLVM's optimizations in a third of the time. Eight devices
# on a busy machine may wait for each other longer than the 40 seconds after which XLA ends the process.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)
# What one test compiled is not compiled again by another, nor by a command that is a process of its own. Each worker of
# pytest-xdist has a folder of its own, as JAX writes into it without care for who reads.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxlm-compiled-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--campaign", type=int, default=0, metavar="N", help="run what is marked campaign, N faults of it")
    parser.addoption("--campaign-directory", type=Path, default=Path("runs/faults"), help="where it keeps its journal")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--campaign"):
        long = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_unconfigure():
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """The unpacked real data sets: $JAXLM_DATA, or .data in the checkout."""
    path = Path(os.environ.get("JAXLM_DATA", REPOSITORY / ".data"))
    if not (path / "glue").is_dir():
        pytest.skip(f"real data is not at {path}: unpack it there or set JAXLM_DATA")
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Toy runs of every kind and the files they need, see `toy_api`."""
    from toy_api import make_folder

    return make_folder(tmp_path_factory.mktemp("api"))


@pytest.fixture(autouse=True)
def names_of_arguments():
    """Errors name arguments, not flags, until a test parses a command line, whatever an earlier test has parsed."""
    from jaxlm.errors import name_as_flags

    name_as_flags(())


@pytest.fixture(scope="module")
def two_devices():
    """For modules that are not about meshes: the same runs take twice the time on eight devices."""
    from toy_devices import first_devices

    with first_devices(2):
        yield


@pytest.fixture
def eight_devices(two_devices):
    """All devices again, for a test of such a module whose meaning they are."""
    from toy_devices import first_devices

    with first_devices(8):
        yield
