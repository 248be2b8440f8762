"""A BiLSTM over words, the encoder of task networks: word vectors, vectors from characters, and layers of LSTMs.

Clark, Luong, Manning and Le, "Semi-supervised sequence modeling with cross-view training", 2018, section 3.3, and the
authors' code (tensorflow/models, research/cvt_text/model/encoder.py); with other sizes the network of Ma and Hovy
(2016). Characters are read as ELMo reads them, 50 bytes of a word in place of 20 characters there.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.errors import InputError
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.characters import CharacterEncoder
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, dropout, embed, fold, project
from jaxlm.nn.recurrence import BiLSTM, stacked_layers, uniform
from jaxlm.nn.scalar_mix import ScalarMix, normed_over_batch


def flops_per_token(config: BiLSTMConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per word, forward and backward: six per multiplication."""
    places = [(config.num_characters - width + 1, width, number) for width, number in config.filters]
    total = sum(count * width * config.character_width * number for count, width, number in places)
    inputs = sum(width for _, width in config.feature_shapes)
    inputs += config.word_width + (sum(number for _, number in config.filters) if config.character_width else 0)
    if config.input_feed_forward_width:
        total += inputs * config.input_feed_forward_width
        inputs = config.input_feed_forward_width
    for units in config.units:
        total += 2 * ((inputs + config.width // 2) * 4 * units + units * config.projection)
        inputs = config.width
    return 6.0 * total


class WordBiLSTM(nn.Module):
    """The encoder: vectors of words and layers of LSTMs in both directions."""

    config: BiLSTMConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(self, inputs: Inputs, carry: None = None, *, train: bool = False, layers: bool = False) -> Outputs:
        """Return states [forward; backward], zeros at padding. Positions are not used.

        layers: the first are the vectors of the words. A dropout mask differs at each position.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        real_BL = jnp.ones_like(inputs.ids, bool) if inputs.segments is None else inputs.segments > 0
        words = WordVectors(config, self.execution, name="embeddings")
        x_BLD = constrain(words(inputs, real_BL, fold(key, 0)), STATES)
        hidden = [x_BLD]
        for number, units in enumerate(config.units):
            layer = BiLSTM(units, 1, config.projection, x_BLD.dtype, name=f"layer_{number}")
            y_BLD = layer(hidden[-1], real_BL).astype(x_BLD.dtype)
            hidden.append(constrain(dropout(y_BLD, config.dropout_rate, fold(key, number + 1)), STATES))
        return Outputs(hidden[-1], stacked_layers(hidden) if layers else None, None, None)


class WordVectors(nn.Module):
    """Vectors of words, side by side, with dropout: a table by id, features of the characters, states of other models.

    The layers of another model are added with weights that are trained (Peters et al., 2018, equation 1). With
    `input_feed_forward_width` a linear layer with a ReLU follows (McCann et al., 2017, section 5).
    """

    config: BiLSTMConfig
    execution: Execution

    @nn.compact
    def __call__(self, inputs: Inputs, real_BL: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return (B, L, D). real_BL: False at padding."""
        config, parts = self.config, []
        if config.word_width:
            names = ("vocabulary", "width")
            init = with_axes(nn.initializers.normal(config.init_std), names)
            table = self.param("tokens", init, (config.vocab_size, config.word_width))
            vectors = embed(table, inputs.ids, names, self.execution)
            parts.append(dropout(vectors, config.embedding_dropout_rate, fold(key, 0)))
        if config.character_width:
            encoder = CharacterEncoder(config.filters, config.character_width, 0, 0, self.execution, name="characters")
            assert inputs.characters is not None, "the input format of the family has characters"
            features = encoder(inputs.characters)
            parts.append(dropout(features, config.embedding_dropout_rate, fold(key, 1)))
        for number in range(len(config.feature_shapes)):
            layers = jnp.moveaxis(inputs.features[number], 2, 0)
            if config.feature_norm == "batch":
                layers = normed_over_batch(layers, real_BL)
            mixed = ScalarMix(name=f"mix_{number}")(layers).astype(self.execution.compute_dtype())
            parts.append(dropout(mixed, config.embedding_dropout_rate, fold(key, number + 2)))
        vectors = jnp.concatenate(parts, axis=-1)
        if not config.input_feed_forward_width:
            return vectors
        names, shape = ("width", "hidden"), (vectors.shape[-1], config.input_feed_forward_width)
        init, zeros = uniform(shape[0] ** -0.5), nn.initializers.zeros_init()
        kernel = self.param("feed_forward_kernel", with_axes(init, names), shape)
        bias = self.param("feed_forward_bias", with_axes(zeros, names[1:]), shape[1:])
        hidden = jax.nn.relu(project(vectors, kernel, bias, names, self.execution))
        return dropout(hidden, config.input_feed_forward_dropout_rate, fold(key, len(config.feature_shapes) + 2))


class WithoutOutput:
    """The output layer of a model that has none."""

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return no parameters."""
        return {}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return False."""
        return False

    def logits(self, *_: Any) -> jax.Array:
        """Raise InputError."""
        raise InputError("the model must have an output layer, got a network over words; give a language model")

    loss: Any = logits


ARITHMETIC = Arithmetic(module=WordBiLSTM, output_layer=lambda config: WithoutOutput(), flops_per_token=flops_per_token)
