"""Choices: answers to RACE's questions, and endings of texts in CODAH, SWAG and Story Cloze.

RACE (Lai et al. 2017) has questions on English texts from school examinations, four options each. The files are
`{train,dev,test}/{middle,high}/N.txt`, each one JSON object with an article and several questions. Metrics are given
for both schools together (by question) and separately. A question may contain a blank `_`: an encoder reads it with the
option in its place, as in common ports; GPT-1 reads article, question, delimiter, option.

CODAH (Chen et al. 2019) is a separate data set in the format of SWAG (Zellers et al. 2018); its files have no header:
category (empty in ten rows, and not used), prompt, four endings, and the index of the correct one from 0. Quotes are
plain characters. The others are CSV files with quoting. The beginning of SWAG's second sentence has its own column, and
the endings complete it. The Story Cloze Test (Mostafazadeh et al. 2016) has no labelled training stories of this form:
training uses its validation split, and a fifth of it is held out as dev, as in GPT-1's code (1,497 and 374 of 1,871,
there by its own seed); its correct ending counts from 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError
from jaxlm.reading.rows import json_document
from jaxlm.tasks.builtin import PAPERS, TABLES, BuiltIn, Catalogue, papers, read_table, tfds_text
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


_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_SENTENCES = tuple(f"InputSentence{number}" for number in range(1, 5))

CODAH = BuiltIn(
    Choice(
        name="codah",
        labels=("0", "1", "2", "3"),
        columns=Columns(
            texts=(("prompt", "context", "sentence"),),
            choices=tuple((name, f"choice{number}") for number, name in enumerate(_ENDINGS)),
            choice_list=("choices", "endings"),
            label=("label",),
        ),
        headerless=("category", "prompt", *_ENDINGS, "label"),
        papers=PAPERS,
        num_choices=4,
    ),
    TABLES,
)

# BERT on SWAG: batch 16, 2e-5, three epochs (Devlin et al. 2019, section 4.4). The length is that of common ports.
SWAG = BuiltIn(
    Choice(
        name="swag",
        labels=("0", "1", "2", "3"),
        columns=Columns(
            texts=(("sent1",), ("sent2",)),
            choices=tuple((name,) for name in _ENDINGS),
            choice_list=("endings", "choices"),
            label=("label",),
        ),
        quoting="csv",
        papers=papers(length=80, batch_size=16),
        num_choices=4,
        second="beginning",
    ),
    {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
)


def _story(values: Mapping[str, Any], name: str) -> list[Example]:
    """Convert a TFDS record; its answer is passed through unchanged (1 or 2; -1: unlabelled)."""
    endings = tuple(tfds_text(ending).strip() for ending in values["endings"])
    label = int(values["label"])
    return [Example((tfds_text(values["context"]).strip(),), endings, str(label) if label > 0 else None)]


STORY_CLOZE = BuiltIn(
    Choice(
        name="story_cloze",
        labels=("1", "2"),
        columns=Columns(
            texts=tuple((name,) for name in _SENTENCES),
            whole=("context", "story"),
            choices=(("RandomFifthSentenceQuiz1", "ending1"), ("RandomFifthSentenceQuiz2", "ending2")),
            choice_list=("choices", "endings"),
            label=("AnswerRightEnding", "label"),
        ),
        quoting="csv",
        papers=papers(batch_size=16),
        num_choices=2,
    ),
    {
        "train": ("cloze_test_val__spring2016 - cloze_test_ALL_val.csv", "val.csv"),
        "test": ("cloze_test_test__spring2016 - cloze_test_ALL_test.csv", "test.csv"),
    },
    Catalogue("story_cloze/2016", splits={"train": "validation", "test": "test"}, read=_story),
    held_out_fraction=0.2,
)

CHOICES = (CODAH, SWAG, RACE, STORY_CLOZE)
