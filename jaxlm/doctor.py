"""Is this machine, or this pod, ready to train? `python -m jaxlm.doctor [CONFIG [--field value …]]`.

The first thing to run on a new pod, the same command on every worker. Looks at versions, devices and whether all of
them add up, agreement of the processes, attention against a plain reference in float64, memory, disk, the compilation
cache; with a config also at its batch on this mesh, its state's memory, and, if it names stores, at their checksums. No
store is needed. A line a check: `ok`, `--` for what is worth knowing, `!!` for what is wrong, with the remedy; of
several processes the first says everything, each other one what is wrong with it. Exits with 0, or with 1 where
something is wrong anywhere.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax._src import hardware_utils  # the chips that the machine has, whatever JAX uses
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.requirements import Requirement

from jaxlm.config import command_line
from jaxlm.data.store import open_store
from jaxlm.distributed.agreement import of_every_process
from jaxlm.distributed.devices import available_memory, peak_tflops, prepare_process
from jaxlm.distributed.mesh import AXES, make_mesh, use_mesh
from jaxlm.distributed.processes import DistributedConfig, start_processes
from jaxlm.distributed.watchdog import watching
from jaxlm.errors import InputError, RunError, run_command
from jaxlm.nn.attention import Backend, attend
from jaxlm.training.abstract_inputs import with_vocabulary
from jaxlm.training.config import PretrainConfig, check_batches
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import make_program

GIB = 2.0**30
COPIES = 2  # of the state in host memory while a checkpoint is written: Orbax's, and what is compressed
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of attention, of numbers around 1


@dataclass(frozen=True)
class Arguments:
    """Look whether this machine is ready to train."""

    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class ConfigArguments:
    """Look whether this machine is ready to train with this config."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: pretrain/gpt1."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


@dataclass(frozen=True)
class Found:
    """What a check found. good: True, False, or None for what is worth knowing."""

    what: str
    good: bool | None
    said: str

    def line(self) -> str:
        """For people."""
        return f"{ {True: 'ok', False: '!!', None: '--'}[self.good] }  {self.what:<14} {self.said}"


def versions() -> Iterator[Found]:
    """Installed packages against what this version of jaxlm was made for."""
    shown, wrong = [], []
    for line in importlib.metadata.requires("jaxlm") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        if requirement.name in ("jax", "flax", "optax", "orbax-checkpoint"):
            shown.append(f"{requirement.name} {version}")
    python = ".".join(map(str, sys.version_info[:3]))
    remedy = f"{'; '.join(wrong)}: launch/setup.sh cpu, gpu or tpu installs what was tested"
    yield Found("versions", not wrong, remedy if wrong else f"Python {python}, {', '.join(shown)}")


def devices() -> Iterator[Found]:
    """What there is, and whether its peak is known."""
    found = jax.devices()
    kind, platform = found[0].device_kind, found[0].platform
    said = f"{len(found)} x {kind} ({platform}), {jax.local_device_count()} of them here"
    idle = _idle() if platform == "cpu" else None
    remedy = (
        f"{said}, and {idle}: launch/setup.sh gpu or tpu installs what it needs (JAX_PLATFORMS=cpu does without it)"
    )
    yield Found("devices", idle is None, said if idle is None else remedy)
    if len({device.device_kind for device in found}) > 1:
        yield Found("devices", False, "they are of several kinds; the slowest decides: take machines of one kind")
    peak = peak_tflops()
    if platform != "cpu":
        known = (
            f"{peak:g} TFLOP/s bfloat16 a device"
            if peak
            else f"{kind} is not in jaxlm/distributed/devices.py: no MFU is shown"
        )
        yield Found("peak", True if peak else None, known)


def _idle() -> str | None:
    """What is there, or was asked for, instead of the CPU."""
    asked = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if asked:
        return None if asked == "cpu" else f"none of JAX_PLATFORMS={asked}"
    if hardware_utils.num_available_tpu_chips_and_device_id()[0]:
        return "an idle TPU"
    return "an idle GPU" if Path("/dev/nvidia0").exists() else None


