"""Sentences without tags, which a run reads beside its labelled rows (`jaxlm/objectives/cross_view.py`)."""

from collections.abc import Iterator

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.reading.rows import format_of
from jaxlm.tasks.examples import Split, TaggedSentence, TaskData
from jaxlm.tasks.registry import read_rows
from jaxlm.tasks.task import Task

REST, LINES = "rest", "lines:"


def read_unlabelled(spec: str, task: Task, data: TaskData) -> Split:
    """Return the sentences of `--unlabelled`, whose tags, if they have some, are not read.

    spec: `rest`, the training rows that a sample leaves out; `lines:FILE`, a sentence in each line with white space
    between its words; or a file of sentences that the task reads.

    Raises:
      InputError: a task without tags, a sample without a rest, and a file without sentences, or a directory.
    """
    if not task.of_words:
        raise InputError(f"unlabelled must be left out for a {task.kind} task, got {spec}; leave it out")
    if spec == REST:
        rows = tuple(example.without_tags() for example in data.left_out)
        if not rows:
            raise InputError("unlabelled must be a file where no row is left out, got rest; give --sample, or a file")
        return Split(rows, len(rows))
    path = spec.removeprefix(LINES)
    if format_of(path, otherwise="columns") == "folder":
        raise InputError(
            f"unlabelled must be a file of sentences, lines:FILE or rest, got the directory {path}; give a file, such "
            "as the text of a store"
        )
    lines = (TaggedSentence(tuple(line.split())) for _, line in Lines(path, decompress=True))
    sentences: Iterator[TaggedSentence] = lines if spec.startswith(LINES) else read_rows(path, task)
    rows = tuple(example for example in sentences if example.tokens)
    if not rows:
        raise InputError(f"unlabelled must be a file with sentences, got none in {path}; give another file")
    return Split(rows, len(rows))


def path_of(spec: str) -> tuple[str, str]:
    """Return the part of a value of `--unlabelled` before its file, and the file; no file for `rest`."""
    return (spec, "") if spec == REST else (LINES * spec.startswith(LINES), spec.removeprefix(LINES))
