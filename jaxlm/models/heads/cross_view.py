"""The head of cross-view training: a module that reads a whole sentence, and others that read a part of it.

Clark, Luong, Manning and Le, "Semi-supervised sequence modeling with cross-view training", 2018, section 3.3, and the
authors' code (tensorflow/models, cvt_text/task_specific/word_level/tagging_module.py:39-66), which has one more module
than the paper, `full`. Labels train the primary module. Its predictions on unlabelled sentences train the others, see
`jaxlm/objectives/cross_view.py`. What the modules read depends on the encoder, see `jaxlm/models/views.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.models import family_of
from jaxlm.models.heads import views_of
from jaxlm.models.heads.head import Head, sequence_inputs
from jaxlm.models.model import Model, Outputs
from jaxlm.models.views import PRIMARY, Part, View
from jaxlm.nn.layers import linear

Layers = dict[str, jax.Array]  # (B, L, D) each, by the names that parts give


class CrossViewHead(Head):
    """A primary module and one for each view. There is no dropout in the head.

    hidden: the width of each module's hidden layer. modules: the views of the model's family, PRIMARY and those of the
    run.
    """

    outputs: int
    hidden: int
    modules: Mapping[str, View]
    kind: ClassVar[str] = "tagging"

    @property
    def auxiliary(self) -> Mapping[str, int]:
        """The views."""
        return {name: view.shift for name, view in self.modules.items() if name != PRIMARY}

    def setup(self) -> None:
        for name, view in self.modules.items():
            setattr(self, name, PredictionModule(self.outputs, self.hidden, view.activates))

    def __call__(self, layers: Layers, *, train: bool) -> jax.Array:
        """Return the scores of the primary module, float32 (B, L, outputs)."""
        if self.is_initializing():
            self.of_views(layers)
        return self._scores(PRIMARY, layers)

    def of_views(self, layers: Layers) -> dict[str, jax.Array]:
        """Return the scores of each view, float32 (B, L, outputs), which may be those of a neighbour."""
        return {name: self._scores(name, layers) for name in self.auxiliary}

    def _scores(self, name: str, layers: Layers) -> jax.Array:
        scores: jax.Array = getattr(self, name)(*(_part_of(layers, part) for part in self.modules[name].parts))
        return scores

    @nn.nowrap
    def model_outputs(
        self, model: Model, params: Any, batch: ExampleBatch, key: jax.Array | None, window: int = 0
    ) -> Outputs:
        """Return the model's outputs with all layers."""
        return model(params, sequence_inputs(model, batch), key=key, layers=True)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the layers that the modules read, (E, L, D) each, by name."""
        assert outputs.layers is not None
        last, width = len(outputs.layers) - 1, outputs.states.shape[-1]
        numbers = {"first": 1, "middle": last // 2, "last": last}
        return ({name: outputs.layers[numbers[name], ..., :width] for name in self._layers},)

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[Any, ...]:
        """Return the layers of one word."""
        return ({name: jnp.zeros((1, 1, config.width)) for name in self._layers},)

    @property
    def _layers(self) -> list[str]:
        return sorted({part.layer for view in self.modules.values() for part in view.parts})


def _part_of(layers: Layers, part: Part) -> jax.Array:
    """Return the states of a part, (B, L, D), or half of D for one direction."""
    states_BLD = layers[part.layer]
    half = states_BLD.shape[-1] // 2
    return {"both": states_BLD, "forward": states_BLD[..., :half], "backward": states_BLD[..., half:]}[part.half]


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
    """Return the head of a task in a run, see `make_head`.

    Its hidden layers are half as wide as the model's states, those of one direction in the original, where it is 512.
    """
    modules = family_of(config.model).views
    chosen = {name: modules[name] for name in (PRIMARY, *views_of(config))}
    return CrossViewHead(task.num_outputs, config.model.width // 2, chosen)
