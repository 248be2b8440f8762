"""NVIDIA GPUs for which XLA's GPU compiler builds programs on any machine, and topologies of them.

The numbers of a GPU are from its data sheet or from the white paper of its architecture (Turing, Ampere GA102, Ada,
Hopper, Blackwell); sizes of shared memory are from the CUDA programming guide's table of compute capabilities. The
compiler's description of a GPU, XLA's GpuTargetConfigProto as text, is made from this table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxlm.cuda import PLUGINS, installed, is_installed, quiet
from jaxlm.distributed.devices import peak_of_kind
from jaxlm.errors import InputError, one_line
from jaxlm.nvidia import SHARE

UNFRAGMENTED = 0.9  # share of the memory that launch/gpu.sh gives to JAX, which programs can use


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    kind: the driver's name of it, JAX's `device_kind`. capability: its CUDA compute capability. memory_gib: its memory
    as the driver reports it. memory_gbps, link_gbps: the bandwidth of the memory, and of NVLink or PCIe in both
    directions together, in 10^9 bytes per second. lanes: float32 multiply-adds of a multiprocessor per cycle.
    clock_ghz: the boost clock. shared_kib, threads: shared memory and resident threads of a multiprocessor.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    memory_gib: float
    memory_gbps: float
    link_gbps: float
    multiprocessors: int
    lanes: int
    clock_ghz: float
    l2_mib: float
    shared_kib: int
    threads: int

    def peak(self, dtype: str) -> float:
        """Return the dense peak of matrix products of a dtype, in TFLOP/s. float32 is TF32 where the GPU has it."""
        found = peak_of_kind(self.kind, dtype)
        assert found is not None
        return found

    @property
    def block_kib(self) -> int:
        """Shared memory that one block can use: all but 1 KiB, which the system reserves from Ampere on."""
        return self.shared_kib - (self.capability >= (8, 0))

    @property
    def has_cost_model(self) -> bool:
        """True if XLA's cost model knows the instructions of this GPU; for others its compiler ends with an error."""
        return self.capability == (9, 0)


_NETWORK_GBPS = 50.0  # of one GPU between hosts, one direction: an adapter of 400 Gbit/s per GPU, as in DGX H100

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", "Tesla T4", (7, 5), 14.75, 320, 32, 40, 64, 1.59, 4, 64, 1024),
        Gpu("l4", "NVIDIA L4", (8, 9), 22.49, 300, 64, 58, 128, 2.04, 48, 100, 1536),
        Gpu("rtx3060", "NVIDIA GeForce RTX 3060", (8, 6), 12.0, 360, 32, 28, 128, 1.78, 3, 100, 1536),
        Gpu("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 24.0, 936, 64, 82, 128, 1.70, 6, 100, 1536),
        Gpu("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.99, 1008, 64, 128, 128, 2.52, 72, 100, 1536),
        Gpu("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 31.84, 1792, 128, 170, 128, 2.41, 96, 100, 1536),
        Gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 79.25, 2039, 600, 108, 64, 1.41, 40, 164, 2048),
        Gpu("a100-40", "NVIDIA A100-SXM4-40GB", (8, 0), 39.56, 1555, 600, 108, 64, 1.41, 40, 164, 2048),
        Gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 79.11, 3352, 900, 132, 128, 1.98, 50, 228, 2048),
        Gpu("h200", "NVIDIA H200", (9, 0), 139.81, 4800, 900, 132, 128, 1.98, 50, 228, 2048),
        Gpu("b200", "NVIDIA B200", (10, 0), 178.35, 8000, 1800, 148, 128, 1.97, 126, 228, 2048),
    )
}


