"""Checkpoints: they restore to the bit, on any mesh, or say in one line which leaf is damaged.

Fails when Orbax's silences (an altered byte, a full disk, a refused save) reach the user as sound training.
"""

import json
import mmap
import platform
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.errors import InputError, RunError
from jaxlm.runs import checkpoints as checkpoints_module
from jaxlm.runs.checkpoints import Checkpoints, DamagedCheckpoint, _hash
from jaxlm.runs.trees import leaf_checksums, named_leaves

CONFIG = {"model": {"kind": "gpt", "width": 32}, "optimizer": {"peak_lr": 6.25e-5}}


def make_mesh(data: int, fsdp: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return jax.sharding.Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def make_state(mesh: jax.sharding.Mesh, seed: int = 0, step: int = 0) -> dict:
    """A little of everything: sharded float32, bfloat16, int32 of rank 0, bool, uint32 keys, a NaN and a -0.0."""
    rng = np.random.default_rng(seed)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    table = rng.standard_normal((64, 32)).astype(np.float32)
    table[0, :2] = np.nan, -0.0
    kernels = {f"layer{n}": put(rng.standard_normal((48, 64)).astype(np.float32), None, "fsdp") for n in range(4)}
    return {
        "step": put(np.int32(step)),
        "params": {
            "backbone": {
                "embeddings": put(table, "fsdp"),
                "blocks": kernels,
                "half": put(jnp.asarray(rng.standard_normal((8, 40)), jnp.bfloat16), "fsdp"),
            }
        },
        "moments": (put(rng.standard_normal((64, 32)).astype(np.float32)), put(rng.random(300) < 0.5)),
        "key": put(rng.integers(0, 2**32, 2, dtype=np.uint32)),
    }


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def same_bits(one, other) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype and a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def save_steps(directory, *steps: int, **options) -> dict:
    """Save the same state at several steps; returns it."""
    state = make_state(make_mesh(2, 4))
    with Checkpoints(directory, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, config=CONFIG, extra={"step": step})
    return state


def flip(path, offset: int, bit: int = 4) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(bytes(content))


def data_files(step_directory):
    """The files that hold arrays; some of them Orbax leaves behind without ever reading them."""
    return sorted(path for path in (step_directory / "state").rglob("d/*") if path.is_file())


def damage_arrays(step_directory) -> None:
    for file in data_files(step_directory):
        flip(file, file.stat().st_size // 2)


def test_restores_to_the_bit_with_config_and_extra(tmp_path):
    state = save_steps(tmp_path / "checkpoints", 7)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    restored = checkpoints.restore(abstract(state))
    assert (restored.step, restored.config, restored.extra, restored.notes) == (7, CONFIG, {"step": 7}, ())
    assert same_bits(restored.state, state)
    assert restored.state["params"]["backbone"]["embeddings"].sharding.spec == PartitionSpec("fsdp")
    assert isinstance(restored.state["moments"], tuple)
    metadata = checkpoints.metadata()
    assert metadata.tree["params"]["backbone"]["half"] == jax.ShapeDtypeStruct((8, 40), jnp.bfloat16)
    assert (metadata.step, metadata.config, metadata.extra) == (7, CONFIG, {"step": 7})
    checkpoints.close()


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (1, 8), (4, 2)])
def test_restores_on_another_mesh(tmp_path, shape):
    state = save_steps(tmp_path, 1)
    there = make_state(make_mesh(*shape), seed=5)
    restored = Checkpoints(tmp_path, read_only=True).restore(abstract(there))
    assert leaf_checksums(restored.state) == leaf_checksums(state)
    assert all(
        a.sharding == b.sharding for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(there), strict=True)
    )


def test_other_shards_read_little_more_than_there_is(tmp_path):
    """Fails when each of eight devices reads the whole of what one device saved, eight times as much."""
    array = np.random.default_rng(0).standard_normal((24, 256, 1024)).astype(np.float32)

    def placed(data: int, fsdp: int) -> dict:
        sharding = NamedSharding(make_mesh(data, fsdp), PartitionSpec(None, "fsdp"))
        return {"kernel": jax.device_put(array, sharding)}

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed(1, 1), config=CONFIG)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    before = read()
    restored = Checkpoints(tmp_path, read_only=True).restore(abstract(placed(1, 8)))
    assert 0.9 * size < read() - before < 2.2 * size
    assert np.array_equal(restored.state["kernel"], array)


