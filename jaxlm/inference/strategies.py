"""Strategies that choose the next token of a continuation: sampling, and beam search.

top-p is the nucleus of Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of Neural Text Degeneration", 2020.

A beam search returns the continuations with the highest total log-probability that a search of fixed width finds. Its
rules are those of transformers' `generate(num_beams=K, early_stopping=False)`, token for token:

- Each step extends the K running beams by every id and keeps the 2 K extensions with the highest sum of
  log-probabilities. Of the best K of them those that end are finished; the best K that do not end run on.
- A finished continuation of n tokens, including the end token, has the score sum / n^length_penalty (Wu et al.,
  "Google's Neural Machine Translation System", 2016, section 7, without their constant). A length penalty above 0
  favours long continuations, one below 0 short ones, 0 ranks by the sum.
- A search ends when K continuations are finished and the best running beam, scored at its present length, is not above
  the worst of them, or at the prompt's length.

A repetition penalty and a minimum length change the log-probabilities before they are summed. The model runs in steps
of fixed shape, compiled once; its cache is gathered by beam. The bookkeeping of the few beams is done on the host.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from jaxlm.inference.arguments import Sampling
from jaxlm.inference.decoding import CachedModel, Prompt, Rows
from jaxlm.ranges import checked

DEFAULT = Sampling()
ENDED = -1  # fills the positions after the end of a sample
_GREEDY = 1e-6  # lower temperatures count as 0, as a division by them would overflow
_NEVER = np.float32(-1e9)  # transformers' score of beams that must not be chosen
Stopped = Callable[[int, list[int]], bool]


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

    def lowered(self, params: Any, rows: int, room: int) -> Lowered:
        """Trace a step for `rows` rows with room for `room` tokens each, for measurements. Nothing is allocated.

        params: those of `for_inference`, as jax.ShapeDtypeStruct. The mesh, if any, must be in use.
        """

        prompts = [Prompt([0], 1, source=[0] * room)] * rows
        padded, _ = self.cached.padded(prompts)

        def of_rows(params):
            lengths_R, ids_R = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32)
            _, begun = self.cached.prefill(params, padded, room=room, copies=1)
            seeds = _keys(self.seed, np.arange(rows, dtype=np.uint32), 1), lengths_R
            return begun, ids_R, jnp.int32(0), seeds

        return self._next.lower(params, *jax.eval_shape(of_rows, params))

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


class Hypothesis(NamedTuple):
    """A finished continuation. tokens: the ids with the end token. score: the normalized sum of log-probabilities."""

    score: float
    tokens: list[int]


class BeamSearch:
    """Beam search with `beams` beams for several prompts at once; it keeps the compiled programs."""

    def __init__(self, cached: CachedModel, beams: int, *, length_penalty: float = 1.0) -> None:
        self.cached, self.beams, self.length_penalty = cached, beams, length_penalty
        self._first = jax.jit(self._first_extensions, static_argnames="room")
        self._next = jax.jit(self._next_extensions, donate_argnums=1)

    def __call__(self, prompts: Sequence[Prompt], *, stopped: Stopped | None = None) -> list[list[Hypothesis]]:
        """Return up to `beams` continuations of each prompt, the best first.

        stopped: (index of the prompt, its new tokens) -> True if the continuation is complete with these tokens.
        The mesh of the model must be in use. InputError as from `CachedModel.check`.
        """
        for prompt in prompts:
            self.cached.check(prompt)
        params = self.cached.params
        padded, room = self.cached.padded(prompts)
        searches = [_Search(self, number, prompt.length, stopped) for number, prompt in enumerate(prompts)]
        extensions, rows = self._first(params, padded, room=room)
        made = 0
        while True:
            scores_BC, ids_BC = map(np.asarray, extensions)
            for search, scores_C, ids_C in zip(searches, scores_BC, ids_BC, strict=True):
                search.advance(scores_C, ids_C // self.cached.vocabulary, ids_C % self.cached.vocabulary)
            if all(search.is_done for search in searches):
                return [search.finished for search in searches]
            parents_BK = np.array([search.parents for search in searches], np.int32)
            parents_R = (parents_BK + self.beams * np.arange(len(prompts), dtype=np.int32)[:, None]).reshape(-1)
            ids_R = np.array([tokens[-1] for search in searches for tokens in search.running], np.int32)
            scores_BK = np.array([search.scores for search in searches], np.float32)
            extensions, rows = self._next(params, rows, parents_R, ids_R, scores_BK, made)
            made += 1

    def _first_extensions(self, params, padded, *, room: int):
        logits_RV, rows = self.cached.prefill(params, padded, room=room, copies=self.beams)
        scores_K = jnp.where(jnp.arange(self.beams) == 0, 0.0, _NEVER)  # all beams are equal, so the first one counts
        return self._best(logits_RV, rows, jnp.broadcast_to(scores_K, (len(padded.lengths_B), self.beams)), 0), rows

    def _next_extensions(self, params, rows, parents_R, ids_R, scores_BK, made):
        """Add `ids_R` to the rows `parents_R`, which have `made` new tokens."""
        model = self.cached.model
        carry = model.arithmetic.reordered(rows.carry, lambda leaf: jnp.take(leaf, parents_R, axis=1))
        seen_RV = None if rows.seen_BV is None else rows.seen_BV[parents_R]
        logits_RV, rows = self.cached.step(params, Rows(carry, rows.lengths_B, seen_RV), ids_R, made)
        return self._best(logits_RV, rows, scores_BK, made + 1), rows

    def _best(self, logits_RV, rows, scores_BK, made) -> tuple[jax.Array, jax.Array]:
        """Return the scores (B, 2 K) of the best extensions, and their beam x V + id, the best first."""
        log_probs_RV = self.cached.adjusted(jax.nn.log_softmax(logits_RV, axis=-1), rows, made)
        totals_BN = (log_probs_RV + scores_BK.reshape(-1, 1)).reshape(len(scores_BK), -1)
        return self.cached.replicated(jax.lax.top_k(totals_BN, 2 * self.beams))


class _Search:
    """The beams of one prompt. running, scores, parents: of K beams, parents are their indices of the step before."""

    def __init__(self, search: BeamSearch, number: int, length: int, stopped: Stopped | None) -> None:
        self.finished: list[Hypothesis] = []
        self.running: list[list[int]] = [[] for _ in range(search.beams)]
        self.scores: list[np.float32] = [np.float32(0)] * search.beams
        self.parents = list(range(search.beams))
        self.is_done = False
        self._beams, self._length_penalty, self._end = search.beams, search.length_penalty, search.cached.end
        self._number, self._length, self._stopped = number, length, stopped

    def advance(self, scores_C: np.ndarray, parents_C: np.ndarray, ids_C: np.ndarray) -> None:
        """Choose the beams of the next step among 2 K extensions, the best first."""
        if self.is_done:
            return
        tokens = [[*self.running[parent], i] for parent, i in zip(parents_C.tolist(), ids_C.tolist(), strict=True)]
        ends = [self._ends(extension) for extension in tokens]
        made = len(tokens[0])
        norm = made**self._length_penalty
        for score, extension, is_end in list(zip(scores_C, tokens, ends, strict=True))[: self._beams]:
            if is_end:
                self.finished.append(Hypothesis(float(score / norm), extension))
        self.finished = sorted(self.finished, key=lambda found: -found.score)[: self._beams]
        running_C = scores_C + np.where(ends, _NEVER, 0).astype(np.float32)
        chosen = np.argsort(-running_C, kind="stable")[: self._beams]
        self.running = [tokens[c] for c in chosen]
        self.scores = [running_C[c] for c in chosen]
        self.parents = [int(parents_C[c]) for c in chosen]
        full = len(self.finished) == self._beams
        improves = not full or float(self.scores[0] / norm) > self.finished[-1].score
        self.is_done = made == self._length or not improves

    def _ends(self, tokens: list[int]) -> bool:
        if tokens[-1] == self._end or len(tokens) == self._length:
            return True
        return self._stopped is not None and self._stopped(self._number, tokens)


def _texts(prompts: Sequence[Prompt], samples: int, past: Sequence[np.ndarray]) -> list[Prompt]:
    """Return each sample's text so far as a prompt of its own. past: the new ids (prompts x samples,) of each step."""
    new = np.stack(past, axis=1).tolist()
    rows = [prompt for prompt in prompts for _ in range(samples)]
    return [
        row._replace(ids=[*row.ids, *ids], length=max(row.length - len(ids), 1))
        for row, ids in zip(rows, new, strict=True)
    ]


def _keys(seed: int, numbers_B: np.ndarray, samples: int) -> jax.Array:
    """Return a key for each sample of each prompt, (prompts x samples,)."""
    key = jax.random.key(seed, impl="threefry2x32")

    def of_prompt(number: jax.Array) -> jax.Array:
        of_number = jax.random.fold_in(key, number)
        return jax.vmap(lambda sample: jax.random.fold_in(of_number, sample))(jnp.arange(samples))

    return jax.vmap(of_prompt)(jnp.asarray(numbers_B)).reshape(-1)
