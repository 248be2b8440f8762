"""The last word of a passage: LAMBADA.

Paperno et al., 2016: people guess the word from the passage, but not from its last sentence. GPT-2's figures (Radford
et al., 2019, section 3.3) rest on the last token of the passage alone. lm-evaluation-harness takes all tokens of the
last word, which starts at the last blank.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxlm.errors import InputError
from jaxlm.zero_shot.task import (
    Measured,
    Text,
    ZeroShotTask,
    accuracy,
    json_rows,
    perplexity,
    sampled,
    scored_rows,
    shortened,
)


def measure(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracy and the perplexity of the last token."""
    texts = [passage(where, row["text"]) for where, row in json_rows(path, ["text"])]
    rows = scored_rows(model, [[text] for text in sampled(texts, options.sample)])
    words = [word for row in rows for word in row.scores[0].parts]
    filters = {"filters": f"predictions without the stop words of {options.stop_words}"} if options.stop_words else {}
    right = [bool(word.greedy[-1]) for word in words]
    losses = [-float(word.log_probs[-1]) for word in words]
    how = {"unit": "last token", **filters, **shortened(rows)}
    yield Measured("accuracy", *accuracy(right), len(texts), len(rows), how, rows, right)
    yield Measured("perplexity", *perplexity(losses), len(texts), len(rows), how, rows, np.exp(losses))


def passage(where: str, text: str) -> Text:
    """Return a passage as its context and its last word, which begins with the last blank."""
    context, blank, word = text.rstrip().rpartition(" ")
    if not context.strip():
        raise InputError(f"{where} must have a word after a context, got {text!r}; fix or remove the row")
    return Text((context, blank + word), 1, where)


LAMBADA = ZeroShotTask(
    "lambada",
    "the last word of a passage (JSONL with `text`)",
    measure,
    options=("sample", "stop_words"),
    harness="lambada_openai",
)
