"""What an encoder says of a text with one token masked: pseudo-log-likelihoods, and the best fillings of a blank.

Salazar, Liang, Nguyen and Kirchhoff, "Masked Language Model Scoring", 2020: each token is masked in turn and scored
given all others, and the sum over tokens stands for a sentence. Sums over sentences of different lengths, and with
log-probabilities of a decoder, do not compare. Several blanks of one text are filled each on its own.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.mesh import check_batch, host_rows, to_devices, use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.decoding import length_bucket
from jaxlm.inference.scoring import BATCHES_SORTED, SMALLEST_BUCKET, Score
from jaxlm.models.family import Inputs, Model
from jaxlm.text import Tokenizer

BLANK = "[MASK]"  # how a text spells one, whatever the vocabulary does
Filling = tuple[int, float]  # id and probability


class Cloze(NamedTuple):
    """A text without CLS and SEP, and the places of it that are masked, one at a time.

    is_blank: the text has masks there; else its own tokens, which are scored.
    """

    ids: Sequence[int]
    where: Sequence[int]
    is_blank: bool = False


class Answered(NamedTuple):
    """The pseudo-log-likelihood of a text's places together; of a blank text the best fillings of each."""

    score: Score
    fillings: list[list[Filling]]


@struct.dataclass
class _Rows:
    """ids, positions, segments: int32 (B, L). where, targets: int32 (B,), the masked place and what stood there."""

    ids: Any
    positions: Any
    segments: Any
    where: Any
    targets: Any


def text_cloze(tokenizer: Tokenizer, text: str, *, context: str = "", separator: str = " ") -> Cloze:
    """`text` to be scored given `context`; or to be filled where it has `[MASK]`."""
    before = tokenizer.encode(context) if context else []
    if BLANK not in text:
        ids = tokenizer.encode(separator + text if context else text)
        return Cloze([*before, *ids], range(len(before), len(before) + len(ids)))
    ids, where = list(before), []
    for number, part in enumerate(text.split(BLANK)):
        if number:
            where.append(len(ids))
            ids.append(tokenizer.specials["mask"])
        ids += tokenizer.encode(part)
    return Cloze(ids, where, is_blank=True)


def check_cloze(model: Model, params: Any, tokenizer: Tokenizer, name: str) -> Model:
    """Return the model. InputError where it cannot fill blanks: it is causal, has no such head, or no mask token."""
    if model.is_causal:
        raise InputError(f"{name}: its encoder reads from left to right and was not taught to fill blanks")
    if not model.output_layer.available(params):
        raise InputError(
            f"{name} has no masked language model's head, which fine-tuning leaves behind; give its --start"
        )
    if missing := [role for role in ("cls", "sep", "mask") if role not in tokenizer.specials]:
        raise InputError(f"{name}: its tokenizer has no {missing[0].upper()} token, so nothing can be masked")
    return model


