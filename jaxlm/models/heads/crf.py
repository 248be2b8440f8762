"""A conditional random field over the tags of a sentence."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import InputError
from jaxlm.models.heads.head import Head
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.crf import IMPOSSIBLE, Chain, best_scores, log_likelihood
from jaxlm.nn.layers import dropout, fold, linear_head


class TaggedScores(NamedTuple):
    """scores: (E, L, T), of the best sequence of tags that has a tag at a position, 0 where no word begins.

    negative_log_likelihoods: (E,), of the tags of a batch, in nats.
    """

    scores: jax.Array
    negative_log_likelihoods: jax.Array


class CRFHead(Head):
    """Dropout, one linear layer on every state, and a linear-chain CRF over the words (Lample et al., 2016, section 2).

    A tag belongs to the first token of a word, and the neighbours of a tag are those of the words beside it. `allowed`
    and `first` exclude sequences in prediction alone, as AllenNLP's ConditionalRandomField does: allowed[t][s] is True
    if tag s may follow tag t, first[t] if a sentence may begin with t.
    """

    outputs: int
    dropout_rate: float
    init_std: float
    allowed: tuple[tuple[bool, ...], ...]
    first: tuple[bool, ...]
    kind: ClassVar[str] = "tagging"

    @property
    def loss(self) -> str:
        """The negative log-likelihood of a sentence's tags."""
        return "tag_sequence"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, tags_BL: jax.Array, *, train: bool) -> TaggedScores:
        """Return the scores of the tags. tags_BL: int32, -1 where no word begins; of unlabelled words any tag."""
        key = self.make_rng("dropout") if train else None
        h_BLD = dropout(h_BLD.astype(jnp.float32), self.dropout_rate, fold(key, 0))
        emissions_BLT = linear_head(self, h_BLD, self.outputs, self.init_std)
        init, names = nn.initializers.normal(self.init_std), ("classes",)
        transitions = self.param("transitions", with_axes(init, ("classes_before", "classes")), (self.outputs,) * 2)
        start, end = (self.param(name, with_axes(init, names), (self.outputs,)) for name in ("start", "end"))
        real_BL = tags_BL >= 0
        likelihoods_B = log_likelihood(emissions_BLT, tags_BL, real_BL, Chain(transitions, start, end))
        excluded = Chain(
            jnp.where(jnp.array(self.allowed), transitions, IMPOSSIBLE),
            jnp.where(jnp.array(self.first), start, IMPOSSIBLE),
            end,
        )
        return TaggedScores(best_scores(emissions_BLT, real_BL, excluded), -likelihoods_B)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the states (E, L, D), and the tag of each word at its first token (E, L)."""
        return outputs.states, jnp.asarray(batch.labels)

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return the state of one word, and its tag."""
        return jnp.zeros((1, 1, config.width)), jnp.zeros((1, 1), jnp.int32)


def make(task: Any, config: Any, *, pooled: bool) -> CRFHead:
    """Return the head of a task in a run, see `make_head`. InputError for tags none of which can begin a sentence."""
    allowed, first = task.neighbours()
    if not any(first):
        raise InputError(
            "head must be linear for tags none of which can begin a sentence, got crf for "
            f"{', '.join(task.labels[:9])}; write the tags as B-TYPE, I-TYPE and O"
        )
    return CRFHead(task.num_outputs, config.head_dropout_rate, config.model.init_std, allowed, first)
