"""ELMo's language model: two LSTMs over words from their characters, one in each direction.

Peters, Neumann, Iyyer, Gardner, Clark, Lee and Zettlemoyer, "Deep contextualized word representations", 2018, sections
3.1 and 3.4, and the authors' code, allenai/bilm-tf (bilm/training.py:105-526). The directions share the vectors of the
tokens and the output layer, and nothing else. Each layer is an LSTM with a projection, both clipped; the state that it
carries is the clipped projection. From the second layer on, its input is added to its output outside of the recurrence:
the input after dropout, which has a mask of its own at each position. As in TensorFlow's LSTMCell the forget gate has 1
added to its bias, which is not a part of the parameter.

In training each direction reads a text of its own (`Inputs.backward`), with a state that continues from batch to batch.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.elmo import ELMoConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.characters import CharacterEncoder
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, dropout, fold, gathered, project
from jaxlm.nn.recurrence import Clips, LSTMState, boundaries, lstm, uniform
from jaxlm.nn.sampled_softmax import Sample, SampledOutput, sampled_ids

FORGET_BIAS = 1.0
DIRECTIONS = ("forward", "backward")


def flops_per_token(config: ELMoConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per position, a token of each direction's text: six per multiplication."""
    c, p, features = config.num_characters, config.projection, sum(number for _, number in config.filters)
    token = sum((c - width + 1) * width * config.character_width * number for width, number in config.filters)
    token += 2 * config.num_highways * features**2 + features * p
    layer = 2 * p * 4 * config.units + config.units * p
    scored = config.negatives + 1 if 0 < config.negatives < config.vocab_size else config.vocab_size
    return 12.0 * (token + config.num_layers * layer + (1.0 if predicted is None else predicted) * scored * p)


def empty_state(config: ELMoConfig, rows: int) -> LSTMState:
    """Return the state before the first token of `rows` rows, zeros: h (N, B, 2 P) and c (N, B, 2 U).

    The forward direction has the first half of each.
    """
    shape = (config.num_layers, rows)
    return LSTMState(jnp.zeros((*shape, config.width), jnp.float32), jnp.zeros((*shape, 2 * config.units), jnp.float32))


class Way(NamedTuple):
    """The way in which a direction reads its rows: their `boundaries`, and True from the last position to the first."""

    real_LB: jax.Array
    reset_LB: jax.Array
    reverse: bool


def _way(inputs: Inputs, reverse: bool) -> Way:
    return Way(*boundaries(inputs.ids, inputs.segments, reverse), reverse)


class ELMo(nn.Module):
    """The bidirectional language model: token vectors and layers. The output layer is `SampledOutput`."""

    config: ELMoConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self, inputs: Inputs, carry: LSTMState | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states [forward; backward], and as `output` in training the sampled ids of each direction, or None.

        A state is set to zero where a new segment of a packed row begins; padding leaves it unchanged and has states of
        zeros. Ids and positions are not used. carry: see `empty_state`; None: zero, and no carry is returned. It may
        have more rows than the batch, which keep their states. layers: the first are the token vectors, twice.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        sizes = (config.filters, config.character_width, config.num_highways, config.projection)
        encoder: Any = CharacterEncoder(*sizes, self.execution, name="embeddings")
        same = inputs.backward is None  # both directions read the same rows
        backward = inputs if inputs.backward is None else inputs.backward
        ways = (_way(inputs, False), _way(backward, same))
        vectors = [encoder(read.characters) for read in ([inputs] if same else [inputs, backward])]
        tokens = [
            constrain(jnp.where(way.real_LB.T[..., None], vector_BLP, 0.0), STATES)
            for way, vector_BLP in zip(ways, (vectors[0], vectors[-1]), strict=True)
        ]
        batch = inputs.ids.shape[0]
        start = empty_state(config, batch) if carry is None else LSTMState(*(leaf[:, :batch] for leaf in carry))
        x, hidden, ends = tokens, [jnp.concatenate(tokens, axis=-1)], []
        for number in range(config.num_layers):
            x = [dropout(part, config.dropout_rate, fold(key, 2 * number + way)) for way, part in enumerate(x)]
            of_layer = LSTMState(*(part[number] for part in start))
            y, end = Layer(config, self.execution, name=f"layer_{number}")(x, of_layer, ways)
            x = [a + b for a, b in zip(x, y, strict=True)] if config.residual and number else y
            hidden.append(jnp.concatenate(x, axis=-1))
            ends.append(end)
        after = None
        if carry is not None:
            new = (jnp.stack(parts) for parts in zip(*ends, strict=True))
            kept = (leaf[:, batch:] for leaf in carry)
            after = LSTMState(*(jnp.concatenate(parts, axis=1) for parts in zip(new, kept, strict=True)))
        last = 2 * config.num_layers
        states = dropout(hidden[-1], config.dropout_rate, fold(key, last))
        stacked = jnp.stack(hidden) if layers else None
        return Outputs(states, stacked, after, self._samples(fold(key, last + 1)), hidden[-1])

    def _samples(self, key: jax.Array | None) -> Sample | None:
        """Return the sampled ids of both directions, (2, K), and their times; None where all ids are used.

        The last id begins a sentence (`data/sentence_streams.py`), and is the most frequent one: it has the first rank.
        """
        config = self.config
        if key is None or not 0 < config.negatives < config.vocab_size:
            return None
        keys = jax.random.split(key)
        ranks = jax.vmap(lambda key: sampled_ids(key, config.vocab_size, config.negatives))(keys)
        return Sample((ranks.ids - 1) % config.vocab_size, ranks.time)


