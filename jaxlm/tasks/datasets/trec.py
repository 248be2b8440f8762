"""TREC's question types (Li and Roth 2002), six coarse classes, one question per line.

There are two copies: `train.txt` and `test.txt`, UTF-8 with the class as a number, and the original `train_5500.label`
and `TREC_10.label`, Latin-1 with `COARSE:fine`. Their classes are the same six in the same order here; TFDS swaps the
numbers of LOC and NUM. Neither has a dev split.
"""

import dataclasses
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.tasks.builtin import PAPERS, BuiltIn, Catalogue, read_table
from jaxlm.tasks.examples import Example, Split
from jaxlm.tasks.kinds.texts import Classification
from jaxlm.tasks.row_reader import parse
from jaxlm.tasks.task import Columns, Task


def read_questions(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read lines of a label, one blank and a question, or a file with named columns (`text`, `label`).

    Raises:
      InputError: a line without a label or a question, or with an unknown label, with its number.
    """
    if path.suffix not in (".txt", ".label"):
        return read_table(path, task, labelled=labelled)
    original = path.suffix == ".label"
    examples, dropped, rows = [], [], 0
    for number, line in Lines(path, encoding="latin-1" if original else "utf-8"):
        rows += 1
        if not line.strip():
            dropped.append((number, "empty line"))
            continue
        label, blank, text = line.partition(" ")
        if not blank or not text.strip():
            raise InputError(f"{path} line {number} must be a label, one blank and a question; fix the line")
        known = parse(label.partition(":")[0] if original else label, task, f"{path} line {number}")
        examples.append(Example((text.strip(),), (), known))
    if not examples:
        raise InputError(f"{path} has no rows; each must be a label, one blank and a question")
    return Split(tuple(examples), rows, tuple(dropped), 0)


def _spell(task: Task, train_file: Path) -> Task:
    if train_file.suffix != ".label":
        return task
    return dataclasses.replace(task, labels=task.spellings[0], spellings=(task.labels,))


TREC = BuiltIn(
    Classification(
        name="trec",
        labels=("0", "1", "2", "3", "4", "5"),
        spellings=(("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"),),
        columns=Columns(texts=(("text", "question", "sentence"),), label=("label",)),
        papers=PAPERS,
    ),
    {"train": ("train.txt", "train_5500.label"), "test": ("test.txt", "TREC_10.label")},
    Catalogue(
        "trec",
        ("text",),
        label="label-coarse",
        label_names=("DESC", "ENTY", "ABBR", "HUM", "NUM", "LOC"),
        splits={"train": "train", "test": "test"},
    ),
    read=read_questions,
    spell=_spell,
)
