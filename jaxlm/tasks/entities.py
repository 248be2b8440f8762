"""Entities in tags, by the definition of CoNLL's `conlleval`: where they begin and end, and the F1 over them.

An entity begins at B-, at I- after O or at the start of a sentence, and at I- where the type changes; the end of a
sentence ends it. So read, the original IOB1 tags (B- only between neighbours of one type) and BIO (IOB2) are alike. A
tag is split at its first `-`: `I-creative-work` is of the type `creative-work`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

Entity = tuple[str, int, int]  # type, first token, the token after the last
Scheme = Literal["bio", "iob1", "none"]
METRICS = ("entity_f1", "entity_precision", "entity_recall", "accuracy")


def parse_tag(tag: str) -> tuple[str, str]:
    """(B, I or O, type). ValueError says what is wrong."""
    if tag == "O":
        return "O", ""
    mark, dash, kind = tag.partition("-")
    if mark not in ("B", "I") or not dash or not kind:
        raise ValueError(f"the tag {tag!r} is none of O, B-TYPE and I-TYPE")
    return mark, kind


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, in order."""
    found: list[Entity] = []
    start, inside = 0, ""
    for place, tag in enumerate((*tags, "O")):
        mark, kind = parse_tag(tag)
        if inside and (mark != "I" or kind != inside):
            found.append((inside, start, place))
            inside = ""
        if mark != "O" and not inside:
            start, inside = place, kind
    return found


def spell(found: Iterable[Entity], count: int, scheme: Literal["bio", "iob1"] = "bio") -> list[str]:
    """The tags of a sentence of `count` tokens with these entities, in order; undoes `entities`."""
    tags, before = ["O"] * count, ("", -1)
    for kind, start, end in found:
        tags[start:end] = [f"I-{kind}"] * (end - start)
        if scheme == "bio" or before == (kind, start):
            tags[start] = f"B-{kind}"
        before = (kind, end)
    return tags


def judged_by(labels: Sequence[str]) -> dict[str, Any]:
    """Return the scheme, metric and metrics of a task with these tags: classes of tokens where they name no entities.

    Parts of speech, or BIOES with its marks E and S, are such classes; their metric is the token accuracy.
    """
    try:
        entity_types = {parse_tag(label)[1] for label in labels} - {""}
    except ValueError:
        entity_types = set()
    if entity_types:
        return {"scheme": "bio", "metric": METRICS[0], "metrics": METRICS}
    return {"scheme": "none", "metric": "accuracy", "metrics": ("accuracy",)}


def scheme_of(sentences: Iterable[Sequence[str]]) -> Literal["bio", "iob1"]:
    """How the beginnings of entities that follow none are marked: by the mark that most of them have."""
    beginnings = {"B": 0, "I": 0}
    for tags in sentences:
        for before, tag in zip(("O", *tags), tags, strict=False):
            if before == "O" and tag != "O":
                beginnings[tag[0]] += 1
    return "iob1" if beginnings["I"] > beginnings["B"] else "bio"


def entity_figures(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """`entity_f1`, with `entity_precision` and `entity_recall`: exact span and type, over all sentences together; and
    `accuracy`, the share of tokens whose tag is right."""
    right = of_truth = of_predicted = same = tokens = 0
    for true_tags, tags in zip(truth, predicted, strict=True):
        if len(true_tags) != len(tags):
            raise ValueError(f"{len(tags)} tags for {len(true_tags)} tokens")
        true_entities, found = set(entities(true_tags)), set(entities(tags))
        right += len(true_entities & found)
        of_truth, of_predicted = of_truth + len(true_entities), of_predicted + len(found)
        wanted = spell(sorted(true_entities, key=lambda entity: entity[1]), len(tags))
        given = spell(sorted(found, key=lambda entity: entity[1]), len(tags))
        same += sum(one == other for one, other in zip(wanted, given, strict=True))
        tokens += len(tags)
    precision = right / of_predicted if of_predicted else 0.0
    recall = right / of_truth if of_truth else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    accuracy = same / tokens if tokens else 0.0
    return {"entity_f1": f1, "entity_precision": precision, "entity_recall": recall, "accuracy": accuracy}


def token_accuracy(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `accuracy`, the fraction of tokens whose tag is right, for tags that are classes of tokens."""
    pairs = [pair for tags, found in zip(truth, predicted, strict=True) for pair in zip(tags, found, strict=True)]
    return {"accuracy": sum(tag == found for tag, found in pairs) / len(pairs) if pairs else 0.0}
