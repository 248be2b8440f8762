"""Auxiliary losses of a language model: of its intermediate layers, and of a second target (Al-Rfou et al., 2019).

Section 3.1 of "Character-level language modeling with deeper self-attention". Each loss has a classifier of its own,
which only training uses. The losses read the states that every causal model returns for its layers; those of an
intermediate layer are normed first, as the model norms those of the last one.

The losses are computed in a loop over the layers, after the pass: only the scores of one layer exist at a time. A layer
that has stopped is still computed and has the coefficient 0, so that nothing is compiled again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import Batch
from jaxlm.distributed.partition import with_axes
from jaxlm.errors import InputError
from jaxlm.models.model import Inputs, Model, Outputs
from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy
from jaxlm.nn.pointwise import LayerNorm
from jaxlm.objectives.objective import Coefficient, Sums

CLASSIFIERS = "auxiliary"  # their name in params["head"]
_NORM = LayerNorm(1e-5)


def contributes(step: jax.Array, num_steps: jax.Array, num_layers: int) -> jax.Array:
    """Return 1.0 for each intermediate layer that contributes to update `step`, counted from 0, else 0.0: (N - 1,).

    Layer l of N, counted from 1, stops "after finishing l/2n of the training": it contributes while step / num_steps is
    below l / 2N. The bound is rounded up in whole numbers, and so exact.
    """
    layers = jnp.arange(1, num_layers)
    whole, rest = jnp.divmod(jnp.asarray(num_steps).astype(jnp.int32), 2 * num_layers)
    return (step < layers * whole - (-layers * rest) // (2 * num_layers)).astype(jnp.float32)


class AuxiliaryLosses:
    """The losses of intermediate layers and of a second target, as terms of an `Objective`.

    intermediate, second_target: their coefficients, 0 for none. The terms, in nats per token:

    - `layer_nll` (N - 1,): the loss of the next token in each intermediate layer, times `intermediate` until it stops;
    - `second_nll`: the loss of the token after the next in the last layer, times `second_target`;
    - `layer_second_nll` (N - 1,): that in each intermediate layer, times both coefficients.

    A second target beyond the end of a row, or in another segment, has weight 0. InputError for intermediate losses of
    a model with one layer.
    """

    def __init__(self, model: Model, intermediate: float, second_target: float, chunks: int = 0) -> None:
        self._model, self._chunks, layers = model, chunks, model.config.num_layers
        if intermediate and layers == 1:
            raise InputError(
                f"objective.intermediate_coefficient must be 0 for a model of one layer, got {intermediate:g}; leave "
                "it out"
            )

        def until_stopped(coefficient: float) -> Coefficient:
            return lambda step, num_steps: coefficient * contributes(step, num_steps, layers)

        terms: dict[str, tuple[float, Callable[[float], Coefficient]]] = {
            "layer_nll": (intermediate, until_stopped),
            "second_nll": (second_target, float),
            "layer_second_nll": (intermediate * second_target, until_stopped),
        }
        self.coefficients = {name: of(value) for name, (value, of) in terms.items() if value}

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return fresh classifiers, (V, D) or (N - 1, V, D), boxed; none if there are no losses."""
        if not self.coefficients:  # the model is not traced
            return {}
        model, config, ids = self._model, self._model.config, jnp.zeros((1, 1), jnp.int32)
        states = jax.eval_shape(
            lambda: model({"backbone": nn.unbox(model.init(key))}, Inputs(ids, ids), layers=True).layers
        )
        layers, width = states.shape[0] - 2, states.shape[-1]  # without the embeddings and the last layer
        kernel = nn.initializers.normal(config.init_std)
        found: dict[str, Any] = {}
        for number, name in enumerate(self.coefficients):
            stack, axes = ((layers,), ("layers",)) if name.startswith("layer") else ((), ())
            init = with_axes(kernel, (*axes, "vocabulary", "width"))
            found[name] = {"kernel": init(jax.random.fold_in(key, number), (*stack, config.vocab_size, width))}
        if "layer_nll" in found:
            ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
            found["norm"] = {
                "scale": with_axes(ones, ("layers", "norm"))(key, (layers, width)),
                "bias": with_axes(zeros, ("layers", "norm"))(key, (layers, width)),
            }
        return {CLASSIFIERS: found}

    @functools.cached_property
    def flops_per_token(self) -> float:
        """The FLOPs of the classifiers in a training step per token, forward and backward."""
        shapes = nn.unbox(jax.eval_shape(self.init, jax.random.key(0))).get(CLASSIFIERS, {})
        return 6.0 * sum(shapes[name]["kernel"].size for name in self.coefficients)

    @property
    def reads_layers(self) -> bool:
        """True if a loss reads the states of intermediate layers."""
        return "layer_nll" in self.coefficients

    def weights(self, batch: Batch) -> Sums:
        """Return the weight of each term over the whole batch."""
        return {name: jnp.sum(_targets(name, batch)[1]) for name in self.coefficients}

    def sums(self, params: Any, outputs: Outputs, batch: Batch) -> Sums:
        """Return the sum of each term over a part of the batch."""
        if not self.coefficients:
            return {}
        own = params["head"][CLASSIFIERS]
        found = {}
        if "second_nll" in self.coefficients:
            found["second_nll"] = self._nll("second_nll", outputs.states, own["second_nll"]["kernel"], batch)
        if not self.reads_layers or outputs.layers is None:
            return found
        kernels = {name: own[name]["kernel"] for name in self.coefficients if name.startswith("layer")}

        def of_layer(_: None, inputs: Any) -> tuple[None, Sums]:
            states_BLD, norm, of_terms = inputs
            normed_BLD: Any = _NORM.apply({"params": norm}, states_BLD)
            return None, {name: self._nll(name, normed_BLD, kernel, batch) for name, kernel in of_terms.items()}

        if self._model.execution.remat != "none":
            of_layer = jax.checkpoint(of_layer, prevent_cse=False)
        return found | jax.lax.scan(of_layer, None, (outputs.layers[1:-1], own["norm"], kernels))[1]

    def _nll(self, name: str, states_BLD: jax.Array, kernel_VD: jax.Array, batch: Batch) -> jax.Array:
        targets_BL, weights_BL = _targets(name, batch)
        pieces = loss_pieces(self._chunks, targets_BL.shape[0], targets_BL.shape[1], kernel_VD)
        return projected_cross_entropy(states_BLD, kernel_VD, targets_BL, weights_BL, pieces)[0]


def _targets(name: str, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the targets of a term and their weights, (B, L) each."""
    if name == "layer_nll":
        return batch.targets, batch.weights
    weights_BM = batch.weights[:, 1:]
    if batch.segments is not None:  # None: full rows of one segment
        weights_BM = jnp.where(batch.segments[:, 1:] == batch.segments[:, :-1], weights_BM, 0.0)
    at_end = ((0, 0), (0, 1))
    return jnp.pad(batch.targets[:, 1:], at_end), jnp.pad(weights_BM, at_end)
