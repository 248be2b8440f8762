"""The referent of a pronoun: the Winograd Schema Challenge and Definite Pronoun Resolution.

Each candidate replaces the pronoun. `full` compares the whole sentences, `partial` the text after the substitution
given the text before it, which does not favour the more frequent name (Trinh and Le, 2018).
`wsc273`: sums over tokens. `dpr` (Rahman and Ng, 2012): means over tokens,
as GPT-1 does with partial scoring (Radford et al., 2018, section 5).

A file has blocks of four lines: sentence, pronoun, candidates with commas between them, correct candidate. Blank lines
separate the blocks. The sentence has `[MASK]` in place of the pronoun, or the pronoun itself; where a pronoun occurs
more than once, it is the first one after the candidates.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.zero_shot.task import (
    Measured,
    ScoredText,
    Text,
    ZeroShotTask,
    accuracy,
    best,
    sampled,
    scored_rows,
    shortened,
)

MASK = "[MASK]"
# As lm_eval/tasks/wsc273/utils.py does: `his` is replaced by `Bob's`, and `The` becomes `the` inside a sentence.
POSSESSIVE = {"my", "his", "her", "our", "their"}
LOWERED = {"A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their"}


class Schema(NamedTuple):
    """A sentence around a pronoun, its two candidates, and the index of the correct one. recurs: the pronoun occurs
    more than once."""

    where: str
    before: str
    pronoun: str
    after: str
    candidates: tuple[str, ...]
    right: int
    recurs: bool

    def texts(self) -> list[Text]:
        """Return the sentence with each candidate: the parts before, the candidate, and after."""
        space = " " if self.before else ""
        return [
            Text((self.before, space + self._substitute(one), self.after), 0, self.where) for one in self.candidates
        ]

    def _substitute(self, candidate: str) -> str:
        if self.pronoun.lower() in POSSESSIVE:
            candidate += "'s"
        first, *rest = candidate.split(" ")
        begins_sentence = not self.before or self.before.endswith((".", "!", "?"))
        return " ".join([first.lower() if first in LOWERED and not begins_sentence else first, *rest])


def measure(model, path: Path, options, *, by: Callable[[ScoredText], float], unit: str) -> Iterator[Measured]:
    """Yield the accuracies of full and of partial scoring."""
    found = list(read_schemas(path))
    schemas = sampled(found, options.sample)
    rows = scored_rows(model, [schema.texts() for schema in schemas])
    several = sum(schema.recurs for schema in schemas)
    how = {"unit": unit, **shortened(rows)} | ({"pronoun_recurs": several} if several else {})
    for name, first in {"full": 0, "partial": 2}.items():
        right = [
            best([by(one.since(first)) for one in row.scores]) == schema.right
            for row, schema in zip(rows, schemas, strict=True)
        ]
        yield Measured(f"accuracy_{name}", *accuracy(right), len(found), len(rows), how, rows, right)


def read_schemas(path: Path) -> Iterator[Schema]:
    """Yield the schemas of a file. InputError for a block that is not one."""
    block: list[tuple[int, str]] = []
    found = 0
    for number, line in [*Lines(path), (0, "")]:
        if line.strip():
            block.append((number, " ".join(line.split())))
        elif block:
            yield _schema(f"{path} line {block[0][0]}", [text for _, text in block])
            block, found = [], found + 1
    if not found:
        raise InputError(f"{path} must have schemas, got none; give another file")


def _schema(where: str, lines: Sequence[str]) -> Schema:
    if len(lines) != 4:
        raise InputError(
            f"{where} must have four lines (sentence, pronoun, candidates, answer), got {len(lines)}; fix or remove it"
        )
    sentence, pronoun, listed, answer = lines
    candidates = tuple(candidate.strip() for candidate in listed.split(","))
    if answer not in candidates or len(set(candidates)) < 2:
        raise InputError(f"{where}: the answer must be one of {listed!r}, got {answer!r}; fix or remove it")
    places = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(pronoun)}(?!\w)", sentence)]
    if not places:
        raise InputError(f"{where}: the sentence must have the pronoun {pronoun!r}, got {sentence!r}; fix or remove it")
    named = max(sentence.lower().find(candidate.lower()) for candidate in candidates)
    start, end = next((place for place in places if place[0] > named), places[-1])
    after = re.sub(r"^ (?=[.,;:!?'])", "", sentence[end:])
    return Schema(
        where, sentence[:start].strip(), pronoun, after, candidates, candidates.index(answer), len(places) > 1
    )


WSC273 = ZeroShotTask(
    "wsc273",
    "the referent of a pronoun (blocks of sentence, pronoun, candidates, answer)",
    partial(measure, by=lambda text: text.sum, unit="sum over tokens"),
    harness="wsc273",
)
DPR = ZeroShotTask(
    "dpr", "the referent of a pronoun (as wsc273)", partial(measure, by=lambda text: text.mean, unit="mean over tokens")
)
