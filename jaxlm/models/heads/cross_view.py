"""The head of cross-view training: a module that reads a whole sentence, and others that read a part of it.

Clark, Luong, Manning and Le, "Semi-supervised sequence modeling with cross-view training", 2018, section 3.3, and the
authors' code (tensorflow/models, cvt_text/task_specific/word_level/tagging_module.py:39-66), which has a module more
than the paper, `full`. Labels train the primary module. Its predictions on unlabelled sentences train the others, see
`jaxlm/objectives/cross_view.py`.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import InputError
from jaxlm.models.heads.head import Head, sequence_inputs
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.config import View
from jaxlm.nn.layers import linear

PRIMARY = "primary"
# The word whose tag a module predicts, counted from the one that it reads; 0 for all others.
SHIFTS = {"future": 1, "past": -1}


class CrossViewHead(Head):
    """A primary module and one for each view; the first and the last layer are [forward; backward].

    primary, full: both directions of both layers. forwards, backwards: that direction of the first layer alone, which
    has read nothing of the other side of the word. future, past: the same two, for the tag of the next word and of the
    word before. There is no dropout in the head. hidden: the width of each module's hidden layer.
    """

    outputs: int
    hidden: int
    views: tuple[View, ...]
    kind: ClassVar[str] = "tagging"

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """The views."""
        return self.views

    def setup(self) -> None:
        for name in (PRIMARY, *self.views):
            setattr(self, name, PredictionModule(self.outputs, self.hidden, activates=name != "full"))

    def __call__(self, first_BLD: jax.Array, last_BLD: jax.Array, *, train: bool) -> jax.Array:
        """Return the scores of the primary module, float32 (B, L, outputs), from the first and the last layer."""
        if self.is_initializing():
            self.of_views(first_BLD, last_BLD)
        scores: jax.Array = getattr(self, PRIMARY)(first_BLD, last_BLD)
        return scores

    def of_views(self, first_BLD: jax.Array, last_BLD: jax.Array) -> dict[str, jax.Array]:
        """Return the scores of each view, float32 (B, L, outputs), which may be those of a neighbour (`SHIFTS`)."""
        forward, backward = jnp.split(first_BLD, 2, axis=-1)
        inputs = {"full": (first_BLD, last_BLD), "forwards": (forward,), "backwards": (backward,)}
        inputs |= {"future": (forward,), "past": (backward,)}
        return {name: getattr(self, name)(*inputs[name]) for name in self.views}

    @nn.nowrap
    def model_outputs(
        self, model: Model, params: Any, batch: ExampleBatch, key: jax.Array | None, window: int = 0
    ) -> Outputs:
        """Return the model's outputs with all layers."""
        return model(params, sequence_inputs(model, batch), key=key, layers=True)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the first and the last layer (E, L, D)."""
        assert outputs.layers is not None
        width = outputs.states.shape[-1]
        return outputs.layers[1, ..., :width], outputs.layers[-1, ..., :width]

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return two layers of one word."""
        return (jnp.zeros((1, 1, config.width)),) * 2


class PredictionModule(nn.Module):
    """A linear layer for each input, their sum, a ReLU, and a linear layer for the tags; in float32.

    activates: False for a module without the ReLU. Kernels are initialized as in tf.layers.dense, biases are 0.
    """

    outputs: int
    hidden: int
    activates: bool

    @nn.compact
    def __call__(self, *inputs_BLD: jax.Array) -> jax.Array:
        """Return scores (B, L, outputs)."""
        h_BLD: Any = 0.0
        for number, x_BLD in enumerate(inputs_BLD):
            h_BLD += self._linear(f"projection_{number}_", x_BLD, self.hidden, ("width", "hidden"))
        h_BLD = jax.nn.relu(h_BLD) if self.activates else h_BLD
        return self._linear("", h_BLD, self.outputs, ("whole_width", "classes"))

    def _linear(self, prefix: str, x: jax.Array, outputs: int, names: tuple[str, str]) -> jax.Array:
        init, zeros = nn.initializers.glorot_uniform(), nn.initializers.zeros_init()
        kernel = self.param(f"{prefix}kernel", with_axes(init, names), (x.shape[-1], outputs))
        bias = self.param(f"{prefix}bias", with_axes(zeros, names[1:]), (outputs,))
        return linear(x.astype(jnp.float32), kernel, bias)


def make(task: Any, config: Any, *, pooled: bool) -> CrossViewHead:
    """Return the head of a task in a run, see `make_head`. InputError for a model of one layer.

    Its hidden layers are as wide as the states of one direction: 512 in the original.
    """
    layers = config.model.num_layers
    if layers < 2:
        raise InputError(f"model.num_layers must be at least 2 for head cross_view, got {layers}; give more layers")
    return CrossViewHead(task.num_outputs, config.model.width // 2, config.views)
