"""Tags of sentences: entities by the definition of CoNLL's `conlleval`, their F1, and the tags that a model predicts.

An entity begins at B-, at I- after O or at the start of a sentence, and at I- where the type changes; the end of a
sentence ends it. By this reading the original IOB1 tags (B- only between neighbours of one type) and BIO (IOB2) are
equivalent. A tag is split at its first `-`: `I-creative-work` is of the type `creative-work`.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxlm.tasks.metrics.classification import intervals, per_class
from jaxlm.tasks.predicted import Predicted
from jaxlm.tasks.task import Task

if TYPE_CHECKING:
    from jaxlm.tasks.token_rows import TaggedSplit


Entity = tuple[str, int, int]  # type, first token, the token after the last
METRICS = ("entity_f1", "entity_precision", "entity_recall", "accuracy")
COUNTS = 5  # numbers of `entity_counts`


def parse_tag(tag: str) -> tuple[str, str]:
    """Return (B, I or O, type). Raise ValueError for a tag of another form."""
    if tag == "O":
        return "O", ""
    mark, dash, kind = tag.partition("-")
    if mark not in ("B", "I") or not dash or not kind:
        raise ValueError(f"a tag must be O, B-TYPE or I-TYPE, got {tag!r}")
    return mark, kind


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence, in order."""
    found: list[Entity] = []
    start, inside = 0, ""
    for position, tag in enumerate((*tags, "O")):
        mark, kind = parse_tag(tag)
        if inside and (mark != "I" or kind != inside):
            found.append((inside, start, position))
            inside = ""
        if mark != "O" and not inside:
            start, inside = position, kind
    return found


def spell(found: Iterable[Entity], count: int, scheme: Literal["bio", "iob1"] = "bio") -> list[str]:
    """Return the tags of a sentence of `count` tokens with these entities, in order; inverse of `entities`."""
    tags, before = ["O"] * count, ("", -1)
    for kind, start, end in found:
        tags[start:end] = [f"I-{kind}"] * (end - start)
        if scheme == "bio" or before == (kind, start):
            tags[start] = f"B-{kind}"
        before = (kind, end)
    return tags


def judged_by(labels: Sequence[str]) -> dict[str, Any]:
    """Return the scheme, metric and metrics for these tags. Tags that do not name entities are token classes.

    Parts of speech, or BIOES with its marks E and S, are token classes; their metric is the token accuracy.
    """
    try:
        entity_types = {parse_tag(label)[1] for label in labels} - {""}
    except ValueError:
        entity_types = set()
    if entity_types:
        return {"scheme": "bio", "metric": METRICS[0], "metrics": METRICS}
    return {"scheme": "none", "metric": "accuracy", "metrics": ("accuracy",)}


def neighbours(labels: Sequence[str]) -> tuple[tuple[tuple[bool, ...], ...], tuple[bool, ...]]:
    """Return whether a BIO tag may follow another, [tag][next], and whether a sentence may begin with it.

    I-TYPE follows B-TYPE and I-TYPE alone.
    """
    tags = [parse_tag(label) for label in labels]
    after = tuple(tuple(mark != "I" or kind == before for mark, kind in tags) for _, before in tags)
    return after, tuple(mark != "I" for mark, _ in tags)


def scheme_of(sentences: Iterable[Sequence[str]]) -> Literal["bio", "iob1"]:
    """Return the scheme by which most entities that do not follow another one are marked at their beginning."""
    beginnings = {"B": 0, "I": 0}
    for tags in sentences:
        for before, tag in zip(("O", *tags), tags, strict=False):
            if before == "O" and tag != "O":
                beginnings[tag[0]] += 1
    return "iob1" if beginnings["I"] > beginnings["B"] else "bio"


