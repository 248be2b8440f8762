"""Models: their inputs and outputs, the functions of a family, and the model that a config and an execution make.

`jaxlm/models/__init__.py` lists the families and builds models; no other code asks which family a model is of.
"""

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.models.family import Family
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import fold
from jaxlm.nn.output import Penalty


class Inputs(NamedTuple):
    """Rows of tokens.

    ids, positions: int32 (B, L). segments: int32 (B, L), the sequences of a packed row numbered from 1, 0 is padding;
    None: one sequence per row. token_type_ids: int32 (B, L), the segment of a pair that a token is in, 0 or 1; None:
    all 0. Families without segment embeddings ignore them. source: the rows (B, S) that an encoder-decoder's encoder
    reads; None: a model without a source, or a decoding step, whose carry has what it needs of the source.
    characters: int32 (B, L, C), the characters of each token (`jaxlm/text/characters.py`), for families that read them;
    None for all others. backward: the rows that the backward direction of a bidirectional language model reads, in the
    order in which it reads them, in training those of another stream of reversed sentences; None: it reads the same
    rows, their real part, from right to left. features: float32 (B, L, layers, D) each, states of other models.

    Example:
      >>> inputs = jaxlm.Inputs(ids=[[5, 6, 7]], positions=[[0, 1, 2]])
      >>> inputs.segments is None
      True
    """

    ids: jax.Array
    positions: jax.Array
    segments: jax.Array | None = None
    token_type_ids: jax.Array | None = None
    source: "Inputs | None" = None
    characters: jax.Array | None = None
    backward: "Inputs | None" = None
    features: tuple[jax.Array, ...] = ()


def source_inputs(ids_BS: Any, segments_BS: Any = None) -> Inputs:
    """Return rows of tokens for an encoder, whose positions are counted from the first slot."""
    positions_BS: Any = np.broadcast_to(np.arange(ids_BS.shape[1], dtype=np.int32), ids_BS.shape)
    return Inputs(ids_BS, positions_BS, segments_BS)


class Outputs(NamedTuple):
    """Results of one pass over `Inputs`.

    states: (B, L, D) in the compute dtype, of the last layer. layers: (N + 1, B, L, D), the embeddings first, if
    requested; where layers differ in width, D is the widest and the others end in zeros. carry: the state that the
    model keeps of these tokens, None if no carry was given. output: the arrays of this pass that the output layer
    needs, for example the token table that it is tied to. undropped: `states` before the output
    dropout, or None if the model has no output dropout.

    A bidirectional language model has states [forward; backward] of two halves, each of which its output layer scores;
    with `Inputs.backward`, the backward half belongs to the token at the same place of these rows. The leaves of its
    `output` have a first axis of two, the directions.
    """

    states: jax.Array
    layers: jax.Array | None
    carry: Any
    output: Any
    undropped: jax.Array | None = None


class OutputLayer(Protocol):
    """The layer between states and scores over the vocabulary. params: the whole tree, {"backbone", "head"}."""

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return fresh parameters of its own, boxed with their logical axes; they are stored in `params["head"]`."""

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True if `params` holds the parameters of the layer."""

    def logits(self, params: Any, states: jax.Array, output: Any) -> jax.Array:
        """Return float32 scores (…, V) of states (…, D). output: `Outputs.output`."""

    def loss(
        self,
        params: Any,
        states: jax.Array,
        output: Any,
        targets: jax.Array,
        weights: jax.Array,
        chunks: int = 0,
        penalty: Penalty | None = None,
    ) -> tuple[jax.Array, ...]:
        """Return the sums of weighted negative log-likelihoods (nats) and of weighted correct predictions.

        states: (B, M, D); targets, weights: (B, M). chunks: number of chunks for the logits; 0: chosen automatically.
        penalty: see `projected_cross_entropy`, whose three sums are returned then.
        """


@dataclass(frozen=True)
class Arithmetic:
    """The functions of a family's models.

    module: (config, execution) -> Flax module; its call is `module(inputs, carry, train=…, layers=…) -> Outputs`.
    output_layer: config -> output layer. flops_per_token: (config, length, predicted) -> FLOPs of a training step per
    token, forward and backward, where `predicted` is the fraction of positions that the output layer scores (None: as
    in pretraining).
    """

    module: Callable[[Any, Execution], nn.Module]
    output_layer: Callable[[Any], OutputLayer]
    flops_per_token: Callable[[Any, int, float | None], float]
    initial_carry: Callable[[Any, int, Any], Any] = lambda config, rows, dtype: None
    """(config, rows, dtype) -> the state before the first token of a training stream, leaves (layers, rows, …); None:
    no state. dtype: of the computation."""
    cached_carry: Callable[[Any, int, Any], Any] | None = None
    """Like initial_carry, but for evaluation, where keys and values can be cached. Default: initial_carry."""
    decoding_carry: Callable[[Any, int, int, Any], Any] = lambda config, rows, length, dtype: None
    """(config, rows, length, dtype) -> the carry of a decoder with room for `length` tokens; leaves as above."""
    reordered: Callable[[Any, Callable[[jax.Array], jax.Array]], Any] = lambda carry, take: jax.tree.map(take, carry)
    """(carry, take) -> the decoding carry whose rows are others of the same text; take: returns a leaf with these rows.
    Leaves that are the same for all rows of a text need not be taken."""
    next_sentence_head: Callable[[Any], nn.Module] | None = None
    """The head that classifies pooled states of sentence pairs in pretraining; None without one."""


