"""Checkpoints that prove themselves: saved by Orbax, checked leaf by leaf, merged strictly."""

from jaxlm.checkpoints.checksums import leaf_checksums
from jaxlm.checkpoints.merge import merge_parameters
from jaxlm.checkpoints.store import Checkpoints, DamagedCheckpoint, Metadata, Restored

__all__ = ["Checkpoints", "DamagedCheckpoint", "Metadata", "Restored", "leaf_checksums", "merge_parameters"]
