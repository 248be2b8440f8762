"""Sampling of continuations, token by token.

top-p is the nucleus of Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of Neural Text Degeneration", 2020.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.arguments import Sampling
from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.ranges import checked

DEFAULT = Sampling()
ENDED = -1  # fills the positions after the end of a sample
_GREEDY = 1e-6  # lower temperatures count as 0, as a division by them would overflow


def candidates(logits_BV: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the scores (B, K) and ids (B, K) to sample from; softmax of the scores gives the probabilities.

    A score of -inf excludes its id. Among equal scores the lower id counts as the more likely, so top_k keeps exactly
    k. top_p keeps a token if the more likely ones have a total probability below top_p; the first is always kept.
    The temperature must not be 0.
    """
    scores_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / sampling.temperature
    vocabulary = scores_BV.shape[-1]
    if not sampling.top_k and sampling.top_p >= 1:
        return scores_BV, jnp.broadcast_to(jnp.arange(vocabulary), scores_BV.shape)
    scores_BK, ids_BK = jax.lax.top_k(scores_BV, min(sampling.top_k or vocabulary, vocabulary))
    if sampling.top_p < 1:
        probs_BK = jax.nn.softmax(scores_BK, axis=-1)
        before_BK = jnp.cumsum(probs_BK, axis=-1) - probs_BK
        keep_BK = (before_BK < sampling.top_p).at[:, 0].set(True)
        scores_BK = jnp.where(keep_BK, scores_BK, -jnp.inf)
    return scores_BK, ids_BK


def sample_ids(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Sample one id per row, int32 (B,); each row has a key of its own, so the rows are independent."""
    if sampling.temperature < _GREEDY:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    scores_BK, ids_BK = candidates(logits_BV, sampling)
    which_B = jax.vmap(jax.random.categorical)(keys_B, scores_BK)
    return jnp.take_along_axis(ids_BK, which_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Sampler:
    """Sampler of continuations of prompts, several samples of each at once; it keeps the compiled programs.

    Samples depend on (seed, number of the prompt, sample, position): neither on the number of samples, nor, beyond
    rounding, on the other prompts of a batch.
    """

    def __init__(self, cached: CachedModel, sampling: Sampling = DEFAULT, *, seed: int = 0) -> None:
        checked(sampling)
        self.cached, self.sampling, self.seed = cached, sampling, seed
        self._first = jax.jit(self._first_ids, static_argnames=("room", "samples"))
        self._next = jax.jit(self._next_ids, donate_argnums=1)

    def __call__(self, prompts: Sequence[Prompt], *, samples: int = 1) -> Iterator[np.ndarray]:
        """Yield the ids of all samples, int32 (prompts, samples), for each new token until all samples are complete.

        A sample is complete after the id that ends a text, and after its prompt's length; ENDED follows.
        The mesh of the model must be in use. InputError as from `CachedModel.check`.
        """
        for prompt in prompts:
            self.cached.check(prompt)
        return self._tokens(prompts, samples)

    def _tokens(self, prompts, samples):
        cached, end = self.cached, self.cached.end
        most_R = np.repeat([prompt.length for prompt in prompts], samples)
        lengths_R = np.repeat([len(prompt.ids) for prompt in prompts], samples).astype(np.int32)
        numbers_B = np.array([prompt.number for prompt in prompts], np.uint32)
        seeds = _keys(self.seed, numbers_B, samples), lengths_R
        alive_R, starts_R = np.ones(len(most_R), bool), cached.starts(lengths_R)
        ids_R, rows = self._begun(prompts, 0, seeds, samples)
        past: list[np.ndarray] = []  # the ids of earlier steps, for windows that slide
        for made in range(1, most_R.max() + 1):
            now_R = ids_R
            if made < most_R.max():  # dispatch the next step before fetching the ids of this one
                now_starts_R = cached.starts(lengths_R + made)
                if np.any(alive_R & (now_starts_R != starts_R)):
                    texts, starts_R = _texts(prompts, samples, [*past, np.asarray(now_R)]), now_starts_R
                    ids_R, rows = self._begun(texts, made, seeds, 1)
                else:
                    ids_R, rows = self._next(cached.params, rows, ids_R, made - 1, seeds)
            if cached.sliding:
                past.append(np.asarray(now_R))
            new_R = np.where(alive_R, np.asarray(now_R), ENDED)
            yield new_R.reshape(len(prompts), samples)
            alive_R &= made < most_R
            if end is not None:
                alive_R &= new_R != end
            if not alive_R.any():
                return

    def _begun(self, prompts: Sequence[Prompt], made: int, seeds, samples: int):
        """Return the ids that follow prompts, whose last `made` tokens are new, and the rows, `samples` of each."""
        padded, room = self.cached.padded(prompts)
        return self._first(self.cached.params, padded, made, seeds, room=room, samples=samples)

    def _first_ids(self, params, padded, made, seeds, *, room: int, samples: int):
        logits_RV, rows = self.cached.prefill(params, padded, made, room=room, copies=samples)
        return self._sample(logits_RV, rows, made, seeds), rows

    def _next_ids(self, params, rows, ids_R, made, seeds):
        """Add `ids_R` to rows with `made` new tokens, and sample the ids that follow."""
        logits_RV, rows = self.cached.step(params, rows, ids_R, made)
        return self._sample(logits_RV, rows, made + 1, seeds), rows

    def _sample(self, logits_RV, rows, made, seeds) -> jax.Array:
        keys_R, lengths_R = seeds
        keys_R = jax.vmap(jax.random.fold_in)(keys_R, lengths_R + made)
        return self.cached.replicated(sample_ids(self.cached.adjusted(logits_RV, rows, made), keys_R, self.sampling))


def _texts(prompts: Sequence[Prompt], samples: int, past: Sequence[np.ndarray]) -> list[Prompt]:
    """Return each sample's text so far as a prompt of its own. past: the new ids (prompts x samples,) of each step."""
    new = np.stack(past, axis=1).tolist()
    rows = [prompt for prompt in prompts for _ in range(samples)]
    return [
        Prompt([*row.ids, *ids], max(row.length - len(ids), 1), row.number) for row, ids in zip(rows, new, strict=True)
    ]


def _keys(seed: int, numbers_B: np.ndarray, samples: int) -> jax.Array:
    """Return a key for each sample of each prompt, (prompts x samples,)."""
    key = jax.random.key(seed, impl="threefry2x32")

    def of_prompt(number: jax.Array) -> jax.Array:
        of_number = jax.random.fold_in(key, number)
        return jax.vmap(lambda sample: jax.random.fold_in(of_number, sample))(jnp.arange(samples))

    return jax.vmap(of_prompt)(jnp.asarray(numbers_B)).reshape(-1)
