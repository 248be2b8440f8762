"""The MT-LSTM, a translation model whose encoder gives contextual word vectors (CoVe).

McCann, Bradbury, Xiong and Socher, "Learned in Translation: Contextualized Word Vectors", 2017, section 3, and the
authors' code, salesforce/cove (OpenNMT-py/onmt/Models.py and onmt/modules/GlobalAttention.py). The encoder has layers
of LSTMs in both directions. Their last states, joined layer by layer, are the first ones of the decoder's layers. The
decoder reads the vector of the target before and the output h~ of its own step before (input feeding; Luong, Pham and
Manning, 2015). With h the state of its last layer and H those of the encoder,

    h~ = tanh(W2 [H^T softmax(H W1 h); h])

as in the code, where the paper adds two biases. Products that do not depend on the step before are computed for all
positions at once: H W1, and the products of W2 with H. Padding of the source is masked, unlike in the original.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.model import Arithmetic, Inputs, Outputs, reordered_targets
from jaxlm.models.mt_lstm import MTLSTMConfig
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import MASKED, STATES, dropout, embed, fold, gathered, project
from jaxlm.nn.output import BiasedOutput
from jaxlm.nn.recurrence import LSTMState, boundaries, gates, lstm, stacked_layers, uniform, weight_gradient

TABLE = ("vocabulary", "width")
MATRIX = ("width", "whole_width")
TARGETS_PER_ROW = 0.5  # target tokens per token of both sides


class Source(NamedTuple):
    """The source as the attention reads it: H W1 and H W2, (1, B, S, D) each, and True for its real tokens, (1, B, S).

    W2: its half for H.
    """

    keys: jax.Array
    values: jax.Array
    real: jax.Array


class DecoderState(NamedTuple):
    """The state of the decoder between two steps, float32: of its layers, (N, B, D) each, and h~, (1, B, D)."""

    layers: LSTMState
    output: jax.Array


class Decoding(NamedTuple):
    """The carry of decoding. source: None before it is read; a step does not change it."""

    own: DecoderState
    source: Source | None = None


class Factors(NamedTuple):
    """Factors of dropout at each position of the decoder, (L, B, D) each; None for evaluation.

    fed: of the output of the step before. between: of the layers but the last, a tuple. output: of h~.
    """

    fed: jax.Array
    between: tuple[jax.Array, ...]
    output: jax.Array


class MTLSTM(nn.Module):
    """The encoder and the decoder. The output layer is `UniformOutput`."""

    config: MTLSTMConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution = self.config, self.execution
        self.embeddings = Embeddings(config, execution)
        for number in range(config.num_layers):
            setattr(self, f"layer_{number}", Layer(config, execution, number))
        self.attention = Attention(config, execution)

    def __call__(
        self, inputs: Inputs, carry: Decoding | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return the outputs h~ of the decoder.

        carry: the state after the preceding tokens, for decoding; with a source the decoder begins at its end instead.
        Padding leaves the state as it is. Positions are not used, and a row has one segment. layers: the target's word
        vectors, the states of the decoder's layers but the last, and h~.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        if inputs.source is None:
            assert carry is not None and carry.source is not None, "a decoding step follows one with a source"
            start, source = carry.own, carry.source
        else:
            hidden, ends = self.encode(inputs.source, train)
            start, source = started(ends), self.attention.source(hidden[-1], _real(inputs.source))
        x_BLW = self.embeddings(inputs.ids, "target_tokens", fold(key, 0), _twice(config.dropout_rate))
        real_LB, _ = boundaries(inputs.ids, inputs.segments)
        kernels, products = [], []
        for number in range(config.num_layers):
            kernel, product_LBG = self._layer(number).decoding(x_BLW if number == 0 else None, real_LB.shape)
            kernels.append(kernel)
            products.append(product_LBG)
        kernels.append(self.attention.state_kernel())
        products.append(jnp.zeros((*real_LB.shape, config.width), jnp.float32))
        factors = self._factors(inputs.ids.shape, fold(key, 1))
        steps, end = decode(tuple(kernels), tuple(products), source, start, factors, real_LB)
        h_NBLD = jnp.swapaxes(steps, 1, 2).astype(x_BLW.dtype)
        states_BLD = constrain(h_NBLD[-1], STATES)
        after = None if carry is None else Decoding(end, source)
        return Outputs(states_BLD, stacked_layers([x_BLW, *h_NBLD]) if layers else None, after, None)

    def read(self, source: Inputs, layers: bool = False) -> Outputs:
        """Return the outputs of the encoder, CoVe's vectors. layers: the word vectors, and the states of each layer."""
        (x_BSW, *hidden), _ = self.encode(source)
        return Outputs(hidden[-1], stacked_layers([x_BSW, *hidden]) if layers else None, None, None)

    def encode(self, source: Inputs, train: bool = False) -> tuple[list[jax.Array], list[list[LSTMState]]]:
        """Return the word vectors and the states of each layer of the encoder (B, S, D), and the ends of each layer.

        States are [forward; backward], zeros at padding; those of the last layer are CoVe's vectors.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        hidden = [self.embeddings(source.ids, "source_tokens", fold(key, 0), config.dropout_rate)]
        real_LB, reset_LB = boundaries(source.ids, source.segments)
        ends = []
        for number in range(config.num_layers):
            y_BSD, end = self._layer(number).encode(hidden[-1], real_LB, reset_LB)
            hidden.append(constrain(dropout(y_BSD, config.dropout_rate, fold(key, number + 1)), STATES))
            ends.append(end)
        return hidden, ends

    def _layer(self, number: int) -> "Layer":
        found: Layer = getattr(self, f"layer_{number}")
        return found

    def _factors(self, shape: tuple[int, ...], key: jax.Array | None) -> Factors | None:
        """Return the factors of dropout for rows of this shape, (B, L)."""
        config = self.config
        if key is None or config.dropout_rate == 0.0:
            return None

        def factor(number: int, rate: float) -> jax.Array:
            ones = jnp.ones((*shape, config.width), jnp.float32)
            return jnp.swapaxes(dropout(ones, rate, fold(key, number)), 0, 1)

        between = tuple(factor(number + 2, config.dropout_rate) for number in range(config.num_layers - 1))
        return Factors(factor(0, _twice(config.dropout_rate)), between, factor(1, config.dropout_rate))


class Embeddings(nn.Module):
    """The word vectors of source and target, (V, W) each."""

    config: MTLSTMConfig
    execution: Execution

    def setup(self) -> None:
        """Create the tables."""
        init = with_axes(uniform(self.config.init_range), TABLE)
        shape = (self.config.vocab_size, self.config.word_width)
        self.source_tokens = self.param("source_tokens", init, shape)
        self.target_tokens = self.param("target_tokens", init, shape)

    def __call__(self, ids_BL: jax.Array, table: str, key: jax.Array | None, rate: float) -> jax.Array:
        """Return the vectors (B, L, W), with dropout. table: the name of the one to read."""
        return constrain(dropout(embed(getattr(self, table), ids_BL, TABLE, self.execution), rate, key), STATES)


class Layer(nn.Module):
    """A layer of the encoder, and the layer of the decoder that begins with its last states. number: from 0."""

    config: MTLSTMConfig
    execution: Execution
    number: int

    def setup(self) -> None:
        """Create the LSTMs."""
        config = self.config
        d, w = config.width, config.word_width
        first = self.number == 0
        self.forward = LSTM(config, self.execution, w if first else d, d // 2)
        self.backward = LSTM(config, self.execution, w if first else d, d // 2)
        self.decoder = LSTM(config, self.execution, w + d if first else d, d)

    def encode(self, x_BSD: jax.Array, real_LB: jax.Array, reset_LB: jax.Array):
        """Return the states [forward; backward] (B, S, D), and the last ones of both directions."""
        outputs, ends = [], []
        for direction, reverse in ((self.forward, False), (self.backward, True)):
            x_LBG, kernel = direction.products(x_BSD), direction.recurrent()
            start = _empty(x_BSD.shape[0], self.config.width // 2)
            h_LBU, end = lstm(x_LBG, kernel, start, real_LB, reset_LB, reverse=reverse)
            outputs.append(jnp.swapaxes(h_LBU, 0, 1).astype(x_BSD.dtype))
            ends.append(end)
        return jnp.concatenate(outputs, axis=-1), ends

    def decoding(self, x_BLW: jax.Array | None, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Return the kernel (2 D, 4 D) of [input; state before], and what is added to its products, (L, B, 4 D).

        x_BLW: the part of the input that is known for all positions, the word vectors; None: there is none.
        """
        width, names = self.config.word_width, ("width", "gates")
        kernel, dtype = self.decoder.in_kernel, self.execution.compute_dtype()
        if x_BLW is None:
            added = jnp.broadcast_to(self.decoder.bias, (*shape, 4 * self.config.width))
        else:
            added = jnp.swapaxes(project(x_BLW, kernel[:width], self.decoder.bias, names, self.execution), 0, 1)
            kernel = kernel[width:]
        both = jnp.concatenate([gathered(kernel, dtype, names), self.decoder.recurrent()])
        return both, added.astype(jnp.float32)