def answers(
    model: Model,
    params: Any,
    clozes: Iterable[Cloze],
    tokenizer: Tokenizer,
    *,
    mesh: Mesh,
    batch_size: int,
    top: int = 5,
    positions: int | None = None,
) -> Iterator[Answered]:
    """What the model says of each text, in order; any number of them, some at a time.

    positions: those that may be used, all unless given. A token of a text with more is scored amid as many of its
    neighbours as fit. top: fillings of
    each blank, special tokens and rows beyond the tokenizer's size left out; their probabilities are of the whole
    vocabulary. Memory is linear in the tokens of a block of texts. Neither neighbours nor the batch size change an
    answer beyond rounding. Every process must call this with the same texts.
    """
    check_batch(batch_size, 1, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    allowed_V = np.ones(model.config.vocab_size, np.bool_)
    allowed_V[sorted(set(tokenizer.specials.values()))] = False
    allowed_V[tokenizer.size :] = False  # rows that pad a published table
    step = jax.jit(functools.partial(_answer, model, min(top, int(allowed_V.sum()))), out_shardings=whole)
    source, rows = iter(clozes), host_rows(batch_size, mesh)
    longest = positions or model.max_length
    while block := list(islice(source, max(1, BATCHES_SORTED))):
        places = [(cloze, place) for cloze in block for place in cloze.where]
        order = sorted(range(len(places)), key=lambda k: -min(len(places[k][0].ids), longest - 2))
        found: list[Any] = [None] * len(places)
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            masked = [_masked(*places[k], tokenizer, longest) for k in some]
            bucket = length_bucket(len(masked[0][0]), longest, smallest=min(SMALLEST_BUCKET, longest))
            batch = _padded(masked, batch_size, bucket)
            with use_mesh(mesh):
                batch = to_devices(jax.tree.map(lambda x: x[rows], batch), mesh, batch_size)
                said = [np.asarray(part) for part in step(params, allowed_V, batch)]
            for row, k in enumerate(some):
                right, *fillings = (part[row] for part in said)
                found[k] = (float(right), *(fillings if places[k][0].is_blank else ((), ())))
        ready = iter(found)
        for cloze in block:
            of_places = [next(ready) for _ in cloze.where]
            total = sum(log_probability for log_probability, _, _ in of_places)
            listed = [[(int(i), float(p)) for i, p in zip(ids, shares, strict=True)] for _, ids, shares in of_places]
            score = Score(0.0, 0) if cloze.is_blank else Score(total, len(of_places))
            yield Answered(score, listed if cloze.is_blank else [])


def named_fillings(tokenizer: Tokenizer, fillings: list[list[Filling]]) -> list[list[dict[str, Any]]]:
    """For each blank its fillings as JSON values: {"piece", "probability"}, the best first."""
    return [[{"piece": tokenizer.pieces([i])[0], "probability": share} for i, share in listed] for listed in fillings]


def fillings_text(text: str, named: list[list[dict[str, Any]]]) -> str:
    """The same for people: the text, and a line for each blank."""
    shown = ["  " + "  ".join(f"{one['piece']} {one['probability']:.4f}" for one in listed) for listed in named]
    return "\n".join([text, *shown])


def _answer(model: Model, top: int, params: Any, allowed_V: jax.Array, rows: _Rows) -> tuple[jax.Array, ...]:
    """Of each row the log-probability of its target (B,), and the ids and probabilities of its best fillings (B, K)."""
    outputs = model(params, Inputs(rows.ids, rows.positions, rows.segments))
    state_BD = jnp.take_along_axis(outputs.states, rows.where[:, None, None], axis=1)[:, 0]
    logits_BV = model.logits(params, state_BD[:, None], outputs.output)[:, 0]
    log_probs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    right_B = jnp.take_along_axis(log_probs_BV, rows.targets[:, None], axis=-1)[:, 0]
    best_BK, ids_BK = jax.lax.top_k(jnp.where(allowed_V, log_probs_BV, -jnp.inf), top)
    return right_B, ids_BK, jnp.exp(best_BK)


def _masked(cloze: Cloze, place: int, tokenizer: Tokenizer, longest: int) -> tuple[list[int], int, int]:
    """(ids with CLS, SEP and one mask, where it stands, what stood there) for a place of a text."""
    specials, room = tokenizer.specials, longest - 2
    first = max(0, min(place - room // 2, len(cloze.ids) - room))
    ids = [specials["cls"], *cloze.ids[first : first + room], specials["sep"]]
    where = place - first + 1
    target, ids[where] = ids[where], specials["mask"]
    return ids, where, target


def _padded(masked: Sequence[tuple[list[int], int, int]], batch_size: int, length: int) -> _Rows:
    ids, segments = np.zeros((batch_size, length), np.int32), np.zeros((batch_size, length), np.int32)
    where, targets = np.zeros(batch_size, np.int32), np.zeros(batch_size, np.int32)
    for row, (sequence, place, target) in enumerate(masked):
        ids[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
        where[row], targets[row] = place, target
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return _Rows(ids, np.ascontiguousarray(positions), segments, where, targets)
