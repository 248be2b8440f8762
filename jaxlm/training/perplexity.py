"""Perplexity of the tokens of evaluation batches, and notes on comparing it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlm.data.store import Store
from jaxlm.text import Tokenizer
from jaxlm.training.step import EvalStep


def perplexity(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[Any],
    *,
    words: int,
    bytes: int,
    characters: int | None = None,
    carry: Any = None,
) -> dict[str, float]:
    """Return metrics of the predictions of the tokens of `batches`, independent of batching and padding.

    eval_step: (params, batch, carry) -> {"nll": (sum, weight), "accuracy": (sum, weight)}, carry. batches: on the
    devices, every token once. words, bytes, characters: of the original text of the tokens; characters are Unicode code
    points, None if they were not counted. carry: before the first batch.
    Returns validation_loss (nats per token), perplexity (its exponential), word_perplexity (the exponential of nats per
    word), bits_per_byte, bits_per_character where characters were counted, accuracy (fraction of tokens with the
    highest score), tokens. Tokens that end documents are predicted and count like others. A mean over nothing is nan; a
    value above the range of a float is inf.
    """
    sums = totals(eval_step, params, batches, carry)
    return figures_of(sums, words=words, bytes=bytes, characters=characters)


def figures_of(
    sums: Mapping[str, tuple[float, float]], *, words: int, bytes: int, characters: int | None = None
) -> dict[str, float]:
    """Return the metrics of `perplexity` for its sums and weights over all batches."""
    sums = {"nll": (0.0, 0.0), "accuracy": (0.0, 0.0), **sums}
    nll, tokens = sums["nll"]
    per_character = {} if characters is None else {"bits_per_character": divide(nll, characters * math.log(2))}
    return {
        "validation_loss": divide(nll, tokens),
        "perplexity": _exp(divide(nll, tokens)),
        "word_perplexity": _exp(divide(nll, words)),
        "bits_per_byte": divide(nll, bytes * math.log(2)),
        **per_character,
        "accuracy": divide(*sums["accuracy"]),
        "tokens": int(tokens),
    }


def text_sizes(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the words, bytes and characters of the original text of stores, as arguments of `perplexity`."""
    counts = [store.characters for store in stores]
    characters = None if None in counts else sum(count or 0 for count in counts)
    words, size = sum(store.words for store in stores), sum(store.bytes for store in stores)
    return {"words": words, "bytes": size, "characters": characters}


def text_notes(tokenizer: Tokenizer) -> list[str]:
    """Return notes on comparing metrics per word or per byte."""
    if not tokenizer.lost:
        return []
    return [
        "metrics per word and per byte count the text without what this vocabulary drops "
        f"({tokenizer.lost}): they do not compare with those of a tokenizer that keeps the text"
    ]


def totals(
    eval_step: EvalStep, params: Any, batches: Iterable[Any], carry: Any = None
) -> dict[str, tuple[float, float]]:
    """Return name -> (sum, weight) over all batches, each batch with the carry of the one before."""
    found: dict[str, tuple[float, float]] = {}

    def add(sums: dict[str, tuple[Any, Any]]) -> None:
        for name, (total, weight) in sums.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + float(total), before[1] + float(weight)

    late = None
    for batch in batches:
        sums, carry = eval_step(params, batch, carry)
        if late is not None:  # fetched one batch late, so that the devices never wait
            add(late)
        late = sums
    if late is not None:
        add(late)
    return found


def divide(total: float, weight: float) -> float:
    """Return the quotient, or nan for a weight of 0."""
    return total / weight if weight else math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # words of several hundred nats, in a script without blanks between words
        return math.inf
