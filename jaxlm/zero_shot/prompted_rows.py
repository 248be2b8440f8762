"""Rows of the files of prompted tasks (fields for the prompt, and the correct answers), and their prompt files.

A prompt file is a text with a field in braces for each part of a row. `{answer}` is the last field. A row as an example
is the whole file; a row to answer is the file up to `{answer}`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.errors import InputError
from jaxlm.reading import parallel
from jaxlm.reading.lines import Lines
from jaxlm.reading.parallel import two_files
from jaxlm.reading.rows import json_document
from jaxlm.tasks.datasets.spans_and_tags import SQUAD2
from jaxlm.tasks.kinds.spans import read_questions
from jaxlm.zero_shot.task import files_of, json_rows

_FIELD = re.compile(r"\{(\w+)\}")
_HIGHLIGHT = re.compile(r"^@highlight[ ]*$", re.MULTILINE)


class Row(NamedTuple):
    """A row. fields: the values for the prompt file. answers: at least one. turns: the earlier questions about the same
    document, each with its answer; where: the file and the row, for messages.
    """

    fields: dict[str, str]
    answers: tuple[str, ...]
    where: str
    turns: tuple[Mapping[str, str], ...] = ()


def reading_questions(path: Path) -> tuple[list[Row], int]:
    """Return the questions of SQuAD's JSON or of JSONL, and the number of those without an answer."""
    examples = read_questions(path, SQUAD2.task, labelled=True).examples
    rows = [
        Row(
            {"document": example.context, "question": example.question},
            tuple(text for text, _ in example.answers),
            f"{path}: question {example.name}",
        )
        for example in examples
        if example.answers
    ]
    if not rows:
        raise InputError(f"{path} must have questions with an answer, got {len(examples)} without one; give another")
    return rows, len(examples) - len(rows)


def conversations(path: Path) -> tuple[list[Row], int]:
    """Return the questions of CoQA's JSON, each with those before it."""
    document = json_document(path, remedy="give CoQA's file")
    try:
        rows = [row for story in document["data"] for row in _turns(path, story)]
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path} must have data, story, questions and answers with input_text, got {error!r}; give CoQA's file"
        ) from None
    if not rows:
        raise InputError(f"{path} must have questions, got none; give CoQA's file")
    return rows, 0


def _turns(path: Path, story: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the questions of a story. Human answers besides the first are in `additional_answers`."""
    turns: list[dict[str, str]] = []
    others = list(story.get("additional_answers", {}).values())
    for number, (question, answer) in enumerate(zip(story["questions"], story["answers"], strict=True)):
        given = [answer["input_text"], *(other[number]["input_text"] for other in others)]
        fields = {"document": story["story"].strip(), "question": question["input_text"].strip()}
        yield Row(fields, tuple(one.strip() for one in given), f"{path}: {story['id']} {number + 1}", tuple(turns))
        turns.append({"question": fields["question"], "answer": given[0].strip()})


def open_questions(path: Path) -> tuple[list[Row], int]:
    """Return the rows of JSONL with `question`, and `answer`, a text or a list of texts."""
    rows = []
    for where, row in json_rows(path):
        answers = row.get("answer")
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(row.get("question"), str) or not row["question"].strip():
            raise InputError(f"{where}: question must be a text, got {row.get('question')!r}; fix or remove the row")
        if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
            raise InputError(f"{where}: answer must be a list of texts, got {answers!r}; fix or remove the row")
        rows.append(Row({"question": row["question"].strip().removesuffix("?").rstrip()}, tuple(answers), where))
    return rows, 0


def stories(path: Path) -> tuple[list[Row], int]:
    """Return the rows of JSONL with `article` and `highlights` (CNN/DailyMail), or `document` and `summary`; or of
    CNN/DailyMail's `.story` files, one or a directory of them.
    """
    if path.is_dir() or path.suffix == ".story":
        return [_story(file) for file in files_of(path, ".story")], 0
    names = (("article", "highlights"), ("document", "summary"))
    rows = []
    for where, row in json_rows(path):
        pair = next((pair for pair in names if pair[0] in row), names[0])
        for name in pair:
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise InputError(f"{where}: {name} must be a text, got {row.get(name)!r}; fix or remove the row")
        rows.append(Row({"document": row[pair[0]].strip()}, (row[pair[1]].strip(),), where))
    return rows, 0


def _story(path: Path) -> Row:
    """Return the article and its highlights, one per line; each follows a line `@highlight`."""
    body, *highlights = _HIGHLIGHT.split(Lines(path).text())
    article = "\n".join(line.strip() for line in body.splitlines() if line.strip())
    lines = [" ".join(part.split()) for part in highlights]
    if not article or not lines or not all(lines):
        raise InputError(f"{path} must have an article and texts after @highlight, got {len(lines)}; fix or remove it")
    return Row({"document": article}, ("\n".join(lines),), str(path))


def sentence_pairs(path: Path) -> tuple[list[Row], int]:
    """Return the pairs of two files, SOURCE,REFERENCE. InputError if they have different numbers of sentences."""
    files = two_files(path)
    if files is None:
        raise InputError(
            f"translation must have two files with a comma between them, got {path}; write translation:test.en,test.fr"
        )
    pairs = parallel.sentence_pairs(*files)
    return [Row({"source": source}, (reference,), where) for where, source, reference in pairs], 0


class Template(NamedTuple):
    """A prompt file. name: its path, or that of the task's own file within the package."""

    name: str
    text: str

    def example(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row with its answer."""
        return _FIELD.sub(lambda found: fields[found[1]], self.text)

    def query(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row up to its answer, without a blank at its end, which the answer's token holds."""
        return self.question(fields).rstrip(" ")

    def question(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row up to its answer."""
        return _FIELD.sub(lambda found: fields[found[1]], self.text[: self.text.index("{answer}")])

    def turns(self) -> tuple["Template", "Template"]:
        """Return the part for a document, and the part for each of several questions about it, from the line with
        `{question}` on.
        """
        begin = self.text.rfind("\n", 0, self.text.index("{question}")) + 1
        return Template(self.name, self.text[:begin]), Template(self.name, self.text[begin:])


def read_template(task: str, path: Path | None, fields: Sequence[str]) -> Template:
    """Return a prompt file, by default the task's own. InputError without the fields, or with another one."""
    if path is None:
        name = f"prompts/{task}.txt"
        text = (resources.files("jaxlm.zero_shot") / "prompts" / f"{task}.txt").read_text(encoding="utf-8")
    else:
        name = str(path)
        text = "".join(line + "\n" for _, line in Lines(path))
    found = _FIELD.findall(text)
    listed = ", ".join(f"{{{field}}}" for field in (*fields, "answer"))
    if sorted(found) != sorted((*fields, "answer")) or found[-1] != "answer":
        got = ", ".join(f"{{{field}}}" for field in found) or "none"
        raise InputError(f"--prompt {name} must have the fields {listed} once, {{answer}} last, got {got}; correct it")
    return Template(name, text)
