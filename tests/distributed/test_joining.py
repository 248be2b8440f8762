"""How processes find each other: by the metadata of a TPU VM, by flags, and with all devices of their machine.

Fails when the workers of a pod would each train alone, or when Slurm's variables leave a process one GPU of several.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from paths import REPOSITORY
from toy_processes import free_port

from jaxlm.distributed import processes
from jaxlm.errors import InputError

pytestmark = pytest.mark.versions

PROGRAM = """
import json, os, sys
import jax
from jax._src import distributed
from jaxlm.distributed.processes import DistributedConfig, start_processes

for name in json.loads(sys.argv[1]):
    os.environ.pop(name, None)
start_processes(DistributedConfig(*json.loads(sys.argv[2])))
state = distributed.global_state
print(json.dumps([state.num_processes, state.process_id, jax.config._read("jax_cuda_visible_devices")]))
"""


def start(*, without: list[str], flags: list, program: str = PROGRAM, **environment: str) -> subprocess.Popen:
    """A process that joins and says as how many, as which, and which GPUs it may see."""
    words = [sys.executable, "-c", program, json.dumps(without), json.dumps(flags)]
    given = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "SLURM_"))}
    given |= {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.Popen(words, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(started: list[subprocess.Popen]) -> list:
    ends = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), ends
    return [json.loads(output) for output, _ in ends]


def metadata_of(number: int, workers: int) -> ThreadingHTTPServer:
    """A stand-in for the metadata server of worker `number` of a pod; it is no cloud."""
    answers = {
        "agent-worker-number": str(number),
        "worker-network-endpoints": ",".join(["unknown:unknown:127.0.0.1"] * workers),
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'",
    }

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers[self.path.rpartition("/")[2]].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.slow
def test_the_workers_of_a_pod_join(request):
    """Their variables name no worker: those are in the metadata alone."""
    servers = [metadata_of(number, 2) for number in range(2)]
    for server in servers:
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
    pod = {"JAX_FORCE_TPU_INIT": "1", "JAX_PLATFORMS": "", "JAX_COORDINATOR_PORT": str(free_port())}
    nothing = [None, None, None]
    found = [
        start(without=["TPU_SKIP_MDS_QUERY"], flags=nothing, GCE_METADATA_IP=f"127.0.0.1:{port}", **pod)
        for k, port in enumerate(server.server_port for server in servers)
    ]
    assert [end[:2] for end in said(found)] == [[2, 0], [2, 1]]


def test_a_port_that_is_none_is_refused():
    with pytest.raises(InputError, match="HOST:PORT of process 0"):
        processes.start_processes(processes.DistributedConfig("localhost:99999", 2, 1))


@pytest.mark.slow
def test_a_process_of_slurm_has_all_gpus_of_its_machine():
    address = f"localhost:{free_port()}"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    found = [
        start(without=[], flags=[address, 2, k], JAX_PLATFORMS="cpu", SLURM_PROCID=str(k), **slurm) for k in range(2)
    ]
    assert said(found) == [[2, 0, "all"], [2, 1, "all"]]


@pytest.mark.slow
def test_hosts_with_other_versions_are_refused():
    """Fails when processes whose programs differ begin to train: each would wait for the other's collectives."""
    address, versions = f"localhost:{free_port()}", ({"jax": "0.11.2", "jaxlib": "0.11.2"}, {"jax": "0.11.2"})
    other = "import jaxlm.host; jaxlm.host.installed = lambda packages: {}\n"
    started = [
        start(without=[], flags=[address, 2, k], program=other.format(found) + PROGRAM, JAX_PLATFORMS="cpu")
        for k, found in enumerate(versions)
    ]
    for process in started:
        _, error = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "jaxlib must have the same version on all processes, got 0.11.2 on process 0; none on process 1" in error