def entity_metrics(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `entity_f1`, `entity_precision` and `entity_recall` (exact span and type, over all sentences together)
    and `accuracy`, the fraction of tokens with the correct tag."""
    counts = [entity_counts(*pair) for pair in zip(truth, predicted, strict=True)]
    return metrics_of_counts([sum(column) for column in zip(*counts, strict=True)] or [0] * COUNTS)


def metrics_of_counts(counts: Iterable[int]) -> dict[str, float]:
    """Return `entity_metrics` from the sums of `entity_counts` over sentences."""
    correct, of_truth, of_predicted, same, tokens = counts
    precision, recall, f1 = entity_scores(correct, of_truth, of_predicted)
    accuracy = same / tokens if tokens else 0.0
    return {"entity_f1": f1, "entity_precision": precision, "entity_recall": recall, "accuracy": accuracy}


def entity_counts(true_tags: Sequence[str], tags: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Return the numbers of one sentence: correct, given and predicted entities, correct tags, and tokens."""
    if len(true_tags) != len(tags):
        raise ValueError(f"a sentence of {len(true_tags)} tokens must have as many tags, got {len(tags)}")
    true_entities, found = set(entities(true_tags)), set(entities(tags))
    expected = spell(sorted(true_entities, key=itemgetter(1)), len(tags))
    given = spell(sorted(found, key=itemgetter(1)), len(tags))
    same = sum(one == other for one, other in zip(expected, given, strict=True))
    return len(true_entities & found), len(true_entities), len(found), same, len(tags)


def entity_scores(correct: int, of_truth: int, of_predicted: int) -> tuple[float, float, float]:
    """Return (precision, recall, F1) from numbers of entities, 0 where undefined."""
    precision = correct / of_predicted if of_predicted else 0.0
    recall = correct / of_truth if of_truth else 0.0
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    return precision, recall, f1


def token_accuracy(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `accuracy`, the fraction of tokens with the correct tag, for tags that are token classes."""
    pairs = [pair for tags, found in zip(truth, predicted, strict=True) for pair in zip(tags, found, strict=True)]
    return {"accuracy": sum(tag == found for tag, found in pairs) / len(pairs) if pairs else 0.0}


def predict_tags(
    task: Task, encoded: "TaggedSplit", outputs: Sequence[np.ndarray] | np.ndarray, threshold: float | None
) -> Predicted:
    """Return a tag for each word, and the metrics. See `predictions`; tags have no threshold.

    Scores are `probabilities`, that of each word's tag; None for words that the model did not see.
    """
    lines: list[tuple[Any, dict[str, Any]]] = []
    predicted: list[list[str]] = []
    for row, example in enumerate(encoded.examples):
        low, high = encoded.own[row]
        begin = len(encoded.before) + low - encoded.read[row, 0]
        words = encoded.words[low:high]
        scores = np.asarray(outputs[row], np.float64)[begin : begin + high - low][words >= 0]
        distributions = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        distributions /= distributions.sum(axis=1, keepdims=True)
        unseen = "O" if task.scheme != "none" else ""
        tags = [unseen] * len(example.tokens)
        probabilities: list[float | None] = [None] * len(example.tokens)
        for word, distribution in zip(words[words >= 0], distributions, strict=True):
            tags[word] = task.labels[int(distribution.argmax())]
            probabilities[word] = float(distribution.max())
        predicted.append(tags)
        spelt = spell(entities(tags), len(tags), "iob1") if task.scheme == "iob1" else tags
        lines.append((spelt, {"probabilities": probabilities}))
    if not encoded.labelled:
        return Predicted(lines)
    truth = [example.tags or () for example in encoded.examples]
    if task.scheme == "none":
        return Predicted(lines, token_accuracy(truth, predicted), report=lambda: token_report(task, truth, predicted))
    return Predicted(lines, entity_metrics(truth, predicted), report=lambda: entity_report(truth, predicted))


def entity_report(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return precision, recall and F1 for each type of entity, as CoNLL's `conlleval`, and intervals over sentences.

    support: number of given entities. predicted: number of predicted ones.
    """
    given = [entities(tags) for tags in truth]
    found = [entities(tags) for tags in predicted]
    types = {}
    for kind in sorted({entity[0] for sentence in (*given, *found) for entity in sentence}):
        wanted = [{entity for entity in sentence if entity[0] == kind} for sentence in given]
        got = [{entity for entity in sentence if entity[0] == kind} for sentence in found]
        correct = sum(len(one & other) for one, other in zip(wanted, got, strict=True))
        support, count = sum(map(len, wanted)), sum(map(len, got))
        precision, recall, f1 = entity_scores(correct, support, count)
        types[kind] = {"precision": precision, "recall": recall, "f1": f1, "support": support, "predicted": count}
    counts = np.array([entity_counts(*pair) for pair in zip(truth, predicted, strict=True)]).reshape(-1, COUNTS)

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        return metrics_of_counts(counts[rows].sum(axis=0).tolist())

    return {"examples": len(truth), "types": types, "intervals": intervals(len(truth), metrics_of)}


def token_report(task: Task, truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return precision, recall and F1 for each tag, for tags that are token classes, and intervals over sentences."""
    names = sorted({*task.labels, *(tag for tags in (*truth, *predicted) for tag in tags)})
    numbers = {name: number for number, name in enumerate(names)}
    given, found = (np.array([numbers[tag] for tags in side for tag in tags], int) for side in (truth, predicted))
    tokens = np.array([len(tags) for tags in truth])
    correct = np.array([sum(map(str.__eq__, *pair)) for pair in zip(truth, predicted, strict=True)])

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        return {"accuracy": float(correct[rows].sum() / max(1, tokens[rows].sum()))}

    return {
        "examples": len(truth),
        "classes": per_class(names, given, found),
        "intervals": intervals(len(truth), metrics_of),
    }