class LSTM(nn.Module):
    """The parameters of an LSTM: kernels of the input (I, 4 U) and of the state (U, 4 U), and the bias."""

    config: MTLSTMConfig
    execution: Execution
    inputs: int
    units: int

    def setup(self) -> None:
        """Create the parameters."""
        init, g = uniform(self.config.init_range), 4 * self.units
        self.in_kernel = self.param("in_kernel", with_axes(init, ("width", "gates")), (self.inputs, g))
        self.state_kernel = self.param("state_kernel", with_axes(init, ("whole_width", "gates")), (self.units, g))
        self.bias = self.param("bias", with_axes(init, ("gates",)), (g,))

    def products(self, x_BLI: jax.Array) -> jax.Array:
        """Return the products with the inputs, (L, B, 4 U)."""
        x_BLG = project(x_BLI, self.in_kernel, self.bias, ("width", "gates"), self.execution)
        return jnp.swapaxes(x_BLG, 0, 1)

    def recurrent(self) -> jax.Array:
        """Return the recurrent kernel in the dtype of the computation."""
        return gathered(self.state_kernel, self.execution.compute_dtype(), ("whole_width", "gates"))


class Attention(nn.Module):
    """The bilinear attention and its output, both without bias (onmt/modules/GlobalAttention.py:30-32)."""

    config: MTLSTMConfig
    execution: Execution

    def setup(self) -> None:
        """Create W1 (D, D), of encoder and decoder states, and W2 (2 D, D)."""
        d, init = self.config.width, uniform(self.config.init_range)
        self.in_kernel = self.param("in_kernel", with_axes(init, MATRIX), (d, d))
        self.out_kernel = self.param("out_kernel", with_axes(init, MATRIX), (2 * d, d))

    def source(self, states_BSD: jax.Array, real_BS: jax.Array) -> Source:
        """Return the source for the attention of every step."""
        kernels = (self.in_kernel, self.out_kernel[: self.config.width])
        keys, values = (project(states_BSD, kernel, None, MATRIX, self.execution)[None] for kernel in kernels)
        return Source(keys, values, real_BS[None])

    def state_kernel(self) -> jax.Array:
        """Return the half of W2 for the state of the decoder, in the dtype of the computation."""
        return gathered(self.out_kernel[self.config.width :], self.execution.compute_dtype(), MATRIX)


