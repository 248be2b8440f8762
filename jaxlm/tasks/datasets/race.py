"""RACE (Lai et al. 2017): questions on English texts from school examinations, four options each.

The files are `{train,dev,test}/{middle,high}/N.txt`, each one JSON object with an article and several questions.
Metrics are given for both schools together (by question) and separately. A question may contain a blank `_`: an encoder
reads it with the option in its place, as in common ports; GPT-1 reads article, question, delimiter, option.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError
from jaxlm.reading.rows import json_document
from jaxlm.tasks.builtin import BuiltIn, Catalogue, papers, read_table
from jaxlm.tasks.catalogue import tfds_text
from jaxlm.tasks.examples import Example, Split
from jaxlm.tasks.kinds.texts import Choice
from jaxlm.tasks.task import Columns, Task

SCHOOLS = ("middle", "high")
_NAMES = ("A", "B", "C", "D")


def read_race(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read every question of a split: the directory of its schools, that of one school, a passage, or a file with named
    columns.

    Raises:
      InputError: no school, or a malformed passage, with its file.
    """
    if path.is_file() and not (path.parent.name in SCHOOLS and path.suffix == ".txt"):
        return read_table(path, task, labelled=labelled)
    files = [path] if path.is_file() else [file for school in SCHOOLS for file in sorted((path / school).glob("*.txt"))]
    if path.name in SCHOOLS:
        files = sorted(path.glob("*.txt"))
    examples: list[Example] = []
    for file in files:
        passage = json_document(file, remedy="each file must be one JSON object")
        examples += _questions(passage, file.parent.name, str(file), labelled)
    if not examples:
        raise InputError(
            f"{path} has no {' or '.join(f'{school}/*.txt' for school in SCHOOLS)}; keep the layout of RACE's archive"
        )
    return Split(tuple(examples), len(examples), (), sum(not text for example in examples for text in example.parts))


def _questions(passage: Mapping[str, Any], school: str, where: str, labelled: bool) -> list[Example]:
    try:
        article = tfds_text(passage["article"]).strip()
        questions = [tfds_text(question).strip() for question in passage["questions"]]
        options = [tuple(tfds_text(option).strip() for option in row) for row in passage["options"]]
        given = passage.get("answers")
        answers = [""] * len(questions) if given is None else [tfds_text(answer).strip() for answer in given]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: a passage must have article, questions, options and answers: {error!r}") from None
    if not len(questions) == len(options) == len(answers):
        raise InputError(
            f"{where}: questions, options and answers must be equally many, got {len(questions)}, {len(options)} and "
            f"{len(answers)}; fix the passage"
        )
    for number, (choices, answer) in enumerate(zip(options, answers, strict=True), 1):
        if len(choices) != len(_NAMES):
            raise InputError(f"{where} question {number}: the row must have 4 choices, got {len(choices)}; fix the row")
        if answer not in _NAMES and (answer or labelled):
            raise InputError(f"{where} question {number}: a label must be one of {', '.join(_NAMES)}, got {answer!r}")
    return [
        Example((article, question), choices, answer or None, school)
        for question, choices, answer in zip(questions, options, answers, strict=True)
    ]


def _passage(values: Mapping[str, Any], name: str) -> list[Example]:
    """Convert a TFDS record: a passage, with the school in the data set's name."""
    return _questions(values, name.partition("/")[2], f"tfds {name}", False)


RACE = BuiltIn(
    Choice(
        name="race",
        labels=_NAMES,
        columns=Columns(
            texts=(("article", "context"), ("question",)),
            choices=tuple((f"option{name}",) for name in _NAMES),
            choice_list=("options", "choices"),
            label=("answer", "label"),
        ),
        papers=papers(length=512, batch_size=16),
        num_choices=4,
        second="cloze",
    ),
    {part: (part, f"RACE/{part}", f"{part}.jsonl") for part in ("train", "dev", "test")},
    Catalogue(
        "race",
        splits={part: tuple(f"race/{school}@{part}" for school in SCHOOLS) for part in ("train", "dev", "test")},
        read=_passage,
    ),
    read=read_race,
)
