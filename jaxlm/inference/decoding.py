"""Autoregressive decoding, with a cache of the keys and values of past tokens.

A prompt is padded to a bucket of lengths and run once. Its cache is then copied for every sample, and a step of fixed
shape, compiled once, adds one token to each. Padding has no effect: its keys are at positions after the decoded one,
which are masked, and are overwritten when decoding reaches them.

top-p is the nucleus of Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of Neural Text Degeneration", 2020.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import InputError
from jaxlm.models.family import Inputs, Model
from jaxlm.text import Tokenizer

SMALLEST_BUCKET = 64
ENDED = -1  # fills the positions after the end of a sample
_GREEDY = 1e-6  # lower temperatures count as 0, as a division by them would overflow
_PARTIAL_CHARACTERS = 3  # bytes of an incomplete UTF-8 character, each of which may decode to one U+FFFD


@dataclass(frozen=True)
class Sampling:
    """Sampling of a token: logits are divided by the temperature, then truncated to top_k, then to top_p."""

    temperature: float = 1.0
    """Temperature of sampling. 0 takes the most likely token."""
    top_k: int = 0
    """Sample from this many most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with this total probability; 1: from all."""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature must be finite and at least 0, got {self.temperature}; give 0 for the most likely token"
            )
        if self.top_k < 0:
            raise InputError(f"top_k must be at least 0, got {self.top_k}; give 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}; give 1 for all tokens")


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


class Decoder:
    """A decoder that continues prompts, several samples at once; it keeps the programs compiled for length buckets.

    params: {"backbone": …}, on any device. positions: the number of positions to use; default: all. forbidden: ids that
    are never generated. size: the tokenizer's; further rows of a published table are padding and never generated. end:
    the id that ends a sample.
    Samples depend on (seed, number of the prompt, sample, position) and on nothing else.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        sampling: Sampling = Sampling(),
        positions: int | None = None,
        forbidden: Sequence[int] = (),
        size: int | None = None,
        end: int | None = None,
        seed: int = 0,
    ) -> None:
        sampling.check()
        self.model, self.sampling, self.end, self.seed = model, sampling, end, seed
        self.positions = positions or model.max_length
        self.params = for_inference(params, model.execution.compute_dtype())
        allowed_V = np.ones(model.config.vocab_size, bool)
        allowed_V[list(forbidden)] = False
        allowed_V[len(allowed_V) if size is None else size :] = False
        if end is not None:
            allowed_V[end] = True
        if not allowed_V.any():
            raise ValueError("forbidden must leave at least one id")
        self._allowed_V = jnp.asarray(allowed_V)
        self._prefill = jax.jit(self._prefill_prompt, static_argnames=("room", "samples"))
        self._step = jax.jit(self._decode_step, donate_argnums=1)

    def room(self, prompt: Sequence[int]) -> int:
        """Return the number of positions left for a continuation of `prompt`."""
        return self.positions - len(prompt)

    def __call__(
        self, prompt: Sequence[int], *, length: int, samples: int = 1, number: int = 0
    ) -> Iterator[np.ndarray]:
        """Yield the ids of all samples, int32 (samples,), for each of up to `length` new positions.

        The id that ends a sample is yielded, then ENDED; the iteration stops when all samples have ended.
        prompt: at least one id. number: the index of the prompt among several, a seed of the sampling.
        InputError if prompt and continuation have more positions than may be used.
        """
        if not prompt:
            raise ValueError("prompt must have at least one token")
        if length < 1 or samples < 1:
            raise InputError(f"length and samples must be above 0, got {length} and {samples}")
        if len(prompt) + length > self.positions:
            table = self.model.max_length
            were = "was trained on" if self.positions < table else "has"
            more = ", or give --beyond-length" if self.positions < table else ""
            raise InputError(
                f"a prompt of {len(prompt)} tokens and {length} new ones are {len(prompt) + length} positions, and the "
                f"model {were} {self.positions}: shorten the prompt, or ask for {max(self.room(prompt), 0)} new tokens"
                f"{more}"
            )
        return self._tokens(list(prompt), length, samples, number)

    def _tokens(self, prompt: list[int], length: int, samples: int, number: int) -> Iterator[np.ndarray]:
        padded = np.zeros((1, self._bucket(len(prompt))), np.int32)
        padded[0, : len(prompt)] = prompt
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), number)
        keys_B = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(jnp.arange(samples))
        ids_B, carry = self._prefill(
            self.params, padded, len(prompt), keys_B, room=self._bucket(len(prompt) + length), samples=samples
        )
        alive_B = np.ones(samples, bool)
        for position in range(len(prompt), len(prompt) + length):
            now_B = ids_B
            if position + 1 < len(prompt) + length:  # dispatch the next step before fetching the ids of this one
                ids_B, carry = self._step(self.params, carry, ids_B, position, keys_B)
            row_B = np.where(alive_B, np.asarray(now_B), ENDED)
            yield row_B
            if self.end is not None:
                alive_B &= row_B != self.end
                if not alive_B.any():
                    return

    def _prefill_prompt(self, params, ids_1P, length, keys_B, *, room: int, samples: int):
        model, dtype = self.model, self.model.execution.compute_dtype()
        positions_1P = jnp.arange(ids_1P.shape[1])[None]
        carry = model.family.decoding_carry(model.config, 1, room, dtype)
        inputs = Inputs(ids_1P, positions_1P, (positions_1P < length).astype(jnp.int32))
        outputs = model(params, inputs, carry)
        h_1D = jax.lax.dynamic_index_in_dim(outputs.states, length - 1, axis=1, keepdims=False)
        logits_1V = self._logits(params, h_1D, outputs.output)
        logits_BV = jnp.broadcast_to(logits_1V, (samples, len(self._allowed_V)))
        carry = jax.tree.map(lambda leaf: jnp.repeat(leaf, samples, axis=1), outputs.carry)
        return self._sample_at(logits_BV, keys_B, length), carry

    def _decode_step(self, params, carry, ids_B, position, keys_B):
        """Run `ids_B` at `position` and sample the ids that follow."""
        positions_B1 = jnp.full((ids_B.shape[0], 1), position)
        outputs = self.model(params, Inputs(ids_B[:, None], positions_B1), carry)
        logits_BV = self._logits(params, outputs.states[:, 0], outputs.output)
        return self._sample_at(logits_BV, keys_B, position + 1), outputs.carry

    def _logits(self, params: Any, h_BD: jax.Array, output: Any) -> jax.Array:
        logits_BV = self.model.logits(params, h_BD, output)[:, : len(self._allowed_V)]  # token ids only
        return jnp.where(self._allowed_V, logits_BV, -jnp.inf)

    def _sample_at(self, logits_BV: jax.Array, keys_B: jax.Array, position: jax.Array) -> jax.Array:
        return sample_ids(logits_BV, jax.vmap(lambda key: jax.random.fold_in(key, position))(keys_B), self.sampling)

    def _bucket(self, length: int) -> int:
        return length_bucket(length, self.positions, smallest=SMALLEST_BUCKET)


