"""The language-model objective: predicting the next token from those before it, and further losses of the same pass.

Merity et al. (2018, section 4.6) regularize the states. Al-Rfou et al. (2019, "Character-level language modeling with
deeper self-attention", section 3.1) predict the last position alone in an ablation, and add losses of intermediate
layers and of a second target. Each of these has a classifier of its own, which only training uses. They read the states
that every causal model returns for its layers; those of an intermediate layer are normed first, as the model norms
those of the last one.

The losses are computed in a loop over the layers, after the pass: only the scores of one layer exist at a time. A layer
that has stopped is still computed and has the coefficient 0, so that nothing is compiled again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import Batch
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import InputError
from jaxlm.models.model import Inputs, Model, Outputs, source_inputs
from jaxlm.nn.layers import LayerNorm
from jaxlm.nn.output import Penalty, num_loss_chunks, projected_cross_entropy
from jaxlm.objectives.config import LanguageModel
from jaxlm.objectives.objective import Coefficient, Objective, Sums

CLASSIFIERS = "auxiliary"  # their name in params["head"]
_NORM = LayerNorm(1e-5)


class FurtherLoss(NamedTuple):
    """A further loss of a language model, from the outputs of the same pass: one or more terms of an `Objective`.

    coefficients: of its terms; with 0 for `nll`, the loss of all positions is only reported. weights(batch): of the
    whole batch. sums(params, outputs, batch): of a part of it. in_evaluation: an evaluation reports the terms too.
    reads_layers: the sums need the states of all layers. init(key): fresh parameters of its own in `params["head"]`.
    """

    coefficients: Mapping[str, Coefficient]
    weights: Callable[[Batch], Sums]
    sums: Callable[[Any, Outputs, Batch], Sums]
    in_evaluation: bool = False
    reads_layers: bool = False
    init: Callable[[jax.Array], dict[str, Any]] = lambda key: {}
    flops_per_token: float = 0.0


def language_model(
    model: Model, *, loss_chunks: int = 0, further: Sequence[FurtherLoss] = (), penalty: Penalty | None = None
) -> Objective:
    """Return the objective of next-token prediction (Radford et al., 2018, equation 1), of text or of targets.

    Terms: `nll`, the loss in nats per token; `accuracy`, the fraction of targets with the highest score; and those of
    `further` losses. The carry of rows that begin a stream is set to zero first. With a penalty, training has the term
    `penalty` too.
    """
    coefficients: dict[str, Coefficient] = dict.fromkeys(("nll",) if penalty is None else ("nll", "penalty"), 1.0)
    for loss in further:
        coefficients |= loss.coefficients

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        found = {"nll": total, "accuracy": total} | ({} if penalty is None else {"penalty": total})
        for loss in further:
            found |= loss.weights(batch)
        return found

    def sums(params: Any, batch: Batch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        inputs = inputs_of(batch)
        used = [loss for loss in further if key is not None and not loss.in_evaluation]  # this order decides the bits
        used += [loss for loss in further if loss.in_evaluation]
        layers = any(loss.reads_layers for loss in used)
        outputs = model(params, inputs, reset_carry(carry, batch), key=key, layers=layers)
        scored = (outputs.states, outputs.output, batch.targets, batch.weights, loss_chunks)
        if penalty is None or key is None:
            nll, correct = model.loss(params, *scored)
            found = {"nll": nll, "accuracy": correct}
        else:
            penalized, correct, nll = model.loss(params, *scored, penalty)
            added = jax.lax.stop_gradient(penalized - nll)  # the gradient of both is that of `penalized`
            found = {"nll": penalized - added, "penalty": added, "accuracy": correct}
        for loss in used:
            found |= loss.sums(params, outputs, batch)
        return found, jax.lax.stop_gradient(outputs.carry)

    return Objective({name: value for name, value in coefficients.items() if value}, weights, sums)


def inputs_of(batch: Batch) -> Inputs:
    """Return what a model reads of a batch."""
    source = None if batch.source is None else source_inputs(batch.source, batch.source_segments)
    backward = None if batch.backward is None else inputs_of(batch.backward)
    characters = batch.characters
    return Inputs(batch.ids, batch.positions, batch.segments, source=source, characters=characters, backward=backward)


def with_rate_of_length(objective: Objective, nominal_length: int) -> Objective:
    """Return the objective with a learning rate times the tokens in the longest row, as a fraction of a length."""

    def rate_factor(batch: Batch) -> jax.Array:
        return jnp.max(jnp.sum(segments_of(batch) > 0, axis=1)) / jnp.float32(nominal_length)

    return dataclasses.replace(objective, rate_factor=rate_factor)


def with_loss_per_row(objective: Objective) -> Objective:
    """Return the objective with the mean over rows of the sum of each, in place of the mean over tokens.

    Terms of the loss are in nats per row; the gradient, and so its norm, is that of such a loss.
    """

    def weights(batch: Batch) -> Sums:
        rows = jnp.sum(jnp.any(batch.weights > 0, axis=1)).astype(jnp.float32)
        return objective.weights(batch) | dict.fromkeys(objective.coefficients, rows)

    return dataclasses.replace(objective, weights=weights)


def segments_of(batch: Batch) -> jax.Array:
    """Return the segments (B, L), ones for a batch of full rows without."""
    return jnp.ones_like(batch.ids) if batch.segments is None else batch.segments


def reset_carry(carry: Any, batch: Batch) -> Any:
    """Return the carry with zeros for the rows that begin a stream; its leaves are (layers, rows, …)."""
    if carry is None or batch.begins is None:
        return carry

    def reset(leaf: jax.Array) -> jax.Array:
        begins = batch.begins.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(begins, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(reset, carry)


def further_losses(model: Model, config: LanguageModel, chunks: int = 0) -> list[FurtherLoss]:
    """Return the losses that `config` adds to that of the next token. chunks: as in `OutputLayer.loss`."""
    losses = [last_position(model, chunks)] if config.positions == "last" else []
    if config.activation_regularization:
        losses.append(activation_regularization(config.activation_regularization))
    if config.temporal_activation_regularization:
        losses.append(temporal_activation_regularization(config.temporal_activation_regularization))
    if config.intermediate_coefficient or config.second_target_coefficient:
        losses.append(AuxiliaryLosses(model, config, chunks).further_loss())
    return losses


def activation_regularization(coefficient: float) -> FurtherLoss:
    """Return the mean over tokens and units of the squared states (awd-lstm-lm, main.py:201)."""

    def sums(params: Any, outputs: Outputs, batch: Batch) -> Sums:
        squares_BL = jnp.mean(jnp.square(outputs.states.astype(jnp.float32)), axis=-1)
        return {"activation": jnp.sum(jnp.where(segments_of(batch) > 0, squares_BL, 0.0))}

    def weights(batch: Batch) -> Sums:
        return {"activation": jnp.sum(segments_of(batch) > 0).astype(jnp.float32)}

    return FurtherLoss({"activation": coefficient}, weights, sums, in_evaluation=True)


def temporal_activation_regularization(coefficient: float) -> FurtherLoss:
    """Return the mean of the squared differences of consecutive states of a segment (awd-lstm-lm, main.py:203)."""

    def continues(batch: Batch) -> jax.Array:
        segments_BL = segments_of(batch)
        return ((segments_BL[:, 1:] > 0) & (segments_BL[:, 1:] == segments_BL[:, :-1])).astype(jnp.float32)

    def sums(params: Any, outputs: Outputs, batch: Batch) -> Sums:
        states = outputs.states if outputs.undropped is None else outputs.undropped
        steps_BLD = jnp.diff(states.astype(jnp.float32), axis=1)
        return {"temporal_activation": jnp.sum(continues(batch) * jnp.mean(jnp.square(steps_BLD), axis=-1))}

    def weights(batch: Batch) -> Sums:
        return {"temporal_activation": jnp.sum(continues(batch))}

    return FurtherLoss({"temporal_activation": coefficient}, weights, sums, in_evaluation=True)


def last_position(model: Model, chunks: int = 0) -> FurtherLoss:
    """Return the loss at the last position of each row, `last_nll`, which is trained instead of `nll`."""

    def sums(params: Any, outputs: Outputs, batch: Batch) -> Sums:
        last = at_last_positions(batch)
        return {"last_nll": model.loss(params, outputs.states, outputs.output, last.targets, last.weights, chunks)[0]}

    def weights(batch: Batch) -> Sums:
        return {"last_nll": jnp.sum(at_last_positions(batch).weights)}

    return FurtherLoss({"nll": 0.0, "last_nll": 1.0}, weights, sums)


def at_last_positions(batch: Batch) -> Batch:
    """Return the batch with the weight 0 at all positions but the last of each row that has a weight."""
    after_BL = jnp.cumsum(batch.weights[:, ::-1] > 0, axis=1)[:, ::-1]  # positions with a weight, from here to the end
    return dataclasses.replace(batch, weights=jnp.where(after_BL == 1, batch.weights, 0.0))


def contributes(step: jax.Array, num_steps: jax.Array, num_layers: int) -> jax.Array:
    """Return 1.0 for each intermediate layer that contributes to update `step`, counted from 0, else 0.0: (N - 1,).

    Layer l of N, counted from 1, stops "after finishing l/2n of the training": it contributes while step / num_steps is
    below l / 2N. The bound is rounded up in whole numbers, and so exact.
    """
    layers = jnp.arange(1, num_layers)
    whole, rest = jnp.divmod(jnp.asarray(num_steps).astype(jnp.int32), 2 * num_layers)
    return (step < layers * whole - (-layers * rest) // (2 * num_layers)).astype(jnp.float32)


class AuxiliaryLosses:
    """The losses of intermediate layers and of a second target, for all positions or the last one of each row.

    The terms, in nats per token:

    - `layer_nll` (N - 1,): the loss of the next token in each intermediate layer, times its coefficient until it stops;
    - `second_nll`: the loss of the token after the next in the last layer, times the coefficient of a second target;
    - `layer_second_nll` (N - 1,): that in each intermediate layer, times both coefficients.

    A second target beyond the end of a row, or in another segment, has weight 0. InputError for intermediate losses of
    a model with one layer.
    """

    def __init__(self, model: Model, config: LanguageModel, chunks: int = 0) -> None:
        self._model, self._chunks, layers = model, chunks, model.config.num_layers
        intermediate, second_target = config.intermediate_coefficient, config.second_target_coefficient
        self._trained = at_last_positions if config.positions == "last" else lambda batch: batch
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

    def further_loss(self) -> FurtherLoss:
        """Return the losses as terms of an `Objective`, with their classifiers."""
        shapes = nn.unbox(jax.eval_shape(self.init, jax.random.key(0)))[CLASSIFIERS]
        flops = 6.0 * sum(shapes[name]["kernel"].size for name in self.coefficients)  # forward and backward
        reads_layers = "layer_nll" in self.coefficients
        functions: Any = {"weights": self.weights, "sums": self.sums, "init": self.init}
        return FurtherLoss(self.coefficients, **functions, reads_layers=reads_layers, flops_per_token=flops)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return fresh classifiers, (V, D) or (N - 1, V, D), boxed."""
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

    def weights(self, batch: Batch) -> Sums:
        """Return the weight of each term over the whole batch."""
        trained = self._trained(batch)
        return {name: jnp.sum(_targets(name, trained)[1]) for name in self.coefficients}

    def sums(self, params: Any, outputs: Outputs, batch: Batch) -> Sums:
        """Return the sum of each term over a part of the batch."""
        batch, own, found = self._trained(batch), params["head"][CLASSIFIERS], {}
        if "second_nll" in self.coefficients:
            found["second_nll"] = self._nll("second_nll", outputs.states, own["second_nll"]["kernel"], batch)
        if outputs.layers is None:
            return found
        kernels = {name: own[name]["kernel"] for name in self.coefficients if name.startswith("layer")}

        def of_layer(_: None, inputs: Any) -> tuple[None, Sums]:
            states_BLD, norm, of_terms = inputs
            normed_BLD: Any = _NORM.apply({"params": norm}, states_BLD)
            return None, {name: self._nll(name, normed_BLD, kernel, batch) for name, kernel in of_terms.items()}

        if self._model.execution.remat in ("dots", "full"):
            of_layer = jax.checkpoint(of_layer, prevent_cse=False)
        return found | jax.lax.scan(of_layer, None, (outputs.layers[1:-1], own["norm"], kernels))[1]

    def _nll(self, name: str, states_BLD: jax.Array, kernel_VD: jax.Array, batch: Batch) -> jax.Array:
        targets_BL, weights_BL = _targets(name, batch)
        chunks = num_loss_chunks(self._chunks, targets_BL.shape[0], targets_BL.shape[1], kernel_VD)
        return projected_cross_entropy(states_BLD, kernel_VD, targets_BL, weights_BL, chunks)[0]


def _targets(name: str, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the targets of a term and their weights, (B, L) each."""
    if name == "layer_nll":
        return batch.targets, batch.weights
    weights_BM = batch.weights[:, 1:]
    if batch.segments is not None:  # None: full rows of one segment
        weights_BM = jnp.where(batch.segments[:, 1:] == batch.segments[:, :-1], weights_BM, 0.0)
    at_end = ((0, 0), (0, 1))
    return jnp.pad(batch.targets[:, 1:], at_end), jnp.pad(weights_BM, at_end)
