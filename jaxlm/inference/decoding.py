"""Decoding: one token after the other, with the keys and values of what is past kept in a cache.

A prompt is padded to a bucket of lengths and run once; its cache is then copied for every sample, and a step of fixed
shape, compiled once, adds one token to each. Padding does no harm: the keys it leaves behind lie ahead of the position
that is decoded, where nothing looks, and are overwritten when that position is reached.

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
ENDED = -1  # stands where a sample has ended before the others
_GREEDY = 1e-6  # temperatures below are 0: dividing by them would only overflow
_PARTIAL_CHARACTERS = 3  # bytes of an unfinished UTF-8 character, each of which may decode to one U+FFFD


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: scores are divided by the temperature, then cut to top_k, then to top_p of what is left."""

    temperature: float = 1.0
    """0 takes the most likely token always."""
    top_k: int = 0
    """Draw from this many most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that have this share of the probability; 1: from all."""

    def check(self) -> None:
        """Refuse what is no way to draw."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature {self.temperature}: a number from 0 on (0 takes the most likely token)")
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k}: a number above 0, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: a number above 0 and up to 1, which is all tokens")


def candidates(logits_BV: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """What a token is drawn from: scores (B, K), softmax of which are the probabilities, and the ids (B, K).

    A score of -inf takes no part. Among equal scores the lower id counts as the more likely, so top_k keeps exactly k.
    top_p keeps a token if those before it, most likely first, have less than top_p together; the first always stays.
    Not for temperature 0.
    """
    scores_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / sampling.temperature
    vocabulary = scores_BV.shape[-1]
    if not sampling.top_k and sampling.top_p >= 1:
        return scores_BV, jnp.broadcast_to(jnp.arange(vocabulary), scores_BV.shape)
    scores_BK, ids_BK = jax.lax.top_k(scores_BV, min(sampling.top_k or vocabulary, vocabulary))
    if sampling.top_p < 1:
        shares_BK = jax.nn.softmax(scores_BK, axis=-1)
        before_BK = jnp.cumsum(shares_BK, axis=-1) - shares_BK
        keep_BK = (before_BK < sampling.top_p).at[:, 0].set(True)
        scores_BK = jnp.where(keep_BK, scores_BK, -jnp.inf)
    return scores_BK, ids_BK


def draw(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """One id a row, int32 (B,); each row has its own key, so it does not depend on the other rows."""
    if sampling.temperature < _GREEDY:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    scores_BK, ids_BK = candidates(logits_BV, sampling)
    which_B = jax.vmap(jax.random.categorical)(keys_B, scores_BK)
    return jnp.take_along_axis(ids_BK, which_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Decoder:
    """Continues prompts, several samples at once; programs are compiled for a bucket of lengths and kept.

    params: {"backbone": …}, on any device. positions: those that may be used, all unless given. forbidden: ids that
    are never given out. size: the tokenizer's, beyond which the rows of a published table are padding and never given
    out. end: the id that ends a sample.
    The draws depend on (seed, number of the prompt, sample, position) and on nothing else.
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
            raise ValueError("every id is forbidden")
        self._allowed_V = jnp.asarray(allowed_V)
        self._prefill = jax.jit(self._prefill_prompt, static_argnames=("room", "samples"))
        self._step = jax.jit(self._decode_step, donate_argnums=1)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that the positions leave for a continuation of `prompt`."""
        return self.positions - len(prompt)

    def __call__(
        self, prompt: Sequence[int], *, length: int, samples: int = 1, number: int = 0
    ) -> Iterator[np.ndarray]:
        """For each of up to `length` new positions the ids of all samples, int32 (samples,), as they are made.

        The id that ends a sample is given out, ENDED after it; the iteration stops once all have ended.
        prompt: at least one id. number: which of several prompts this is, for the draws.
        InputError where prompt and continuation have more positions than may be used.
        """
        if not prompt:
            raise ValueError("a prompt has at least one token")
        if length < 1 or samples < 1:
            raise InputError(f"length {length} and samples {samples}: numbers above 0")
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
            made_B = ids_B
            if position + 1 < len(prompt) + length:  # the next step is under way while this one's ids are looked at
                ids_B, carry = self._step(self.params, carry, ids_B, position, keys_B)
            row_B = np.where(alive_B, np.asarray(made_B), ENDED)
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
        return self._draw_at(logits_BV, keys_B, length), carry

    def _decode_step(self, params, carry, ids_B, position, keys_B):
        """Put `ids_B` at `position`, draw the ids that follow."""
        positions_B1 = jnp.full((ids_B.shape[0], 1), position)
        outputs = self.model(params, Inputs(ids_B[:, None], positions_B1), carry)
        logits_BV = self._logits(params, outputs.states[:, 0], outputs.output)
        return self._draw_at(logits_BV, keys_B, position + 1), outputs.carry

    def _logits(self, params: Any, h_BD: jax.Array, output: Any) -> jax.Array:
        logits_BV = self.model.logits(params, h_BD, output)[:, : len(self._allowed_V)]  # no rows of positions
        return jnp.where(self._allowed_V, logits_BV, -jnp.inf)

    def _draw_at(self, logits_BV: jax.Array, keys_B: jax.Array, position: jax.Array) -> jax.Array:
        return draw(logits_BV, jax.vmap(lambda key: jax.random.fold_in(key, position))(keys_B), self.sampling)

    def _bucket(self, length: int) -> int:
        return length_bucket(length, self.positions, smallest=SMALLEST_BUCKET)


def length_bucket(length: int, longest: int, *, smallest: int) -> int:
    """The smallest of smallest, 2 x smallest, 4 x smallest, …, longest that has room for `length`."""
    bucket = smallest
    while bucket < length:
        bucket *= 2
    return min(bucket, longest)


def for_inference(params: Any, dtype: jnp.dtype) -> Any:
    """Return the parameters in the dtype in which a step uses them, norms left as they are; no result changes.

    A decode step reads all weights for one token: in half the width it takes half the time.
    """

    def cast(path, leaf):
        return leaf if any("norm" in str(entry) for entry in path) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def left_context(tokenizer: Tokenizer, *, finetuned: bool = False) -> list[int]:
    """The token that stands before a text: what an empty prompt begins with, and what a first token is predicted from.

    `end` after pretraining, where it parts documents, `start` after fine-tuning, where it opens every input; the other
    one where the tokenizer lacks it, and none where it has neither.
    """
    roles = ("start", "end") if finetuned else ("end", "start")
    return next(([tokenizer.specials[role]] for role in roles if role in tokenizer.specials), [])


class TextStream:
    """Text from ids that arrive one by one: what is given out once never changes.

    A character whose bytes have not all arrived is held back. The text begins with that of the prompt, since some
    tokenizers write the blank between two pieces with neither of them alone.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.given = ""

    def push(self, *ids: int) -> str:
        """The text that is certain now and was not before."""
        self.ids.extend(ids)
        text = self.tokenizer.decode(self.ids)
        return self._give(text, len(text) - _unfinished(text))

    def finish(self) -> str:
        """The rest, broken characters as U+FFFD."""
        text = self.tokenizer.decode(self.ids)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        if end <= len(self.given) or not text.startswith(self.given):
            return ""
        fresh, self.given = text[len(self.given) : end], text[:end]
        return fresh


def _unfinished(text: str) -> int:
    """How many characters at the end may yet become another one."""
    return next((k for k in range(_PARTIAL_CHARACTERS) if not text[: len(text) - k].endswith("\ufffd")), 3)