@jax.custom_vjp
def decode(
    kernels: tuple[jax.Array, ...],
    products: tuple[jax.Array, ...],
    source: Source,
    start: DecoderState,
    factors: Factors | None,
    real_LB: jax.Array,
) -> tuple[jax.Array, DecoderState]:
    """Return the states of all layers but the last and the outputs, float32 (N, L, B, D), and the last state.

    kernels: of [input; state before] of each layer, (2 D, 4 D), and of the last state for the output, (D, D).
    products: what is added to the product with each of them, (L, B, 4 D) or (L, B, D), float32. real_LB: False at
    padding, which leaves the state as it is. As in `jaxlm.nn.recurrence.lstm`, the gradient of a kernel is one product
    over all positions.
    """
    return _decoded(kernels, products, source, start, factors, real_LB)[0]


def _decoded(kernels, products, source: Source, start: DecoderState, factors: Factors | None, real_LB):
    """Return the results of `decode`, and the inputs of each kernel at each position."""
    keys_BSD, values_BSD, real_BS = (leaf[0] for leaf in source)
    dtype = kernels[0].dtype

    def step(state: DecoderState, inputs):
        products, factors, real_B = inputs
        x_BD, read, hidden = state.output[0], [], []
        if factors is not None:
            x_BD = x_BD * factors.fed
        for number, kernel in enumerate(kernels[:-1]):
            read.append(jnp.concatenate([x_BD, state.layers.h[number]], axis=-1).astype(dtype))
            z_BG = products[number] + jnp.dot(read[-1], kernel, preferred_element_type=jnp.float32)
            hidden.append(gates(z_BG, state.layers.c[number]))
            x_BD = hidden[-1].h
            if factors is not None and number < len(factors.between):
                x_BD = x_BD * factors.between[number]
        read.append(x_BD.astype(dtype))
        scores_BS = jnp.einsum("bd,bsd->bs", read[-1], keys_BSD, preferred_element_type=jnp.float32)
        weights_BS = jax.nn.softmax(jnp.where(real_BS, scores_BS, MASKED)).astype(dtype)
        y_BD = products[-1] + jnp.dot(read[-1], kernels[-1], preferred_element_type=jnp.float32)
        y_BD = jnp.tanh(y_BD + jnp.einsum("bs,bsd->bd", weights_BS, values_BSD, preferred_element_type=jnp.float32))
        if factors is not None:
            y_BD = y_BD * factors.output
        layers = LSTMState(*(jnp.stack(parts) for parts in zip(*hidden, strict=True)))
        after = jax.tree.map(
            lambda new, old: jnp.where(real_B[:, None], new, old), DecoderState(layers, y_BD[None]), state
        )
        return after, (jnp.concatenate([layers.h[:-1], y_BD[None]]), tuple(read))

    end, (found_LNBD, read) = jax.lax.scan(step, start, (products, factors, real_LB))
    return (jnp.swapaxes(found_LNBD, 0, 1), end), read


