"""The continuous cache of Grave et al. (2017), the "continuous cache pointer" of Merity et al. (2018), section 5.

The words that followed the last W tokens are predicted again, each with the softmax of theta h_t . h_i, where h_t is
the present state of the last layer and h_i the one from which that word was predicted. The probability of a word is
lambda p_cache + (1 - lambda) p_model once W tokens are known, and p_model before (awd-lstm-lm, pointer.py:59-113). The
original leaves the first token of each of its windows out of the mixture; here every token is mixed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.evaluation.arguments import PointerCache
from jaxlm.models.model import Inputs, Model
from jaxlm.objectives.language_model import reset_carry
from jaxlm.training.step import EvalStep


class History(NamedTuple):
    """The last W tokens of each row, the oldest first, with a first axis of 1 as in every carry.

    states: float32 (1, B, W, D). words: int32 (1, B, W), the tokens that followed. seen: int32 (1, B), their number
    since the beginning of the stream.
    """

    states: jax.Array
    words: jax.Array
    seen: jax.Array


def with_history(model: Model, cache: PointerCache, carry: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function of the number of rows that makes the carry of `make_cached_step`. carry: the model's."""

    def make(rows: int) -> tuple[Any, History]:
        size = (1, rows, cache.window)
        states = jnp.zeros((*size, model.config.width), jnp.float32)
        return carry(rows), History(states, jnp.zeros(size, jnp.int32), jnp.zeros((1, rows), jnp.int32))

    return make


def make_cached_step(model: Model, cache: PointerCache) -> EvalStep:
    """Return (params, batch, carry) -> the sums and weights of a batch, and the carry.

    The sums are `nll` and `accuracy` with the cache, and `mixed`, the tokens whose prediction is mixed with it.
    """

    def step(params: Any, batch: Batch, carry: Any) -> tuple[dict[str, Any], Any]:
        state, history = reset_carry(carry, batch)
        outputs = model(params, Inputs(batch.ids, batch.positions, batch.segments), state)
        states_BLD = outputs.states.astype(jnp.float32)
        log_model_BLV = jax.nn.log_softmax(model.logits(params, outputs.states, outputs.output), axis=-1)
        history, known_BL, weights_BLM, words_BM = _weights(history, states_BLD, batch, cache)
        log_right = jnp.take_along_axis(log_model_BLV, batch.targets[..., None], axis=-1)[..., 0]
        p_right = jnp.sum(weights_BLM * (words_BM[:, None] == batch.targets[..., None]), axis=-1)
        mixed = jnp.logaddexp(jnp.log(cache.weight * p_right), jnp.log1p(-cache.weight) + log_right)
        nll = -jnp.sum(batch.weights * jnp.where(known_BL, mixed, log_right))
        # The likeliest word of the mixture, for the accuracy.
        rows, length, _ = log_model_BLV.shape
        of_row, of_token = jnp.arange(rows)[:, None, None], jnp.arange(length)[None, :, None]
        p_BLV = (1 - cache.weight) * jnp.exp(log_model_BLV)
        p_BLV = p_BLV.at[of_row, of_token, words_BM[:, None]].add(cache.weight * weights_BLM)
        best = jnp.where(known_BL, jnp.argmax(p_BLV, axis=-1), jnp.argmax(log_model_BLV, axis=-1))
        hits = jnp.sum(batch.weights * (best == batch.targets))
        total = jnp.sum(batch.weights)
        sums = {"nll": nll, "accuracy": hits, "mixed": jnp.sum(batch.weights * known_BL)}
        return {name: (value, total) for name, value in sums.items()}, (outputs.carry, history)

    return step


def _weights(
    history: History, states_BLD: jax.Array, batch: Batch, cache: PointerCache
) -> tuple[History, jax.Array, jax.Array, jax.Array]:
    """Return the history after a batch, where W tokens are known (B, L), and the cache's weights and words.

    The words (B, M), with M = W + L, are those before the batch and those of the batch. The weights (B, L, M) of a
    position are those of the W tokens before it and sum to 1. Padding is at the ends of the streams alone.
    """
    window, length = cache.window, states_BLD.shape[1]
    all_BMD = jnp.concatenate([history.states[0], states_BLD], axis=1)
    words_BM = jnp.concatenate([history.words[0], batch.targets], axis=1)
    scores_BLM = cache.theta * jnp.einsum("bld,bmd->blm", states_BLD, all_BMD)
    ahead_LM = jnp.arange(window + length)[None] - jnp.arange(length)[:, None]
    before_LM = (ahead_LM >= 0) & (ahead_LM < window)
    weights_BLM = jax.nn.softmax(jnp.where(before_LM, scores_BLM, -jnp.inf), axis=-1)
    known_BL = history.seen[0][:, None] + jnp.arange(length) >= window
    seen = history.seen + length
    after = History(all_BMD[None, :, -window:], words_BM[None, :, -window:], seen)
    return after, known_BL, weights_BLM, words_BM
