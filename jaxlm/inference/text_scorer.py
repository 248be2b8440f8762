"""Scores of texts under a run's language model, and fillings of their masks, for decoders and encoders alike."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.masked_lm_scoring import (
    MASK,
    MaskedLMScore,
    MaskedText,
    candidates_json,
    check_masked_lm,
    masked_lm_scores,
    masked_text,
)
from jaxlm.inference.prediction import default_batch_size
from jaxlm.inference.scoring import Scored, Scorer, text_sequence
from jaxlm.text.tokenizer import require_forward


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