def reordered_targets(carry: Any, take: Callable[[jax.Array], jax.Array]) -> Any:
    """Return the carry of other rows of the same sources: `carry.own` is taken, and what was read of a source stays."""
    return carry._replace(own=jax.tree.map(take, carry.own))


@dataclass(frozen=True)
class Model:
    """A model of a family: a config, and how it is executed. Parameters are one tree, {"backbone": …, "head": …}."""

    family: Family
    config: Any
    execution: Execution = Execution()

    @property
    def arithmetic(self) -> Arithmetic:
        """The functions of the family, from the `model.py` of its folder."""
        found: Arithmetic = importlib.import_module(f"jaxlm.models.{self.family.name}.model").ARITHMETIC
        return found

    @property
    def module(self) -> nn.Module:
        """The Flax module of the backbone."""
        return self.arithmetic.module(self.config, self.execution)

    @property
    def output_layer(self) -> OutputLayer:
        """The output layer."""
        return self.arithmetic.output_layer(self.config)

    @property
    def max_length(self) -> int:
        """The most tokens in a sequence; UNLIMITED without a position table."""
        return self.family.max_length(self.config)

    @property
    def is_causal(self) -> bool:
        """True if a state depends only on its own token and those before it."""
        return self.family.sees(self.config) == "left"

    @property
    def token_characters(self) -> int:
        """The characters of a token that the model reads (`Inputs.characters`); 0: it reads ids."""
        return self.family.num_characters(self.config)

    @property
    def has_source(self) -> bool:
        """True if a state depends on a source, another sequence (`Inputs.source`)."""
        return self.family.sees(self.config) == "source"

    def stream_carry(self, rows: int, *, cached: bool = False) -> Any:
        """Return the carry before the first token of `rows` rows of streams; None for a model without one.

        cached: for an evaluation, faster and of the same meaning as that of training.
        """
        arithmetic = self.arithmetic
        carry = arithmetic.cached_carry if cached and arithmetic.cached_carry else arithmetic.initial_carry
        return carry(self.config, rows, self.execution.compute_dtype())

    def decoding_carry(self, rows: int, length: int, dtype: Any) -> Any:
        """Return the carry of a decoder before the first token of `rows` texts, with room for `length` tokens."""
        return self.arithmetic.decoding_carry(self.config, rows, length, dtype)

    @property
    def next_sentence_head(self) -> nn.Module | None:
        """The head that classifies pooled states of sentence pairs in pretraining; None without one."""
        head = self.arithmetic.next_sentence_head
        return None if head is None else head(self.config)

    def init(self, key: jax.Array) -> Any:
        """Return fresh parameters of the backbone, boxed with their logical axes."""
        return self.module.init(key, self.example_inputs())["params"]

    def example_inputs(self) -> Inputs:
        """Return one row of one token, with a source, characters or features if the model reads them."""
        ids = jnp.zeros((1, 1), jnp.int32)
        characters = jnp.zeros((1, 1, self.token_characters), jnp.int32) if self.token_characters else None
        source = Inputs(ids, ids) if self.has_source else None
        features = tuple(jnp.zeros((1, 1, *shape)) for shape in self.family.feature_shapes(self.config))
        return Inputs(ids, ids, source=source, characters=characters, features=features)

    def __call__(
        self, params: Any, inputs: Inputs, carry: Any = None, *, key: jax.Array | None = None, layers: bool = False
    ) -> Outputs:
        """Return the outputs for `inputs`. key: of dropout; None: evaluation. layers: return all layers' states."""
        rngs = None if key is None else {"dropout": key}
        variables, carry = self._variables(params), _whole(carry)
        found: Any = self.module.apply(variables, inputs, carry, train=key is not None, layers=layers, rngs=rngs)
        return found

    def read(self, params: Any, inputs: Inputs, *, layers: bool = False) -> Outputs:
        """Return the outputs for texts: of a model with a source, those of its encoder, to which they are the source.

        The module of such a model has a method `read` of inputs and `layers`. There is no dropout.
        """
        if not self.has_source:
            return self(params, inputs, layers=layers)
        found: Any = self.module.apply(self._variables(params), inputs, layers, method="read")
        return found

    def windowed_states(self, params: Any, inputs: Inputs, window: int, key: jax.Array | None = None) -> jax.Array:
        """Return the states (B, L, D) of rows read in windows of `window` tokens, for a family that carries a state.

        A window begins with the state that the one before left, and no gradient flows between them. Dropout masks are
        new in each. ULMFiT's backpropagation through time for text classification (Howard and Ruder, 2018, section 3.3;
        courses/dl2, MultiBatchRNN in old/fastai/lm_rnn.py:127-145). Rows have one segment, padded at the end.
        """
        rows, length = inputs.ids.shape
        count = -(-length // window)

        def split(x_BL: jax.Array) -> jax.Array:
            padded = jnp.pad(x_BL, ((0, 0), (0, count * window - length)))
            return jnp.swapaxes(padded.reshape(rows, count, window), 0, 1)

        def read(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            number, ids, positions = part
            found = self(params, Inputs(ids, positions), jax.lax.stop_gradient(carry), key=fold(key, number))
            return found.carry, found.states

        parts = (jnp.arange(count), split(inputs.ids), split(inputs.positions))
        _, states = jax.lax.scan(read, self.stream_carry(rows), parts)
        return jnp.swapaxes(states, 0, 1).reshape(rows, count * window, -1)[:, :length]

    def by_layer(self, params: Any) -> Any:
        """Return the same parameters with the leaves of each layer as arrays of their own; the model accepts both.

        XLA for CPUs copies each layer's slice of a stacked leaf in every pass: for GPT-2 124M that is a tenth of a pass
        over 384 tokens and half of a decoding step. Elsewhere, on several devices, and in a loop over layers the
        parameters are returned unchanged. Both copies of the layers are in memory while the caller keeps them.
        """
        backbone = params["backbone"]
        stacks = {name: backbone[name] for name in self.family.stacks if not isinstance(backbone[name], tuple)}
        leaves, layers = (
            jax.tree.leaves(stacks),
            {name: len(jax.tree.leaves(stack)[0]) for name, stack in stacks.items()},
        )
        devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
        if len(devices) != 1 or devices.pop().platform != "cpu":
            return params
        if any(self.execution.layers_per_iteration(count) < count for count in layers.values()):
            return params
        split = {name: _split(stack, layers[name]) for name, stack in stacks.items()}
        return {**params, "backbone": {**backbone, **split}}

    def carry_by_layer(self, params: Any, carry: Any) -> Any:
        """Return the same carry with the part of each layer as an array of its own, if the parameters are so.

        The model accepts both. A step of decoding then writes one position of each layer in place: from stacked keys
        and values, XLA for CPUs copies each layer's, which was two thirds of a step of T5 small.
        """
        if not any(isinstance(params["backbone"][name], tuple) for name in self.family.stacks):
            return carry
        return jax.tree.map(lambda leaf: ByLayer(tuple(jnp.split(leaf, len(leaf)))), carry)

    def _variables(self, params: Any) -> dict[str, Any]:
        """Return the parameters of the backbone as the module reads them. See `by_layer`."""
        backbone = params["backbone"]
        split = {name: backbone[name] for name in self.family.stacks if isinstance(backbone[name], tuple)}
        # With all layers unrolled, XLA removes this together with the slices that follow.
        return {"params": {**backbone, **{name: _joined(layers) for name, layers in split.items()}}}

    def pool(self, params: Any, states: jax.Array) -> jax.Array:
        """Return the pooled representation (…, D) of sequences from the states (…, D) of their first tokens."""
        found: Any = self.module.apply({"params": params["backbone"]}, states, method="pool")
        return found

    def logits(self, params: Any, states: jax.Array, output: Any) -> jax.Array:
        """Return float32 scores (…, V) over the vocabulary. See `OutputLayer`."""
        return self.output_layer.logits(params, states, output)

    def loss(self, params: Any, states: Any, output: Any, targets: Any, weights: Any, *how: Any):
        """Return the weighted sums of negative log-likelihoods (nats) and correct predictions. See `OutputLayer`.

        how: chunks and penalty.
        """
        return self.output_layer.loss(params, states, output, targets, weights, *how)

    def flops_per_token(self, length: int, predicted: float | None = None) -> float:
        """Return the FLOPs of a training step per token. See `Arithmetic`."""
        return self.arithmetic.flops_per_token(self.config, length, predicted)

    def forward_flops_per_token(self, length: int, predicted: float | None = None) -> float:
        """Return the FLOPs of a forward pass per token, a third of those of a training step."""
        return self.flops_per_token(length, predicted) / 3


class ByLayer(NamedTuple):
    """A leaf (layers, rows, …) of a carry, divided along its first axis: arrays (1, rows, …)."""

    parts: tuple[jax.Array, ...]


def _whole(carry: Any) -> Any:
    """Return a carry of `carry_by_layer` with its leaves as the module reads them."""

    def joined(leaf: Any) -> Any:
        return jnp.concatenate(leaf.parts) if isinstance(leaf, ByLayer) else leaf

    return jax.tree.map(joined, carry, is_leaf=lambda leaf: isinstance(leaf, ByLayer))


def _joined(layers: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@functools.partial(jax.jit, static_argnums=1)
def _split(stacked: Any, layers: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(operator.itemgetter(index), stacked) for index in range(layers))
