"""Documentation on a machine: Python sources and package descriptions, and the texts inside a source.

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

# Missing from slim images, or test fixtures: skipping them gives the same text on more machines.
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
STRING_AT_LEAST = 80  # minimum length of a string that is not a docstring but may be documentation in a variable

_COMMENT = re.compile(r"^([ \t]*)#+(?!!)[ \t]?(.*)$")


def installed_roots() -> list[Path]:
    """Return the directories of the standard library and the installed packages of this interpreter, deduplicated."""
    found = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    return [root for i, root in enumerate(found) if root.is_dir() and root not in found[:i]]


def python_files(root: Path) -> list[str]:
    """Return the paths of the sources under `root`, relative to it, with forward slashes, sorted."""
    names: list[str] = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        relative = Path(directory).relative_to(root)
        # setuptools writes an __editable__…py for a checkout that is installed in place, as launch/setup.sh does.
        found = (name for name in files if name.endswith(".py") and not name.startswith("__editable__"))
        names += [(relative / name).as_posix() for name in found]
    return sorted(names)


def descriptions(root: Path) -> list[tuple[str, str]]:
    """Return (name, long description) of the packages installed under `root`, by name, without jaxlm's own."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=[str(root)]):
        metadata = package.metadata
        name = str(metadata["Name"] or "").lower()
        text = metadata.get("Description") or metadata.get_payload()
        if name and name != "jaxlm" and isinstance(text, str):
            found.setdefault(f"{name} description", text)
    return sorted(found.items())


def texts_of_source(source: bytes) -> list[str]:
    """Return docstrings, other long strings at statement level and comment blocks, in the order of the file."""
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError:
        return []
    found: list[tuple[int, int, str]] = []  # first line, last line, text
    if '"""' in text or "'''" in text:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for invalid escapes in third-party strings
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
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a docstring of a definition or a variable
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
    """Yield runs of comment-only lines of one indentation; lines inside a collected string are skipped."""
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
