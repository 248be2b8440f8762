"""Where documentation lies on a machine: Python sources and package descriptions, and the texts inside a source.

Sources are parsed with `ast` and never imported.
"""

import ast
import importlib.metadata
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Missing from slim images or made of fixtures: leaving them out keeps the text the same on more machines.
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "jaxlm",
}
STRING_AT_LEAST = 80  # characters of a string that is no docstring but may be documentation kept in a variable

_COMMENT = re.compile(r"^([ \t]*)#+(?!!)[ \t]?(.*)$")


def installed_roots() -> list[Path]:
    """The directories of the standard library and of the installed packages of this interpreter, without repeats."""
    found = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    return [root for i, root in enumerate(found) if root.is_dir() and root not in found[:i]]


def python_files(root: Path) -> list[str]:
    """Paths of the sources under `root`, relative to it, with forward slashes, sorted."""
    names: list[str] = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        relative = Path(directory).relative_to(root)
        # setuptools leaves an __editable__…py for a checkout that is installed in place, as launch/setup.sh does.
        found = (name for name in files if name.endswith(".py") and not name.startswith("__editable__"))
        names += [(relative / name).as_posix() for name in found]
    return sorted(names)


def descriptions(root: Path) -> list[tuple[str, str]]:
    """(name, long description) of the packages installed under `root`, by name; jaxlm's own is left out."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=[str(root)]):
        metadata = package.metadata
        name = str(metadata["Name"] or "").lower()
        text = metadata.get("Description") or metadata.get_payload()
        if name and name != "jaxlm" and isinstance(text, str):
            found.setdefault(f"{name} description", text)
    return sorted(found.items())


def texts_of_source(source: bytes) -> list[str]:
    """Docstrings, other long strings at statement level and blocks of comment lines, in the order of the file."""
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError:
        return []
    found: list[tuple[int, int, str]] = []  # first line, last line, text
    if '"""' in text or "'''" in text:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        found += _strings(tree)
    covered = {line for first, last, _ in found for line in range(first, last + 1)}
    found += _comments(text, covered)
    return [text for _, _, text in sorted(found, key=lambda item: item[:2])]


def _strings(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for field in ("body", "orelse", "finalbody", "handlers"):
            children = getattr(node, field, None)
            if not isinstance(children, list):  # the body of a lambda or of a conditional expression
                continue
            for child in children:
                if isinstance(child, ast.Expr):
                    yield from _documentation(child.value)
                elif isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
                    yield from _long_strings(child.value)
                else:
                    stack.append(child)


def _documentation(node: ast.expr) -> Iterator[tuple[int, int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a docstring, of whatever stands above it
        yield node.lineno, node.end_lineno or node.lineno, node.value
    elif isinstance(node, ast.Call):  # add_newdoc('numpy', 'ndarray', """…""")
        for argument in node.args:
            yield from _long_strings(argument)


def _long_strings(node: ast.expr) -> Iterator[tuple[int, int, str]]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and len(node.value) >= STRING_AT_LEAST and "\n" in node.value:
            yield node.lineno, node.end_lineno or node.lineno, node.value
    elif isinstance(node, ast.Dict):  # pydoc_data.topics
        for value in node.values:
            yield from _long_strings(value)
    elif isinstance(node, ast.Tuple):
        for value in node.elts:
            yield from _long_strings(value)


def _comments(text: str, covered: set[int]) -> Iterator[tuple[int, int, str]]:
    """Runs of lines that are only a comment, at one depth; lines inside a string that was taken are not looked at."""
    block: list[str] = []
    depth = start = 0
    for number, line in enumerate(text.split("\n"), start=1):
        match = _COMMENT.match(line) if "#" in line and number not in covered else None
        if match is not None and (not block or len(match[1]) == depth):
            if not block:
                start, depth = number, len(match[1])
            block.append(match[2])
            continue
        if block:
            yield start, number - 1, "\n".join(block)
            block = []
        if match is not None:
            start, depth, block = number, len(match[1]), [match[2]]
    if block:
        yield start, number, "\n".join(block)