@dataclass(frozen=True)
class GpuTopology:
    """GPUs of one kind, named `h100`, `h100:8` or `h100:4x8`. slices: 1, as a program spans all hosts."""

    chip: Gpu
    per_host: int = 1
    hosts: int = 1
    slices: int = 1
    platform = "gpu"
    word = "GPU"

    @property
    def cost_model(self) -> str:
        """The origin of the estimates of operations that are neither products nor attention."""
        return "XLA's cost model" if self.chip.has_cost_model else "bytes"

    @property
    def name(self) -> str:
        """The name on the command line."""
        if self.num_chips == 1:
            return self.chip.name
        return f"{self.chip.name}:{f'{self.hosts}x' if self.hosts > 1 else ''}{self.per_host}"

    @property
    def num_chips(self) -> int:
        """Number of GPUs of all hosts."""
        return self.per_host * self.hosts

    @property
    def usable_gib(self) -> float:
        """Memory for programs, as launch/gpu.sh sets it up: driver, libraries and fragmentation take the rest."""
        return self.chip.memory_gib * SHARE * UNFRAGMENTED

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Options of the compilation of a step."""
        return {"xla_gpu_collect_cost_model_stats": True} if self.chip.has_cost_model else {}

    def devices(self) -> Sequence[Any]:
        """Return devices to compile for. InputError if a part of the compiler is missing, or it refuses the GPU."""
        from jax.experimental import topologies

        check_installed()
        try:
            with quiet():  # the plugin says that there is no driver
                found = topologies.get_topology_desc(
                    platform="cuda", target_config=description(self.chip), topology=f"1x{self.hosts}x{self.per_host}"
                )
        except (RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise InputError(
                f"--topology must be a GPU that the installed compiler knows, got {self.name}; choose another one, or "
                f"install a newer JAX ({one_line(error)[:200]})"
            ) from error
        return found.devices

    def link_bytes(self, spans_hosts: bool) -> float:
        """Return the bytes per second that one GPU sends to the others of its host, or to other hosts."""
        return (_NETWORK_GBPS if spans_hosts else self.chip.link_gbps / 2) * 1e9


def gpu_topology(name: str, memory_gib: float | None = None) -> GpuTopology:
    """Return `h100`, `h100:8` or `h100:4x8` as a topology. InputError, one line, for other forms.

    memory_gib: replaces the memory of the table, for cards that exist with several sizes.
    """
    kind, colon, shape = name.partition(":")
    gpu = GPUS[kind]
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", shape) if colon else None
    hosts, per_host = (int(found.group(1) or 1), int(found.group(2))) if found else (1, 1)
    if (colon and found is None) or per_host not in (1, 2, 4, 8):
        raise InputError(
            f"--topology must be {kind}, {kind}:N or {kind}:HOSTSxN with 1, 2, 4 or 8 GPUs per host, got {name}; give "
            f"{kind}:8 for one host with eight"
        )
    if memory_gib is not None:
        gpu = replace(gpu, memory_gib=memory_gib)
    return GpuTopology(gpu, per_host, hosts)


def smallest_that_holds(gib: float) -> str | None:
    """Return the name of the GPU with the least memory that holds programs of `gib`, or None."""
    sizes = {name: GpuTopology(gpu).usable_gib for name, gpu in GPUS.items()}
    return min((name for name, size in sizes.items() if size >= gib), key=sizes.__getitem__, default=None)


_PACKAGES = {
    "cuda12": {
        "jax-cuda12-plugin": "jax_cuda12_plugin",
        "jax-cuda12-pjrt": "jax_plugins.xla_cuda12",
        "nvidia-cuda-nvcc-cu12": "nvidia.cuda_nvcc",
        "nvidia-cudnn-cu12": "nvidia.cudnn",
    },
    "cuda13": {
        "jax-cuda13-plugin": "jax_cuda13_plugin",
        "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
        "nvidia-cuda-nvcc": "nvidia.cu13",
        "nvidia-cudnn-cu13": "nvidia.cudnn",
    },
}


def check_installed() -> None:
    """Raise InputError if a package of XLA's GPU compiler is missing. The extra has those of CUDA 12."""
    found = next(iter(installed()), PLUGINS[0])
    for package, module in _PACKAGES[found].items():
        if not is_installed(module):
            raise InputError(
                f"the package {package} must be installed to compile for a GPU, got none; run launch/setup.sh cpu "
                "gpu-compiler, or pip install 'jaxlm[gpu-compiler]'"
            )


def description(gpu: Gpu) -> str:
    """Return the text of XLA's GpuTargetConfigProto for a GPU."""
    major, minor = gpu.capability
    # Hopper and Blackwell need the instructions of the exact architecture, sm_90a, for their matrix units.
    extension = "" if gpu.capability < (9, 0) else "feature_extension: ACCELERATED_FEATURES"
    return f"""
        platform_name: "CUDA"
        device_description_str: "{gpu.kind}"
        runtime_version {{ major: 12 minor: 9 patch: 0 }}
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
          name: "{gpu.kind}"
          cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
          core_count: {gpu.multiprocessors}
          fpus_per_core: {gpu.lanes}
          clock_rate_ghz: {gpu.clock_ghz}
          memory_bandwidth: {int(gpu.memory_gbps * 1e9)}
          device_memory_size: {int(gpu.memory_gib * 2**30)}
          l2_cache_size: {int(gpu.l2_mib * 2**20)}
          shared_memory_per_core: {gpu.shared_kib * 1024}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {gpu.block_kib * 1024}
          threads_per_core_limit: {gpu.threads}
          threads_per_block_limit: 1024
          threads_per_warp: 32
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}"""