def processes() -> Iterator[Found]:
    """Whether all processes run the same thing, and whether all devices add up."""
    count = jax.process_count()
    given = re.sub(r"--distributed\.process[-_]id[= ]\d+", "", " ".join(sys.argv[1:]))  # which must differ
    same = hashlib.sha256(" ".join([*map(_version_of, ("jax", "jaxlib", "flax", "jaxlm")), given]).encode())
    mine = np.frombuffer(same.digest()[:8], np.uint8)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(count, -1)
    different = [k for k in range(count) if not np.array_equal(all_of_them[k], all_of_them[0])]
    remedy = f"process {different[:1]} has other versions or another command than process 0: install one commit on all"
    yield Found("processes", not different, remedy if different else f"{count}, of one mind")
    mesh = Mesh(np.array(jax.devices()), ("all",))
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("all")), lambda index: np.ones(mesh.size, np.float32)[index]
    )
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones))
    remedy = (
        f"the sum of ones over {mesh.size} devices is {total:g}: a link or a device is broken; take another machine"
    )
    good = total == mesh.size
    yield Found("interconnect", good, f"{mesh.size} devices add up" if good else remedy)


def attention_backends() -> Iterator[Found]:
    """Attention, causal and with two segments, against softmax(q k / sqrt(K)) v in float64.

    The accelerator's kernel, if it has one, in 16 bits, and its gradients against plain arithmetic's.
    """
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 2, 256, 32))
    segments = np.repeat([[1, 2]], 128, axis=1).reshape(1, -1).repeat(2, axis=0)
    scores = np.einsum("bhlk,bhsk->bhls", q, k) / np.sqrt(q.shape[-1])
    seen = np.tril(np.ones((256, 256), bool)) & (segments[:, None, :, None] == segments[:, None, None, :])
    shares = np.exp(np.where(seen, scores, -np.inf))
    wanted = np.einsum("bhls,bhsk->bhlk", shares / shares.sum(axis=-1, keepdims=True), v)
    for dtype in (jnp.float32,) if jax.default_backend() == "cpu" else (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        compute = jax.jit(functools.partial(attend, causal=True, backend="xla"))
        with jax.default_matmul_precision("highest"):
            found = compute(*(jnp.asarray(x, dtype) for x in (q, k, v)), segments_BL=jnp.asarray(segments, jnp.int32))
        off = float(np.abs(np.asarray(found, np.float64) - wanted).max())
        remedy = f"xla in {name} is {off:.1e} off the reference: do not train here; report the versions above"
        good = off <= TOLERANCE[name]
        yield Found("attention", good, f"xla in {name}: {off:.1e} off the reference" if good else remedy)
    kernel: Backend | None = {"tpu": "splash", "gpu": "cudnn"}.get(jax.default_backend())  # type: ignore[assignment]
    if kernel is not None:
        inputs = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
        found_by = {backend: _with_gradients(backend, inputs, segments) for backend in (kernel, "xla")}
        both = zip(found_by[kernel], found_by["xla"], strict=True)
        off = max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in both)
        good = off <= TOLERANCE["bfloat16"]
        said = f"{kernel} in bfloat16: outputs and gradients {off:.1e} off xla's"
        yield Found("attention", good, said if good else f"{said}: set --execution.attention xla")


def _with_gradients(backend: Backend, inputs: list[jax.Array], segments: np.ndarray) -> list[np.ndarray]:
    def weighted(q, k, v):
        found = attend(q, k, v, causal=True, segments_BL=jnp.asarray(segments, jnp.int32), backend=backend)
        return jnp.sum(jnp.sin(found.astype(jnp.float32))), found

    (_, found), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [np.asarray(x, np.float64) for x in (found, *gradients)]


def machine() -> Iterator[Found]:
    """Host memory, disk, the compilation cache."""
    memory = available_memory()
    known = "unknown" if memory is None else f"{memory / GIB:.1f} GiB free on this host"
    yield Found("memory", None if memory is None else True, known)
    free = shutil.disk_usage(".").free
    said = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    yield Found("disk", free > GIB, said if free > GIB else f"{said}: make room for checkpoints")
    cache = Path(jax.config.jax_compilation_cache_dir or "")  # type: ignore[attr-defined]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        yield Found(
            "cache", None, f"{cache} cannot be written ({error.strerror}): each start compiles anew; set XDG_CACHE_HOME"
        )
    else:
        yield Found("cache", True, f"compiled programs are kept in {cache}")


