"""Perplexity of the tokens of evaluation batches, and notes on comparing it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxlm.text import Tokenizer
from jaxlm.training.step import EvalStep


def perplexity(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[Any],
    *,
    words: int,
    bytes: int,
    carry: Any = None,
) -> dict[str, float]:
    """Return metrics of the predictions of the tokens of `batches`, independent of batching and padding.

    eval_step: (params, batch, carry) -> {"nll": (sum, weight), "accuracy": (sum, weight)}, carry. batches: on the
    devices, every token once. words, bytes: of the text of the tokens. carry: before the first batch.
    Returns validation_loss (nats per token), perplexity (its exponential), word_perplexity (the exponential of nats per
    word), bits_per_byte, accuracy (fraction of tokens with the highest score), tokens. Tokens that end documents are
    predicted and count like others. A mean over nothing is nan; a value above the range of a float is inf.
    """
    return figures_of(totals(eval_step, params, batches, carry), words=words, bytes=bytes)


def figures_of(sums: Mapping[str, tuple[float, float]], *, words: int, bytes: int) -> dict[str, float]:
    """Return the metrics of `perplexity` for its sums and weights over all batches."""
    sums = {"nll": (0.0, 0.0), "accuracy": (0.0, 0.0), **sums}
    nll, tokens = sums["nll"]
    return {
        "validation_loss": divide(nll, tokens),
        "perplexity": _exp(divide(nll, tokens)),
        "word_perplexity": _exp(divide(nll, words)),
        "bits_per_byte": divide(nll, bytes * math.log(2)),
        "accuracy": divide(*sums["accuracy"]),
        "tokens": int(tokens),
    }


def text_notes(tokenizer: Tokenizer) -> list[str]:
    """Return notes on comparing metrics per word or per byte."""
    if not tokenizer.lost:
        return []
    return [
        f"metrics per word and per byte count the text without what this {tokenizer.kind} vocabulary drops "
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
