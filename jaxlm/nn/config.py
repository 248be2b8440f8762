"""Choices of the layers that configs offer: activation, dropout rate, attention backend, execution.

This module does not import JAX: a command line is parsed before JAX is imported.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxlm.errors import InputError
from jaxlm.ranges import Natural, Range

if TYPE_CHECKING:
    import numpy as np


ActivationName = Literal["gelu_tanh", "gelu_erf"]
Backend = Literal["auto", "xla", "flash", "cudnn"]
STEPS = 1 << 16  # number of steps between rates of 0 and 1
Rate = Annotated[float, Range(0, below=1 - 0.5 / STEPS)]  # of dropout; a higher one would drop every element


@dataclass(frozen=True)
class Adaptive:
    """Clusters of ids, sorted by frequency, for an adaptive input and softmax (Grave et al., 2017)."""

    cutoffs: tuple[int, ...] = ()
    """First id of each tail cluster. Those beyond the vocabulary have no effect. Default: one cluster, a full
    softmax."""
    divisor: Annotated[int, Range(1, fix="give 1 for equal widths")] = 1
    """Tail i, counted from 1, has embeddings of the model's width / divisor^i."""
    projections: Literal["tails_tied", "untied"] = "tails_tied"
    """Projections between the widths of the clusters and of the model. tails_tied: input and output share those of the
    tails. untied: they share none. With divisor 1 there are none."""
    clusters: Literal["projected", "unprojected"] = "projected"
    """States that score the tails as a whole. projected: through the output projection of the first cluster, as in the
    original code. unprojected: not, as in runs of earlier versions. With divisor 1 there is no difference."""

    def starts(self, vocab_size: int) -> tuple[int, ...]:
        """Return the first id of each cluster."""
        return (0, *(cutoff for cutoff in self.cutoffs if cutoff < vocab_size))

    def sizes(self, vocab_size: int) -> tuple[int, ...]:
        """Return the number of ids of each cluster."""
        starts = (*self.starts(vocab_size), vocab_size)
        return tuple(end - start for start, end in itertools.pairwise(starts))

    def widths(self, vocab_size: int, width: int) -> tuple[int, ...]:
        """Return the width of the embeddings of each cluster."""
        return tuple(width // self.divisor**number for number in range(len(self.starts(vocab_size))))

    def check(self, width: int) -> None:
        """Raise InputError for cutoffs that are not sorted, and for tails without a width."""
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or min(self.cutoffs, default=1) < 1:
            cutoffs, remedy = " ".join(map(str, self.cutoffs)), "sort them, each once"
            remedy = "give the first id of each tail" if min(self.cutoffs) < 1 else remedy
            raise InputError(f"model.adaptive.cutoffs must be above 0 and ascending, got {cutoffs}; {remedy}")
        if width // self.divisor ** len(self.cutoffs) < 1:
            raise InputError(
                f"model.adaptive.divisor must leave each tail a width above 0, got {self.divisor}; give a smaller one"
            )


@dataclass(frozen=True)
class Execution:
    """Fields of how a model is executed: dtype, attention backend, rematerialization, unrolling of the layer loop."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype. auto: bfloat16 on TPUs and on GPUs of compute capability 8.0 on, else float32. float16: with a
    loss scale, not on TPUs. Parameters, norms and losses stay float32."""
    attention: Backend = "auto"
    """Attention backend. auto: flash on TPUs, cudnn on GPUs of compute capability 8.0 on, xla elsewhere. Cases that a
    kernel does not support, for example attention dropout by cudnn, fall back to xla, and the log says so."""
    remat: Literal["none", "dots", "full", "auto"] = "none"
    """Recomputation in the backward pass. none: nothing. dots: all but matrix products. full: each whole layer. auto:
    the first of these that fits the devices' memory; none where it is not reported, as on the CPU."""
    unroll: Natural = 0
    """Layers per iteration of the layer loop. 0: all of them. More layers take longer to compile."""
    loss_chunks: Annotated[int, Range(0, fix="give 0 for automatic")] = 0
    """Chunks of the length in which the vocabulary projection and its loss are computed. More chunks need less memory.
    0: one chunk, and on the CPU as many as let the logits of one fit its cache."""

    gradient_sums: Literal["arithmetic", "float32"] = "arithmetic"
    """dtype in which the gradients of the blocks' weights are all-reduced. arithmetic: the compute dtype. float32:
    twice the traffic. The biases of queries, keys and values follow their weights. All other gradients are float32."""

    deterministic: bool = False
    """Compile the steps of a run on GPUs with deterministic operations and without autotuning, for bitwise resuming.
    attention auto is then xla, unless unroll is 1. Off: a resumed run on a GPU may differ by rounding."""

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the log: choices that depend on the devices, and reproducibility that is given up."""
        found = []
        if self.dtype == "auto" and _platform() == "gpu" and not _has_bfloat16():
            major, minor = _compute_capability()
            found.append(
                f"dtype float32: bfloat16 needs a GPU of compute capability 8.0, and this one has {major}.{minor}; "
                "--execution.dtype float16 halves the memory of activations"
            )
        if self.deterministic:
            found.append(
                "deterministic operations, without autotuning; attention auto is xla unless unroll is 1"
                if _platform() == "gpu"
                else f"execution.deterministic has no effect on a {_platform()}: it selects options of XLA for GPUs"
            )
        return tuple(found)

    def gradient_dtype(self) -> "np.dtype":
        """Return the dtype of a weight's gradient before it is all-reduced."""
        return _dtype("float32") if self.gradient_sums == "float32" else self.compute_dtype()

    def compute_dtype(self) -> "np.dtype":
        """Return the dtype of activations and of the weights inside a step. InputError for float16 on a TPU."""
        if self.dtype == "auto":
            return _dtype("bfloat16" if _has_bfloat16() else "float32")
        if self.dtype == "float16" and _platform() == "tpu":
            raise InputError(
                "execution.dtype must be auto, bfloat16 or float32 on a TPU, got float16; give --execution.dtype "
                "bfloat16"
            )
        return _dtype(self.dtype)

    def check(self, num_layers: int) -> None:
        """Raise InputError for more layers per iteration than the model has, num_layers."""
        if self.unroll > num_layers:
            raise InputError(
                f"execution.unroll must be at most {num_layers}, the model's layers, got {self.unroll}; give 0 for "
                "automatic"
            )
        if self.deterministic and self.attention == "cudnn" and self.unroll > 1:
            raise InputError(
                "execution.unroll must be 0 or 1 with execution.deterministic and execution.attention cudnn, got "
                f"{self.unroll}; give 0 for automatic"
            )

    def layers_per_iteration(self, num_layers: int) -> int:
        """Return the `unroll` of the layer loop.

        The loop itself costs a CPU 10 to 18 % of a step and a TPU a third. On a GPU it copies the activations of each
        layer into stacked arrays and back, by estimates for an H100 a quarter of a step.
        """
        if self.unroll == 0 and self.attention == "cudnn" and self._is_deterministic_here():
            return 1
        return self.unroll or num_layers

    def attention_backend(self, num_layers: int) -> Backend:
        """Return the attention backend of a model: `attention`, or what auto stands for with deterministic operations.

        With XLA's option for these, two equal backward calls of cuDNN in one program fail (openxla/xla 46500), so that
        cuDNN needs a loop of one layer per iteration. By estimates for an H100, GPT-1's step of 64 x 512 tokens takes
        100.6 ms with it and 96.2 ms with xla and all layers unrolled, so that xla is chosen.
        """
        unrolled = self.layers_per_iteration(num_layers) > 1
        return "xla" if self.attention == "auto" and unrolled and self._is_deterministic_here() else self.attention

    def compiler_options(self) -> dict[str, Any]:
        """Return the options of XLA for the steps of a run."""
        return {"xla_gpu_deterministic_ops": True} if self._is_deterministic_here() else {}

    def _is_deterministic_here(self) -> bool:
        return self.deterministic and _platform() == "gpu"


def _dtype(name: str) -> "np.dtype":
    import jax.numpy as jnp  # knows bfloat16, which NumPy does not

    return jnp.dtype(name)


def _platform() -> str:
    from jaxlm.distributed import devices

    return devices.platform()


def _compute_capability() -> tuple[int, int]:
    from jaxlm.distributed import devices

    return devices.compute_capability()


def _has_bfloat16() -> bool:
    """Return True if the devices multiply in bfloat16: TPUs, and GPUs from Ampere on."""
    return _platform() == "tpu" or _compute_capability() >= (8, 0)
