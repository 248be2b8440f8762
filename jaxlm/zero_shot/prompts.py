"""Prompts of tasks whose answers are generated: text files with a field in braces for each part of a row.

`{answer}` is the last field. A row as an example is the whole file; a row to answer is the file up to `{answer}`.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines

_FIELD = re.compile(r"\{(\w+)\}")


class Query(NamedTuple):
    """A prompt to continue. document: the slice of it that loses its end if the prompt is too long for the model; None:
    the prompt loses its beginning. where: the file and row, for messages.
    """

    text: str
    where: str
    document: slice | None = None


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
        raise InputError(f"--prompt {name} must have the fields {listed} once, {{answer}} last, got {got}; fix it")
    return Template(name, text)