class Layer(nn.Module):
    """An LSTM of each direction."""

    config: ELMoConfig
    execution: Execution

    @nn.compact
    def __call__(self, x, start: LSTMState, ways: tuple[Way, Way]) -> tuple[list[jax.Array], LSTMState]:
        """Return the outputs of the two directions, (B, L, P) each, and the state after the last tokens. x: their
        inputs."""
        halves = zip(*(jnp.split(part, 2, axis=-1) for part in start), strict=True)
        outputs, ends = [], []
        for name, x_BLP, half, way in zip(DIRECTIONS, x, halves, ways, strict=True):
            y_BLP, end = Direction(self.config, self.execution, name=name)(x_BLP, LSTMState(*half), way)
            outputs.append(y_BLP)
            ends.append(end)
        return outputs, LSTMState(*(jnp.concatenate(parts, axis=-1) for parts in zip(*ends, strict=True)))


class Direction(nn.Module):
    """An LSTM of `units` units with a projection, both clipped."""

    config: ELMoConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLP: jax.Array, start: LSTMState, way: Way) -> tuple[jax.Array, LSTMState]:
        config, dtype = self.config, self.execution.compute_dtype()
        p, u = config.projection, config.units
        # TensorFlow's default (Glorot and Bengio, 2010) for one kernel of inputs and states.
        init, init_out = uniform(math.sqrt(6 / (2 * p + 4 * u))), uniform(math.sqrt(6 / (u + p)))
        names_in, names_state, names_out = ("width", "gates"), ("whole_width", "gates"), ("units", "whole_width")
        kernel_in = self.param("in_kernel", with_axes(init, names_in), (p, 4 * u))
        kernel_state = self.param("state_kernel", with_axes(init, names_state), (p, 4 * u))
        bias = self.param("bias", with_axes(nn.initializers.zeros_init(), ("gates",)), (4 * u,))
        kernel_out = self.param("out_kernel", with_axes(init_out, names_out), (u, p))
        bias = bias + jnp.where(jnp.arange(4 * u) // u == 1, FORGET_BIAS, 0.0)
        x_BLG = project(x_BLP, kernel_in, bias, names_in, self.execution)  # for all positions at once
        kernel_PG, kernel_UP = gathered(kernel_state, dtype, names_state), gathered(kernel_out, dtype, names_out)
        clips = Clips(config.cell_clip, config.projection_clip)
        x_LBG = jnp.swapaxes(x_BLG, 0, 1)
        h_LBP, end = lstm(x_LBG, kernel_PG, start, way.real_LB, way.reset_LB, kernel_UP, None, clips, way.reverse)
        return constrain(jnp.swapaxes(h_LBP, 0, 1).astype(dtype), STATES), end


ARITHMETIC = Arithmetic(
    module=ELMo,
    output_layer=lambda config: SampledOutput(
        config.vocab_size, config.projection, config.init_std, rank=lambda ids: (ids + 1) % config.vocab_size
    ),
    flops_per_token=flops_per_token,
    initial_carry=lambda config, rows, dtype: empty_state(config, rows),
)