def length_bucket(length: int, longest: int, *, smallest: int) -> int:
    """Return the smallest of smallest, 2 x smallest, 4 x smallest, …, longest that is at least `length`."""
    bucket = smallest
    while bucket < length:
        bucket *= 2
    return min(bucket, longest)


def for_inference(params: Any, dtype: jnp.dtype) -> Any:
    """Return the parameters cast to the dtype of the computation, norms excepted; no result changes.

    A decoding step reads all weights for one token: halving their width halves its time.
    """

    def cast(path, leaf):
        return leaf if any("norm" in str(entry) for entry in path) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def left_context(tokenizer: Tokenizer, *, finetuned: bool = False) -> list[int]:
    """Return the id before a text, as a list: an empty prompt begins with it and it predicts the first token.

    After pretraining it is `end`, which separates documents; after fine-tuning `start`, which begins every input. A
    tokenizer without it gives the other one, and an empty list without both.
    """
    roles = ("start", "end") if finetuned else ("end", "start")
    return next(([tokenizer.specials[role]] for role in roles if role in tokenizer.specials), [])


class TextStream:
    """Decoder of ids that arrive one by one into text; text already returned never changes.

    A character whose bytes have not all arrived is held back. The ids are decoded together with the prompt, as some
    tokenizers write the blank between two tokens only if both are present.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.given = ""

    def push(self, *ids: int) -> str:
        """Add ids; return the new text that further ids cannot change."""
        self.ids.extend(ids)
        text = self.tokenizer.decode(self.ids)
        return self._give(text, len(text) - _unfinished(text))

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        text = self.tokenizer.decode(self.ids)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        if end <= len(self.given) or not text.startswith(self.given):
            return ""
        fresh, self.given = text[len(self.given) : end], text[:end]
        return fresh


def _unfinished(text: str) -> int:
    """Return the number of characters at the end that further ids may change."""
    return next((k for k in range(_PARTIAL_CHARACTERS) if not text[: len(text) - k].endswith("\ufffd")), 3)
