"""Scores of texts under a decoder or an encoder, and the best candidates for the masked tokens of an encoder.

A decoder's scores are those of `jaxlm.inference.scoring`. An encoder's are pseudo-log-likelihoods (Salazar, Liang,
Nguyen and Kirchhoff, "Masked Language Model Scoring", 2020): each token is masked in turn and scored given all others,
and the sum over tokens scores a sentence. Sums of sentences of different lengths are not comparable, nor are sums with
log-probabilities of a decoder. Several masks of one text are filled independently.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.config import check_batch
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.rows import BATCHES_SORTED, RowStep, batch_length, default_batch_size, padded, row_positions, run
from jaxlm.inference.scoring import Score, Scored, Scorer, TokenScores, text_sequence
from jaxlm.models.model import Inputs, Model
from jaxlm.text import Tokenizer
from jaxlm.text.tokenizer import require_forward

_STEPS = 64  # compiled functions that are kept for further calls
MASK = "[MASK]"  # the spelling of a mask in texts, for any vocabulary
Candidate = tuple[int, float]  # id and probability


class MaskedText(NamedTuple):
    """A text without CLS and SEP, and the indices of the tokens that are masked, one at a time.

    has_masks: the text has masks at these indices; otherwise they are the text's own tokens, which are scored.
    """

    ids: Sequence[int]
    where: Sequence[int]
    has_masks: bool = False


class MaskedLMScore(NamedTuple):
    """The log-probabilities of a text's tokens, whose sum is its pseudo-log-likelihood; or for a text with masks the
    best candidates for each.
    """

    tokens: TokenScores
    candidates: list[list[Candidate]]

    @property
    def score(self) -> Score:
        """The pseudo-log-likelihood."""
        return self.tokens.score


class _Batch(NamedTuple):
    """inputs: of the model, (B, L). where, targets: int32 (B,), the masked index and its original id."""

    inputs: Inputs
    where: Any
    targets: Any


def masked_text(tokenizer: Tokenizer, text: str, *, context: str = "", separator: str = " ") -> MaskedText:
    """Encode `text` to be scored given `context`, or to be filled if it has `[MASK]`."""
    before = tokenizer.encode(context) if context else []
    if MASK not in text:
        ids = tokenizer.encode(separator + text if context else text)
        return MaskedText([*before, *ids], range(len(before), len(before) + len(ids)))
    ids, where = list(before), []
    for number, part in enumerate(text.split(MASK)):
        if number:
            where.append(len(ids))
            ids.append(tokenizer.specials["mask"])
        ids += tokenizer.encode(part)
    return MaskedText(ids, where, has_masks=True)


def check_masked_lm(model: Model, params: Any, tokenizer: Tokenizer, name: str) -> Model:
    """Return the model. InputError if it cannot fill masks: it is causal, or the head or a special token is missing."""
    if model.is_causal:
        raise InputError(f"{name} must have an encoder trained to fill masks, got a causal one; give another run")
    if not model.output_layer.available(params):
        raise InputError(
            f"{name} has no masked language model's head, which fine-tuning does not keep and some published weights "
            "lack; give the run that it started from, or other weights"
        )
    if missing := [role for role in ("cls", "sep", "mask") if role not in tokenizer.specials]:
        raise InputError(
            f"{name} must have a tokenizer with a {missing[0].upper()} token to mask tokens; give another run"
        )
    return model


def masked_lm_scores(
    model: Model,
    params: Any,
    texts: Iterable[MaskedText],
    tokenizer: Tokenizer,
    *,
    mesh: Mesh,
    batch_size: int,
    top: int = 5,
    positions: int | None = None,
    within_word: bool = False,
) -> Iterator[MaskedLMScore]:
    """Yield the score of each text, in order, for any number of them, a block at a time.

    positions: the number of positions to use; default: all. A token of a longer text is scored given as many of its
    neighbours as fit. within_word: mask the following tokens of a scored token's word too (Kauf and Ivanova, "A Better
    Way to Do Masked Language Model Scoring", 2023): given its later tokens, the first token of a rare word is easy.
    top: the number of candidates for each mask, without special tokens and rows beyond the tokenizer's size; their
    probabilities are those over the whole vocabulary. Memory is linear in the tokens of a block of texts. Neither the
    other texts nor the batch size change a score beyond rounding. Every process must call this with the same texts.
    """
    check_batch(batch_size, 1, mesh)
    allowed_V = np.ones(model.config.vocab_size, np.bool_)
    allowed_V[sorted(set(tokenizer.specials.values()))] = False
    allowed_V[tokenizer.size :] = False  # rows that pad a published table
    step = _step(model, min(top, int(allowed_V.sum())), mesh)
    longest, continues = positions or model.max_length, tokenizer.continues if within_word else None

    def length_of(row: tuple[MaskedText, int]) -> int:
        return min(len(row[0].ids) + 2, longest)  # with CLS and SEP

    def pad(lines: Sequence[Sequence[tuple[MaskedText, int]]], batch_size: int, length: int) -> _Batch:
        return _padded([_masked(*row, tokenizer, longest, continues) for (row,) in lines], batch_size, length)

    form = RowStep(
        lambda params, batch: step(params, allowed_V, batch),
        rows=lambda text: ((text, index) for index in text.where),
        length=length_of,
        sizes=lambda lines: (batch_length(length_of(lines[0][0]), longest),),
        flops=lambda length: length * model.forward_flops_per_token(length, 1 / length),
        pad=pad,
        unpad=lambda line, outputs, length: [outputs if line[0][0].has_masks else outputs[:2]],
    )
    for text, found in run(form, params, texts, mesh=mesh, batch_size=batch_size, block=BATCHES_SORTED):
        yield _filled(found) if text.has_masks else _scored(found)


def candidates_json(tokenizer: Tokenizer, candidates: list[list[Candidate]]) -> list[list[dict[str, Any]]]:
    """Return the candidates for each mask as JSON values: {"piece", "probability"}, the best first."""
    return [[{"piece": tokenizer.pieces([i])[0], "probability": p} for i, p in listed] for listed in candidates]


def candidates_text(text: str, named: list[list[dict[str, Any]]]) -> str:
    """Return the text, and a line of candidates for each mask."""
    shown = ["  " + "  ".join(f"{one['piece']} {one['probability']:.4f}" for one in listed) for listed in named]
    return "\n".join([text, *shown])


class TextScorer(NamedTuple):
    """encode: (text, context, separator) -> an encoded text. score: encoded texts -> their scores, in order.

    given: the tokens that each token's probability depends on, for messages.
    """

    encode: Callable[[str, str, str], Scored | MaskedText]
    score: Callable[[Iterable[Any]], Iterator[MaskedLMScore]]
    given: str


def text_scorer(run: LoadedRun, *, batch_size: int, positions: int, top: int = 5) -> TextScorer:
    """Return the scorer of a run's texts: log-probabilities, or an encoder's pseudo-log-likelihoods.

    positions: the number of positions to use. top: candidates for each mask. InputError if the model cannot score.
    """
    require_forward(run.tokenizer, "evaluate score")
    settings: dict[str, Any] = {"mesh": run.mesh, "batch_size": batch_size, "positions": positions}
    if run.model.family.is_encoder:
        encoder = check_masked_lm(run.model, run.params, run.tokenizer, run.name)
        return TextScorer(
            lambda text, context, separator: masked_text(run.tokenizer, text, context=context, separator=separator),
            lambda texts: masked_lm_scores(encoder, run.params, texts, run.tokenizer, top=top, **settings),
            "all other tokens of their sentence",
        )
    run.require_decoder("evaluate score", "give a decoder or a BERT")
    left, scorer = run.prefix_ids, Scorer(run.model, **settings)

    def score(sequences: Iterable[Scored]) -> Iterator[MaskedLMScore]:
        return (MaskedLMScore(tokens, []) for tokens in scorer.tokens(run.params, sequences))

    return TextScorer(
        lambda text, context, separator: text_sequence(
            run.tokenizer, text, left=left, context=context, separator=separator
        ),
        score,
        run.tokenizer.pieces(left)[0] if left else "their first token",
    )


def masked_texts(run: LoadedRun, texts: Sequence[str]) -> list[MaskedText]:
    """Return texts with [MASK] as ids, for `fill_masks`.

    InputError if a text has none, or if the model is not an encoder that fills masks.
    """
    check_masked_lm(run.model, run.params, run.tokenizer, run.name)
    masked = [masked_text(run.tokenizer, text) for text in texts]
    if not all(text.has_masks for text in masked):
        raise InputError(f"{run.path} is {run.model.family.title}, which fills blanks: put {MASK} into the prompt")
    return masked


def fill_masks(run: LoadedRun, masked: MaskedText, *, top: int, positions: int) -> list[list[dict[str, Any]]]:
    """Return the `top` candidates for each mask of a text as JSON values, see `candidates_json`."""
    settings: dict[str, Any] = {"top": top, "positions": positions, "mesh": run.mesh}
    size = default_batch_size(len(masked.where), run.mesh)
    (answer,) = masked_lm_scores(run.model, run.params, [masked], run.tokenizer, batch_size=size, **settings)
    return candidates_json(run.tokenizer, answer.candidates)


@functools.lru_cache(_STEPS)
def _step(model: Model, top: int, mesh: Mesh) -> Any:
    return jax.jit(functools.partial(_score, model, top), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _score(model: Model, top: int, params: Any, allowed_V: jax.Array, batch: _Batch) -> tuple[jax.Array, ...]:
    """Return each row's log-probability of its target (B,), True where it is the likeliest id (B,), and the ids and
    probabilities of candidates (B, K).
    """
    outputs = model(params, batch.inputs)
    state_BD = jnp.take_along_axis(outputs.states, batch.where[:, None, None], axis=1)[:, 0]
    logits_BV = model.logits(params, state_BD[:, None], outputs.output)[:, 0]
    log_probs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    right_B = jnp.take_along_axis(log_probs_BV, batch.targets[:, None], axis=-1)[:, 0]
    best_BK, ids_BK = jax.lax.top_k(jnp.where(allowed_V, log_probs_BV, -jnp.inf), top)
    return right_B, right_B == jnp.max(log_probs_BV, axis=-1), ids_BK, jnp.exp(best_BK)


def _masked(
    text: MaskedText, index: int, tokenizer: Tokenizer, longest: int, continues: np.ndarray | None
) -> tuple[list[int], int, int]:
    """Return (ids with CLS, SEP and masks, the index of the scored one, its original id) for an index of a text.

    continues: bool (ids of the tokenizer,), the tokens that continue a word; those after the scored one are masked too.
    """
    specials, room = tokenizer.specials, longest - 2
    first = max(0, min(index - room // 2, len(text.ids) - room))
    ids = [specials["cls"], *text.ids[first : first + room], specials["sep"]]
    where = index - first + 1
    target, ids[where] = ids[where], specials["mask"]
    if continues is not None:
        for later in itertools.takewhile(lambda place: continues[ids[place]], range(where + 1, len(ids) - 1)):
            ids[later] = specials["mask"]
    return ids, where, target


def _padded(masked: Sequence[tuple[list[int], int, int]], batch_size: int, length: int) -> _Batch:
    ids = padded([ids for ids, _, _ in masked], batch_size, length)
    segments = padded([[1] * len(ids) for ids, _, _ in masked], batch_size, length)
    where, targets = padded([[where for _, where, _ in masked], [target for _, _, target in masked]], 2, batch_size)
    return _Batch(Inputs(ids, row_positions(batch_size, length), segments), where, targets)


def _scored(found: Sequence[Any]) -> MaskedLMScore:
    """Return the score of a text from the outputs of `_score` for each of its tokens."""
    log_probs = np.array([log_probability for log_probability, _ in found], np.float32)
    return MaskedLMScore(TokenScores(log_probs, np.array([greedy for _, greedy in found], np.bool_)), [])


def _filled(found: Sequence[Any]) -> MaskedLMScore:
    """Return the candidates for each mask of a text from the outputs of `_score`."""
    listed = [[(int(i), float(p)) for i, p in zip(ids, probs, strict=True)] for _, _, ids, probs in found]
    return MaskedLMScore(TokenScores(np.zeros(0, np.float32), np.zeros(0, np.bool_)), listed)
