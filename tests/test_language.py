"""The English of docstrings and error messages, read from the sources.

Fails when a summary line opens with a question word instead of a verb or a noun, or when an error message has no verb
where it should say what a value must be.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUESTION_WORDS = {"what", "whether", "how", "where", "which", "who", "whom", "whose", "when", "why"}
ERRORS = {"InputError", "RunError"}
# Private spellings of an error, and the sentence to write instead.
PATTERNS = {
    r": an? (whole |finite )?number\b": "FIELD must be positive, got VALUE",
    r"\b(is|are) no\b(?! longer)": "is not a",
    r"\bsay\b\)?(;|\.|$)": "for example",
    r"\bmend\b": "fix",
    r"\bthere (is|are) no such\b": "FIELD must be one of …, got VALUE",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "jaxlm").rglob("*.py")):
        yield path.relative_to(ROOT / "jaxlm").as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the literal messages of errors, with `…` for each inserted value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
            yield node.lineno, text_of(node.args[0])


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "…"


def asks(summary: str) -> bool:
    words = re.findall(r"[A-Za-z']+", summary)
    return bool(words) and words[0].lower() in QUESTION_WORDS


def test_summary_lines_open_with_a_verb_or_a_noun():
    found = [
        f"jaxlm/{name}:{line}: {text.strip().splitlines()[0]}"
        for name, tree in sources()
        for line, text in docstrings(tree)
        if asks(text)
    ]
    assert not found, "\n".join(found)


def test_errors_say_what_a_value_must_be():
    found = [
        f"jaxlm/{name}:{line}: {text!r}; write: {instead}"
        for name, tree in sources()
        for line, text in messages(tree)
        for pattern, instead in PATTERNS.items()
        if re.search(pattern, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        'raise InputError(f"batch_size {size}: a number above 0")',
        'raise InputError(f"{word!r} is no step; use RUN@STEP")',
        'raise RunError("--zone " + zone + ": a zone, us-west4-a say")',
        'def f():\n    return InputError("mend the row")',
    ],
)
def test_the_patterns_find_what_they_are_for(code):
    ((_, text),) = messages(ast.parse(code))
    assert any(re.search(pattern, text) for pattern in PATTERNS)
    assert not any(re.search(pattern, "batch_size must be positive, got 0; it is no longer 8") for pattern in PATTERNS)


def test_question_words_are_found_in_every_kind_of_docstring():
    tree = ast.parse(
        '"""What."""\nclass C:\n    """How."""\n    x: int\n    """Whether."""\n    def f(self):\n        """Where."""'
    )
    assert len(list(docstrings(tree))) == 4 and all(asks(text) for _, text in docstrings(tree))
    assert not asks("Return whether it is.")