def _decode_forward(kernels, products, source, start, factors, real_LB):
    def decoded(products, keys, values, start):
        return _decoded(kernels, products, source._replace(keys=keys, values=values), start, factors, real_LB)

    differentiated = (products, source.keys, source.values, start)  # the kernels are constants of the loop
    results, pullback, read = jax.vjp(decoded, *differentiated, has_aux=True)
    return results, (pullback, read, kernels)


def _decode_backward(residuals, cotangents):
    pullback, read, kernels = residuals
    dproducts, dkeys, dvalues, dstart = pullback(cotangents)
    dkernels = tuple(weight_gradient(x, dy, k) for x, dy, k in zip(read, dproducts, kernels, strict=True))
    return dkernels, dproducts, Source._make((dkeys, dvalues, None)), dstart, None, None


decode.defvjp(_decode_forward, _decode_backward)


class UniformOutput(BiasedOutput):
    """Scores are h W^T + b, with initial values of both from a uniform distribution."""

    def __init__(self, config: MTLSTMConfig) -> None:
        super().__init__(config.vocab_size, config.width, config.init_std)
        self.initializer = self.bias_initializer = uniform(config.init_range)


def started(ends: list[list[LSTMState]]) -> DecoderState:
    """Return the first state of the decoder: the last ones of both directions, joined, and an output of zeros."""
    joined = [LSTMState(*(jnp.concatenate(parts, axis=-1) for parts in zip(*both, strict=True))) for both in ends]
    layers = LSTMState(*(jnp.stack(parts) for parts in zip(*joined, strict=True)))
    return DecoderState(layers, jnp.zeros_like(layers.h[:1]))


def flops_per_token(config: MTLSTMConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token of a row, of its source and of its target.

    length: the tokens of both. predicted: the fraction of them that are targets; None: a half.
    """
    targets = TARGETS_PER_ROW if predicted is None else predicted
    d, w, layers = config.width, config.word_width, config.num_layers
    inputs = w + (layers - 1) * d  # of all layers
    source = 4 * d * (inputs + layers * d // 2) + 2 * d * d
    target = 4 * d * (inputs + d + layers * d) + d * d + d * config.vocab_size
    attention = 2 * d * length * (1 - targets)
    return 6.0 * ((1 - targets) * source + targets * (target + attention))


def decoding_carry(config: MTLSTMConfig, rows: int, length: int, dtype: Any) -> Decoding:
    """Return the carry before the source is read."""
    layers = LSTMState(*(jnp.zeros((config.num_layers, rows, config.width), jnp.float32) for _ in range(2)))
    return Decoding(DecoderState(layers, jnp.zeros_like(layers.h[:1])))


def _twice(rate: float) -> float:
    """Return the rate of two dropouts in sequence: what the decoder reads is dropped by it and by its first layer."""
    return 1.0 - (1.0 - rate) ** 2


def _empty(rows: int, units: int) -> LSTMState:
    zeros = jnp.zeros((rows, units), jnp.float32)
    return LSTMState(zeros, zeros)


def _real(inputs: Inputs) -> jax.Array:
    return jnp.ones_like(inputs.ids, bool) if inputs.segments is None else inputs.segments > 0


ARITHMETIC = Arithmetic(
    module=MTLSTM,
    output_layer=UniformOutput,
    flops_per_token=flops_per_token,
    decoding_carry=decoding_carry,
    reordered=reordered_targets,
)
