"""Texts and rows of ids as a model reads them: with the special tokens of its training, within its length."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.token_outputs import TokenRow
from jaxlm.tasks.batching.bert_inputs import arrange_segments
from jaxlm.tasks.batching.gpt1_inputs import arrange


def token_rows(run: LoadedRun, texts: Sequence[Any], *, longest: int, truncate: bool) -> list[TokenRow]:
    """Return texts with their special tokens, or rows of ids as they are.

    longest: the most tokens of a row. truncate: whether longer rows keep their first tokens; otherwise InputError.
    InputError for a row that is not a text or ids, or that has no tokens.
    """
    if not isinstance(texts, str) and not any(isinstance(text, str) for text in texts):
        return [_given(run, number, ids, longest, truncate) for number, ids in enumerate(texts)]
    check_texts(texts)
    encoded = run.tokenizer.encode_batch(list(texts))
    return [_arranged(run, number, ids, longest, truncate) for number, ids in enumerate(encoded)]


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raise InputError unless `texts` is a list of strings."""
    if isinstance(texts, str):
        raise InputError(f"{name} must be a list of strings, got a string; put it into a list")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"{name}[{number}] must be a string, got {text!r:.80}; fix it")


def _given(run: LoadedRun, number: int, ids: Any, longest: int, truncate: bool) -> TokenRow:
    size, row = run.model.config.vocab_size, np.asarray(ids)
    if row.ndim != 1 or not row.size or row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= size:
        raise InputError(
            f"texts[{number}] must be a text, or ids from 0 to {size - 1}, at least one, got {str(ids):.80}; fix it"
        )
    _check_length(run, number, len(row) > longest, longest, truncate)
    kept = row[:longest].tolist()
    return TokenRow(kept, len(kept))


def arranged(run: LoadedRun, parts: Sequence[list[int]], longest: int) -> tuple[TokenRow, bool]:
    """Return the ids of a text, or of the two texts of a pair, with their special tokens, and whether they were cut.

    A row without tokens is an empty text of a model without a token that begins one.
    """
    form: Any = "single" if len(parts) == 1 else "entailment"
    specials = run.tokenizer.specials
    if run.model.family.input_format == "bert":
        (row,), (second,), cut = arrange_segments(parts, [], form, specials, longest)
        return TokenRow(list(row), int(second)), cut
    if run.task is not None:
        (row,), cut = arrange(parts, [], form, specials, longest, run.task.special_tokens)
    else:
        whole = run.begun([i for ids in parts for i in ids])
        row, cut = whole[:longest], len(whole) > longest
    return TokenRow(row, len(row)), cut


def _arranged(run: LoadedRun, number: int, ids: list[int], longest: int, truncate: bool) -> TokenRow:
    row, cut = arranged(run, [ids], longest)
    if not row.ids:
        raise InputError(f"texts[{number}] must not be empty for {run.name}, as no token begins a text; leave it out")
    _check_length(run, number, cut, longest, truncate)
    return row


def _check_length(run: LoadedRun, number: int, cut: bool, longest: int, truncate: bool) -> None:
    if cut and not truncate:
        raise InputError(
            f"texts[{number}] must have at most {longest} tokens for {run.name}, special ones included; shorten it, or "
            "give truncate=True"
        )
