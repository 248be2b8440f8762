"""Checkpoints through accidents: kill -9 during saves, a full disk, several processes of which one meets damage.

Fails when a killed program leaves something that restores wrongly, when a full disk passes for a save, or when one
process waits for another that has given up.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from paths import REPOSITORY
from xla_flags import xla_flags

from jaxlm.distributed import processes as together
from jaxlm.errors import RunError
from jaxlm.runs.checkpoints import Checkpoints

KILLED = """
import sys
import jaxlm, jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jaxlm.runs.checkpoints import Checkpoints

state = {"x": jnp.zeros((400, 500)), "step": jnp.int32(0)}
abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    first = 0
    if checkpoints.steps():
        restored = checkpoints.restore(abstract)
        state, first = restored.state, restored.step
        assert int(state["step"]) == first and (np.asarray(state["x"]) == first).all()
        assert not restored.notes, restored.notes
    print("from", first, flush=True)
    for step in range(first + 1, first + 1 + int(sys.argv[2])):
        state = advance(state)
        checkpoints.save(step, state, config={"steps": step})
        for finished in checkpoints.finished():
            print("saved", finished, flush=True)
"""

FULL = """
import sys, time
import jaxlm, jax.numpy as jnp, numpy as np
from pathlib import Path
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.errors import run_command

def main():
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(1000)}, config={})
        print("saved", checkpoints.wait(), flush=True)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((1000, 1000)), jnp.float32)
        checkpoints.save(2, {"x": x}, config={})
        while not checkpoints.finished():
            time.sleep(0.01)
        print("counted", flush=True)