def test_memory_freed_while_reading_goes_back_to_the_system(tmp_path, monkeypatch):
    """Fails when the C library keeps what is freed in pieces of 4 MiB: a restore took a third more than its arrays."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc")
    state = save_steps(tmp_path, 1)
    read_arrays = checkpoints_module._read_arrays
    returned = []

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def read_in_pieces(*arguments):
        taken = [np.empty(2**22, np.uint8) for _ in range(500)]  # free parts of the heap, which are taken first
        np.ones(2**25 - 2**16, np.uint8)  # freed at once: glibc would now map only what is larger
        *pieces, last = [np.ones(2**22 + 2**12, np.uint8) for _ in range(40)]
        before = resident()
        pieces.clear()
        returned.append(before - resident())
        del last, taken  # until here: memory at the end of the heap goes back anyway
        return read_arrays(*arguments)

    monkeypatch.setattr(checkpoints_module, "_read_arrays", read_in_pieces)
    Checkpoints(tmp_path, read_only=True).restore(abstract(state))
    assert returned[0] > 0.7 * 40 * 2**22


def test_a_state_that_is_donated_while_it_is_saved_is_saved_as_it_was(tmp_path):
    mesh = make_mesh(1, 8)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {
        "x": jax.device_put(jnp.zeros((512, 512)), sharding),
        "n": jax.device_put(0, NamedSharding(mesh, PartitionSpec())),
    }
    shapes = abstract(state)
    with Checkpoints(tmp_path, keep_newest=9) as checkpoints:
        for number in range(1, 31):
            state = step(state)
            if number % 10 == 0:
                checkpoints.save(number, state, config={})
        checkpoints.wait()
        for number in (10, 20, 30):
            restored = checkpoints.restore(shapes, step=number).state
            assert int(restored["n"]) == number and (np.asarray(restored["x"]) == number).all()


def test_twelve_flipped_bytes_in_each_data_file_name_a_leaf_or_do_not_matter(tmp_path):
    state = save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    named, by_checksum = 0, 0
    for file in data_files(tmp_path / "1"):
        for turn in range(12):
            offset = int((turn + 0.5) * file.stat().st_size / 12)
            flip(file, offset)
            try:
                assert same_bits(checkpoints.restore(abstract(state), step=1).state, state), (file, offset)
            except DamagedCheckpoint as error:
                message = str(error)
                assert any(name in message for name in named_leaves(state)) and "\n" not in message, message
                named += 1
                by_checksum += "the checksum does not match" in message
            flip(file, offset)
    assert named >= 12
    assert by_checksum > 0  # else Orbax notices by itself by now, and this test shows nothing


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_any_damaged_file_is_named_or_does_not_matter(tmp_path, capfd, damage):
    state = save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    noticed = 0
    for file in sorted((tmp_path / "1").rglob("*")):
        if not file.is_file():
            continue
        content = file.read_bytes()
        if damage == "flip":
            flip(file, len(content) // 2)
        elif damage == "missing":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
        try:
            assert same_bits(checkpoints.restore(abstract(state), step=1).state, state), file
        except DamagedCheckpoint as error:
            message = str(error)
            assert any(name in message for name in [*named_leaves(state), "in its description"]), message
            assert "\n" not in message and len(message) < 700
            noticed += 1
        file.write_bytes(content)
    assert noticed >= 3  # arrays, their index, the description
    assert "Traceback" not in capfd.readouterr().err


def test_any_flipped_byte_of_the_description_is_noticed_or_does_not_matter(tmp_path):
    save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    sound = checkpoints.metadata(1)
    file = tmp_path / "1" / "description" / "metadata"
    noticed = 0
    for offset in range(0, file.stat().st_size, 5):
        flip(file, offset, bit=offset % 7)
        try:
            assert checkpoints.metadata(1) == sound, offset
        except DamagedCheckpoint as error:
            assert "description" in str(error)
            noticed += 1
        flip(file, offset, bit=offset % 7)
    assert noticed > 50
    assert json.loads(file.read_text())["content"]["config"] == CONFIG  # people can read it


def test_a_damaged_newest_checkpoint_is_moved_aside_and_training_goes_on(tmp_path):
    state = save_steps(tmp_path, 100, 200)
    damage_arrays(tmp_path / "200")
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(abstract(state))
        assert restored.step == 100 and restored.extra == {"step": 100}
        assert len(restored.notes) == 1 and "moved to damaged-200, step 100 is used" in restored.notes[0]
        assert checkpoints.steps() == [100] and (tmp_path / "damaged-200").is_dir()
        checkpoints.save(150, state, config=CONFIG)  # Orbax alone answers False here
        assert checkpoints.wait() == [150]
        assert checkpoints.steps() == [100, 150]
    with pytest.raises(InputError, match=r"no checkpoint of step 200; choose one of 100, 150"):
        Checkpoints(tmp_path, read_only=True).restore(abstract(state), step=200)


def test_when_every_checkpoint_is_damaged_nothing_is_moved(tmp_path):
    state = save_steps(tmp_path, 1, 2)
    damage_arrays(tmp_path / "1")
    flip(tmp_path / "2" / "description" / "metadata", 40)
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(2):  # the same command again does not start from scratch
            with pytest.raises(DamagedCheckpoint, match="none of the checkpoints 2, 1 is intact"):
                checkpoints.restore(abstract(state))
            assert checkpoints.steps() == [1, 2]


def test_a_refused_save_is_an_error_until_newer_steps_are_moved_aside(tmp_path):
    state = save_steps(tmp_path, 100, 200)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(abstract(state), step=100)
        for refused in (150, 200):
            with pytest.raises(RunError, match=f"step {refused} was rejected, as step 200 exists"):
                checkpoints.save(refused, state, config=CONFIG)
        assert checkpoints.move_aside_after(100) == [
            "checkpoint 200 is newer than step 100, from which training resumes; it was moved to superseded-200"
        ]
        checkpoints.save(200, state, config=CONFIG)
        checkpoints.wait()
        assert checkpoints.move_aside_after(100)[0].endswith("superseded-200-2")
        assert checkpoints.move_aside_after(100) == []
        assert checkpoints.steps() == [100]


def test_reading_changes_nothing_in_a_directory_that_may_be_in_use(tmp_path):
    state = save_steps(tmp_path, 1, 2)
    damage_arrays(tmp_path / "2")
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    before = sorted(tmp_path.rglob("*"))
    checkpoints = Checkpoints(tmp_path, read_only=True)
    restored = checkpoints.restore(abstract(state))
    assert restored.step == 1 and "skipped, step 1 is used" in restored.notes[0]
    assert sorted(tmp_path.rglob("*")) == before
    assert checkpoints.steps() == [1, 2]
    with pytest.raises(ValueError, match="opened read-only"):
        checkpoints.save(4, state, config={})
    absent = Checkpoints(tmp_path / "absent", read_only=True)
    assert absent.steps() == [] and not (tmp_path / "absent").exists()
    with pytest.raises(InputError, match="has no complete checkpoint"):
        absent.restore(abstract(state))


def test_what_a_killed_save_left_is_cleaned_up_and_never_restored(tmp_path):
    state = save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        checkpoints.save(2, state, config={})
        assert checkpoints.wait() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_leaves_that_do_not_fit_are_listed_not_cast(tmp_path):
    state = save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    wanted = abstract(state)
    wanted["key"] = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=wanted["key"].sharding)
    with pytest.raises(InputError, match=r"- key uint32\[2\] \+ key int32\[2\]"):
        checkpoints.restore(wanted)
    with pytest.raises(InputError, match=r"key uint32\[2\] \+ key int32\[2\]"):
        checkpoints.restore_partial({"key": wanted["key"]})
    wanted["key"] = jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=wanted["key"].sharding)
    with pytest.raises(InputError, match=r"- key uint32\[2\] \+ key uint32\[3\]"):
        checkpoints.restore(wanted)
    wanted["lock"] = wanted.pop("key")
    with pytest.raises(InputError, match=r"\+ lock uint32\[3\], - key uint32\[2\]"):
        checkpoints.restore(wanted)
    assert checkpoints.steps() == [1]  # a wrong question is no damage


def test_a_part_is_restored_alone_and_checked(tmp_path):
    state = save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    part = {"params": abstract(state)["params"]}
    restored = checkpoints.restore_partial(part)
    assert same_bits(restored.state, {"params": state["params"]})
    described = tmp_path / "1" / "description" / "metadata"
    content = json.loads(described.read_text())
    # A wrong checksum stands for an altered leaf: which leaves are looked at can then be chosen.
    for name, is_read in (("params/backbone/half", True), ("moments/0", False)):
        altered = json.loads(json.dumps(content))
        altered["content"]["checksums"][name] ^= 1
        altered["sha256"] = _hash(altered["content"])
        described.write_text(json.dumps(altered))
        if is_read:
            with pytest.raises(DamagedCheckpoint, match=f"damaged in {name}: the checksum does not match"):
                checkpoints.restore_partial(part, step=1)
        else:
            assert same_bits(checkpoints.restore_partial(part, step=1).state, {"params": state["params"]})
    whole = checkpoints.restore_partial(
        {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part)["params"]}
    )
    assert leaf_checksums(whole.state) == leaf_checksums({"params": state["params"]})  # without shardings: one device


def test_the_newest_and_every_nth_are_kept(tmp_path):
    save_steps(tmp_path, *range(1, 11), keep_newest=2, keep_every=4)
    assert Checkpoints(tmp_path, read_only=True).steps() == [4, 8, 9, 10]


def test_a_save_counts_only_when_it_is_finished_and_asking_does_not_block(tmp_path, monkeypatch):
    release = threading.Event()
    write = ocp.CheckpointManager.wait_until_finished

    def slow(manager):
        if threading.current_thread().name.startswith("checkpoint-"):
            assert release.wait(60)
        write(manager)

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", slow)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.finished() == []
        checkpoints.save(1, {"x": jnp.ones(3)}, config={})
        began = time.perf_counter()
        assert all(checkpoints.finished() == [] for _ in range(1000))
        assert time.perf_counter() - began < 0.5
        release.set()
        assert checkpoints.wait() == [1]
        assert checkpoints.finished() == [] == checkpoints.wait()
        checkpoints.save(2, {"x": jnp.ones(3)}, config={})
        deadline = time.monotonic() + 30
        while not (steps := checkpoints.finished()):
            assert time.monotonic() < deadline
        assert steps == [2] and checkpoints.steps() == [1, 2]


def test_a_failed_save_of_many_arrays_says_nothing_but_its_error(tmp_path):
    """All its writes fail, Orbax raises the first; asyncio tells of the others whenever they are collected.

    In a process of its own, as pytest takes over what is unraisable.
    """
    code = """