def of_config(config: PretrainConfig) -> Iterator[Found]:
    """The config on this mesh: its batch, what its state takes here, its stores."""
    if config.data.store and not config.model.vocab_size:
        with contextlib.suppress(InputError):  # said below
            vocabulary = open_store(config.data.store[0]).vocab_size
            config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    config = with_vocabulary(config)
    try:
        config.check()
        mesh = make_mesh(config.mesh)
        check_batches(config, mesh)
    except InputError as error:
        yield Found("config", False, str(error))
        return
    shape = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES)
    yield Found("config", True, f"{config.batch_size} x {config.length} tokens a step on {shape}")
    with use_mesh(mesh):
        program = make_program(make_pretraining(config, None), config, mesh)
    leaves = jax.tree.leaves(program.abstract)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    here = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    said = f"{here / GIB:.2f} GiB of the state on a device"
    if limit:
        said += f" of {limit / GIB:.1f} GiB; activations come on top (jaxlm.aot counts them for TPUs)"
    remedy = f"{said}: it cannot fit; cut it along more --mesh.fsdp or --mesh.tensor"
    yield Found("state", not limit or here < limit, said if not limit or here < limit else remedy)
    needed, memory = COPIES * whole / jax.process_count(), available_memory()
    if memory is not None:
        said = f"a checkpoint passes {needed / GIB:.2f} GiB through this host's memory"
        remedy = f"{said}, which has {memory / GIB:.1f} GiB free: take larger hosts, or more of them"
        yield Found("host memory", needed < memory, said if needed < memory else remedy)
    free, kept = shutil.disk_usage(".").free, (config.keep_newest + 1) * whole
    said = f"{config.keep_newest} checkpoints and one being written take {kept / GIB:.2f} GiB where --run lies"
    yield Found("run", None, said if kept < free else f"{said}; here only {free / GIB:.1f} are free")
    for path in (*config.data.store, *config.data.validation):
        yield from _of_store(path)


def _of_store(path: str) -> Iterator[Found]:
    try:
        store = open_store(path)
        store.verify()
    except InputError as error:
        yield Found("store", False, str(error))
    else:
        yield Found("store", True, f"{path}: {store.num_tokens:,} tokens, every checksum is right")


def _version_of(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def examine(config: PretrainConfig | None) -> list[Found]:
    """All checks, one after the other; one that fails to run is wrong, and the others go on."""
    checks: list[tuple[str, Callable[[], Iterator[Found]]]] = [
        (check.__name__, check) for check in (versions, devices, processes, attention_backends, machine)
    ]
    if config is not None:
        checks.append(("config", functools.partial(of_config, config)))
    found: list[Found] = []
    for name, check in checks:
        try:
            for one in check():
                found.append(one)
                _say(one)
        except Exception as error:  # whatever a broken machine leads to
            reason = str(error).splitlines() or ["no message"]
            found.append(Found(name, False, f"{type(error).__name__}: {reason[0]}"))
            _say(found[-1])
    return found


def _say(one: Found) -> None:
    number = jax.process_index()
    if number == 0 or one.good is False:
        print(one.line() if number == 0 else f"{one.line()} (process {number})", flush=True)


def main() -> None:
    """The command."""
    arguments: Any
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        arguments, _ = command_line(ConfigArguments, PretrainConfig, program="doctor", description=__doc__)
    else:
        arguments, _ = command_line(Arguments, program="doctor", description=__doc__)
    start_processes(arguments.distributed, saves=False)
    with watching():
        try:
            prepare_process()
        except RunError:  # for which the versions may be the reason
            for one in versions():
                print(one.line(), flush=True)
            raise
        wrong = [one for one in examine(getattr(arguments, "settings", None)) if one.good is False]
        others = [number for number, (flag,) in enumerate(of_every_process(np.array([bool(wrong)]))) if flag and number]
        if jax.process_index() == 0:
            for number in others:
                print(f"!!  process {number:<6} says what is wrong with it", flush=True)
            count = len(wrong) + len(others)
            print(f"{count} of these must be mended" if count else "ready", flush=True)
    sys.exit(1 if wrong or others else 0)


if __name__ == "__main__":
    run_command(main)