run_command(main)
"""

TWO = """
import sys
import jaxlm, jax
sys.stdout = open(sys.argv[4], "w")  # the standard output has Gloo's lines too, and they break into others
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
import numpy as np
from pathlib import Path
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.trees import leaf_checksums
from jaxlm.errors import InputError
from jaxlm.distributed.processes import first_process_decides
from jaxlm.runs.directory import RunDirectory

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
def put(array, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
def state_of(step):
    rng = np.random.default_rng(step)
    return {"w": put(rng.standard_normal((512, 64)).astype(np.float32), "fsdp"), "step": put(np.array(step, np.int32))}

path = Path(sys.argv[1])
run = RunDirectory(path)
run.open({"width": 4})
run.record_start(started_from=None)
run.close()
try:
    RunDirectory(path).open({"width": 5})
except InputError as error:
    print("refused", error)
run.open({"width": 4})
state = state_of(0)
abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
with Checkpoints(run.checkpoints) as checkpoints, Checkpoints(path / "kept", keep_newest=1) as kept:
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step), config={"width": 4})
        kept.save(step, state_of(step), config={"width": 4})
    print("saved", checkpoints.wait(), kept.wait())
    def damage():  # one row of shards: what the other process reads stays sound
        for file in (path / "checkpoints" / "3" / "state" / "ocdbt.process_1").rglob("d/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    first_process_decides(damage)
    restored = checkpoints.restore(abstract)
    print("restored", restored.step, leaf_checksums(restored.state) == leaf_checksums(state_of(2)), restored.notes)
    print("holds", [sum(shard.data.size for shard in leaf.addressable_shards) for leaf in restored.state.values()])
    checkpoints.save(3, state_of(3), config={"width": 4})
    checkpoints.wait()
    print("aside", checkpoints.move_aside_after(2), checkpoints.steps(), kept.steps())
print("done")
"""


def start(program: str, *arguments: object, devices: int = 1, prefix: Sequence[str] = ()) -> subprocess.Popen:
    """Run a program text; after a prefix, the program is its last argument instead."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [*(prefix or (sys.executable, "-c")), program, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_during_saves_the_newest_sound_step_restores(tmp_path):
    rng = random.Random(0)
    reached = 0
    for _ in range(3):
        process = start(KILLED, tmp_path, 10_000)
        assert process.stdout is not None
        first = process.stdout.readline().split()
        assert first and int(first[1]) >= reached, process.communicate()[1]
        while process.stdout.readline().split()[0] != "saved":
            pass
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        told = process.communicate()[0].split()
        reached = max([reached, *(int(word) for word in told if word.isdecimal())])  # what counted stays
    process = start(KILLED, tmp_path, 2)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert int(output.split()[1]) >= reached > 0
    left = [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()]
    assert left == [] and len(list(tmp_path.iterdir())) == 3


def assert_full_disk_is_one_line(process: subprocess.Popen, reason: str) -> None:
    output, errors = process.communicate(timeout=120)
    assert output == "saved [1]\n"
    assert process.returncode == 1, errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("failed: ") and f"step 2 could not be written: {reason}" in errors
    assert "step 1 is the newest complete one" in errors


def test_a_write_that_fails_is_one_line_and_the_older_checkpoint_stays(tmp_path):
    """The failure is a limit on the size of files, which needs no rights; the next test fills a disk."""
    limited = ["sh", "-c", f"ulimit -f 1000; exec '{sys.executable}' -c \"$0\" '{tmp_path}'"]  # 0.5 or 1 MB
    assert_full_disk_is_one_line(start(FULL, prefix=limited), "File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays(tmp_path):
    disk, listing = tmp_path / "disk", tmp_path / "listing"
    disk.mkdir()
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=2m none '{disk}'"
    try:
        if subprocess.run([*inside, mount], capture_output=True, timeout=20).returncode:
            pytest.skip("no right to mount a small tmpfs here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    run = f"{mount}; '{sys.executable}' -c \"$0\" '{disk}'; code=$?; ls '{disk}' >'{listing}'; exit $code"
    process = start(FULL, prefix=[*inside, run])
    assert_full_disk_is_one_line(process, "No space left on device")
    assert listing.read_text().split() == ["1"]


@pytest.mark.slow
def test_two_processes_save_meet_damage_and_agree(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = [tmp_path / f"told-{number}" for number in range(2)]
    processes = [start(TWO, tmp_path / "run", port, number, told[number], devices=4) for number in range(2)]
    for process in processes:
        try:
            errors = process.communicate(timeout=180)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, errors
    lines, others = (path.read_text().splitlines() for path in told)
    assert "process 1 could not read it; moved to damaged-3" in lines[2]
    assert "truncated; moved to damaged-3" in others[2]  # who met the damage says what it is
    assert lines[:2] + lines[3:] == others[:2] + others[3:]
    assert lines[0].startswith("refused") and "width: 4 -> 5" in lines[0]
    assert lines[1] == "saved [1, 2, 3] [1, 2, 3]"
    assert lines[2].startswith("restored 2 True ('checkpoint ") and "is damaged in w" in lines[2]
    assert lines[3] == f"holds [4, {512 * 64 // 2}]"  # the step on each device, and half of what is cut
    assert lines[4].startswith("aside ['checkpoint 3 is newer") and lines[4].endswith("[1, 2] [3]")
    assert len((tmp_path / "run" / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("removed", [True, False])
def test_a_directory_that_is_changed_is_no_full_disk(tmp_path, monkeypatch, removed):
    """Fails if the line tells to free space, or has the insides of Orbax. It may have made the directory again."""
    directory = tmp_path / "checkpoints"
    inside = "No ArrayMetadata found for process_index=0; But input PyTree contains <ParamInfo object at 0x7ff0>"
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, config={})
        checkpoints.wait()

        def save(step, args):
            shutil.rmtree(directory)
            if not removed:
                directory.mkdir()
            raise FileNotFoundError(2, "No such file") if removed else ValueError(inside)

        monkeypatch.setattr(checkpoints._manager, "save", save)
        with pytest.raises(RunError) as raised:
            checkpoints.save(2, {"x": jnp.ones(3)}, config={})
    assert str(raised.value) == (
        f"{directory}: the checkpoint of step 2 could not be written: the directory was changed meanwhile; there is no "
        "older one; keep other programs from moving or removing files there, then the same command begins again"
    )


def test_steps_are_those_of_process_0(tmp_path, monkeypatch):
    """A stale listing of another process is not used. Fails if one process would resume and the other begin."""
    checkpoints = Checkpoints(tmp_path, read_only=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(together, "_broadcast", lambda own: {"value": [4, 8]})
    assert (checkpoints.steps(), checkpoints.agreed_steps()) == ([], [4, 8])


@pytest.mark.parametrize("package", ["training", "finetuning"])
def test_training_decides_by_agreed_steps(package):
    """Fails if a decision that all processes take is taken by each for itself."""
    for path in sorted((Path(together.__file__).parents[1] / package).glob("*.py")):
        assert not re.search(r"\.steps\(\)", path.read_text()), path
