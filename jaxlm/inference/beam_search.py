"""Beam search: the continuations with the highest total log-probability that a search of fixed width finds.

The rules are those of transformers' `generate(num_beams=K, early_stopping=False)`, token for token:

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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.decoding import CachedModel, Prompt, Rows

_NEVER = np.float32(-1e9)  # transformers' score of beams that must not be chosen
Stopped = Callable[[int, list[int]], bool]


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
        carry = jax.tree.map(lambda leaf: jnp.take(leaf, parents_R, axis=1), rows.carry)
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
