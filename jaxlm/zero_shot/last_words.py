"""The last word of a passage: LAMBADA.

Paperno et al., 2016: people guess the word from the passage, but not from its last sentence. Two protocols are in use.
`paper`: GPT-2's figures (Radford et al., 2019, section 3.3) rest on the last token of the passage alone. `harness`: all
tokens of the last word, which starts at the last blank; a word counts as one unit of the perplexity, and is right if
each of its tokens is the likeliest one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.zero_shot.task import HARNESS, PAPER, Measured, Text, ZeroShotTask, accuracy, json_objects, perplexity

UNITS = {PAPER: "last token", HARNESS: "last word, all of its tokens"}


def measure(model, path: Path, protocols: Sequence[str], options) -> Iterator[Measured]:
    """Yield the accuracy and the perplexity of each protocol."""
    texts = [passage(where, row["text"]) for where, row in json_objects(path, ["text"])]
    words = [scores for (scores,) in model.scores(texts, begin=False)]
    filters = {"filters": f"predictions without the stop words of {options.stop_words}"} if options.stop_words else {}
    for protocol in protocols:
        last = slice(-1, None) if protocol == PAPER else slice(None)
        how = {"unit": UNITS[protocol], **filters}
        right = [bool(scores.greedy[last].all()) for scores in words]
        losses = [-scores.log_probs[last].sum(dtype="float64") for scores in words]
        for metric, (value, stderr) in (("accuracy", accuracy(right)), ("perplexity", perplexity(losses))):
            yield Measured(protocol, metric, value, stderr, len(texts), len(words), how)


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
    protocols=(PAPER, HARNESS),
)