import gc, resource, signal, sys
import jaxlm, jax.numpy as jnp, numpy as np
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.errors import RunError, quiet_after_failures

quiet_after_failures()  # as every command does
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, -1))
random = np.random.default_rng(0)
state = {"params": {f"leaf{number}": jnp.asarray(random.random((64, 512))) for number in range(24)}}
for attempt in range(5):
    checkpoints = Checkpoints(f"{sys.argv[1]}/{attempt}")
    try:
        checkpoints.save(1, state, config={})
        checkpoints.wait()
    except RunError as error:
        print("File too large" in str(error))
    checkpoints.close()
    gc.collect()
"""
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert ended.stderr == ""
    assert ended.stdout.split() == ["True"] * 5


def test_a_config_that_is_not_json_and_a_leaf_without_a_checksum_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="JSON compliant"):
            checkpoints.save(1, {"x": jnp.ones(3)}, config={"rate": float("nan")})
        with pytest.raises(TypeError, match="complex64"):
            checkpoints.save(1, {"x": jnp.ones(3, jnp.complex64)}, config={})
        with pytest.raises(ValueError, match="dots"):
            checkpoints.save(1, {"a.b": jnp.ones(3)}, config={})
        assert checkpoints.steps() == []


def numpy_checksum(array: np.ndarray) -> int:
    """The checksum written out again with Python's and NumPy's 64-bit integers."""
    bits = array.astype(np.uint8) if array.dtype == bool else array.view(f"u{array.dtype.itemsize}")
    mixed = [(int(value) + 0x9E3779B9 * index) % 2**32 for index, value in enumerate(bits.reshape(-1))]
    total = 0
    for value in mixed:
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        total += value ^ value >> 16
    return total % 2**32


def test_checksums_equal_numpys_and_do_not_depend_on_the_sharding():
    states = [make_state(make_mesh(*shape), seed=3) for shape in ((1, 1), (8, 1), (2, 4), (1, 8))]
    expected = {name: numpy_checksum(np.asarray(leaf)) for name, leaf in named_leaves(states[0]).items()}
    assert all(leaf_checksums(state) == expected for state in states)
    assert leaf_checksums({"a": np.int32(5), "b": np.zeros((0, 3))})["b"] == 0
    assert leaf_checksums({}) == {}


def test_checksums_see_one_bit_a_swap_and_a_change_of_sign():
    rng = random.Random(1)
    array = np.round(np.random.default_rng(0).standard_normal((40, 10)).astype(np.float32), 1)  # many trailing zeros
    whole = leaf_checksums({"x": array})["x"]
    for _ in range(60):
        other = array.copy()
        other.view(np.uint32).reshape(-1)[rng.randrange(400)] ^= 1 << rng.randrange(32)
        assert leaf_checksums({"x": other})["x"] != whole
        other = array.copy().reshape(-1)
        one, two = rng.sample(range(400), 2)
        if other[one] != other[two]:
            other[[one, two]] = other[[two, one]]
            assert leaf_checksums({"x": other.reshape(40, 10)})["x"] != whole
    zeros = np.zeros(4, np.float32)
    assert leaf_checksums({"x": zeros}) != leaf_checksums({"x": -zeros})
