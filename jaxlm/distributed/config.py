"""Configs of the mesh and of several processes. This module does not import JAX."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxlm.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. One axis may be -1: it gets all remaining devices."""

    data: int = -1
    """Replicas of the model, each with its share of the batch."""
    fsdp: int | Literal["auto"] = "auto"
    """Shards of each kernel along its inputs, of each table along its width, and of the batch. auto: 16 on TPU pods, so
    that 16 chips hold one copy of the model; 1 elsewhere."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary."""

    def describe(self, mesh: "Mesh") -> str | None:
        """Return a sentence about the chosen fsdp; None if it was given."""
        if self.fsdp != "auto" or mesh.size == 1:
            return None
        return f"mesh.fsdp auto: {mesh.shape['fsdp']} on {mesh.size} devices; --mesh.fsdp N chooses another"


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes outside a pod, one per host. On a Cloud TPU pod all of these are detected."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    num_processes: int | None = None
    """Total number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""


def check_batch(batch_size: int, micro_batches: int, mesh: "Mesh") -> None:
    """Raise InputError for a batch whose micro-batches cannot be divided evenly over data x fsdp devices."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    unit = micro_batches * data * fsdp
    if batch_size % unit:
        # Evaluations have no micro-batches, so the message names them only where there are several.
        factors = f"micro_batches {micro_batches} x " if micro_batches > 1 else ""
        raise InputError(
            f"batch_size must be a multiple of {factors}mesh data {data} x fsdp {fsdp} = {unit}, got {batch_size}; "
            f"give {-(-batch_size // unit) * unit}, or change another of them"
        )
