"""The examples in the docstrings of the public names are run, and no public name is without one."""

import ast
import doctest
import importlib
import inspect

import pytest
from documents import blocks, cells, notebooks
from paths import REPOSITORY

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")


def documented() -> dict[str, object]:
    """The public names, and the public methods and properties of public classes."""
    found: dict[str, object] = {name: getattr(jaxlm, name) for name in jaxlm.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value) and not issubclass(value, Exception):
            found |= {
                f"{name}.{member}": part
                for member, part in vars(value).items()
                if not member.startswith("_") and (callable(part) or isinstance(part, property))
            }
    return found


def test_every_public_name_has_an_example():
    """Fails when a name is exported, or a method added, without a docstring with an example."""
    without = [name for name, value in documented().items() if ">>>" not in (inspect.getdoc(value) or "")]
    assert not without
    assert set(jaxlm._MODULES) == set(jaxlm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        jaxlm.train  # noqa: B018


@pytest.mark.parametrize("name", [name for name in documented()])
def test_examples_give_what_they_show(name, folder, monkeypatch):
    """Fails when an example in a docstring does not run, or gives something else."""
    monkeypatch.chdir(folder)
    value = documented()[name]
    value = value.fget if isinstance(value, property) else value
    text = inspect.getdoc(value) or ""
    test = doctest.DocTestParser().get_doctest(text, {"jaxlm": jaxlm}, name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert test.examples and not failures, "".join(failures)


@pytest.mark.parametrize("path", [REPOSITORY / "docs/python.md", *notebooks()], ids=lambda path: path.stem)
def test_the_pages_use_names_that_exist(path):
    """Fails when a page calls a function or a method that is not public, or with an argument that it lacks."""
    text = path.read_text(encoding="utf-8")
    programs = [block.text for block in blocks(text) + cells(text) if block.language == "python"]
    owners = {"jaxlm": jaxlm, "model": jaxlm.LoadedModel, "tuned": jaxlm.LoadedModel}
    called = 0
    for node in (node for program in programs for node in ast.walk(ast.parse(program))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = owners.get(ast.unparse(node.func.value))
        if owner is not None:
            named = getattr(owner, node.func.attr)
            known = {} if isinstance(named, property) else inspect.signature(named).parameters
            assert {keyword.arg for keyword in node.keywords} <= known.keys(), ast.unparse(node)
            called += 1
    assert called >= (9 if path.stem == "python" else 3)


def test_names_are_those_of_their_modules():
    """Fails when the lazy exports and those that a type checker sees differ."""
    for name, module in jaxlm._MODULES.items():
        assert getattr(jaxlm, name) is getattr(importlib.import_module(module), name)
