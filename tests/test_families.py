"""Families of models, input formats and kinds of tasks stay behind their tables: nothing outside asks which one it has.

Read from the sources with `ast`, so that a branch on a family is found whether or not a test runs it.
"""

import ast
from pathlib import Path
from typing import get_args

import pytest
from test_layers import FILES, imports_of, within

from jaxlm.models import FAMILIES, SIZES, build, family_of
from jaxlm.objectives.task import LOSSES
from jaxlm.tasks import FORMATS, KINDS
from jaxlm.tasks.task import Kind

# The rest of the program asks a `Family` or a `Model`. Published names differ from family to family.
MAY_NAME_FAMILIES = ("jaxlm.models", "jaxlm.interop")
# Code that reads what earlier versions wrote has to spell it.
READS_EARLIER_VERSIONS = ("jaxlm.runs.config",)

# A head and a loss belong to a kind of task; published classes are for a kind.
MAY_NAME_KINDS = ("jaxlm.tasks.kinds", "jaxlm.models.heads", "jaxlm.objectives.task", "jaxlm.interop")
# Kinds of sources, one of which is `text` too.
MAY_NAME_KINDS += ("jaxlm.data.sources",)

MODULES = {f"jaxlm.models.{name}" for name in FAMILIES} | {f"jaxlm.models.{name}.model" for name in FAMILIES}
NAMES = {name for f in FAMILIES.values() for name in (build(f.config()).arithmetic.module.__name__, f.config.__name__)}
# Fields of the configs of some families, and parameters of their models.
FIELDS = {name for f in FAMILIES.values() for name in f.config.__dataclass_fields__}
FIELDS -= set.intersection(*({*f.config.__dataclass_fields__} for f in FAMILIES.values()))
PARAMETERS = {name for f in FAMILIES.values() for name in (*f.stacks, f.pooler) if name}
CLASSES_OF_KINDS = {task.__name__ for task in KINDS.values()} | {
    "SpanExample",
    "TaggedSentence",
    "SpanSplit",
    "TaggedSplit",
    "TextPair",
    "TextSplit",
}
WORDS = {"adaptive", "num_positions", *PARAMETERS} - {"blocks"}  # those that mean nothing else: rows are in blocks too


def names_of_families(source: str, module: str = "x") -> list[str]:
    """Return the places of a source that name a family: imports, names, comparisons of a `kind`."""
    found = [f"line {line}: imports {name}" for name, line, _ in imports_of(source, module) if name in MODULES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [f"line {node.lineno}: names {name}"] if name in NAMES else []
        elif isinstance(node, ast.alias):
            found += [f"line {node.lineno}: imports {node.name}"] if node.name in NAMES | MODULES else []
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            kinds = {said for side in sides for said in strings_of(side)} & FAMILIES.keys()
            asked = any(asks_kind(side) for side in sides)
            found += [f"line {node.lineno}: compares a kind with {kind}" for kind in sorted(kinds) if asked]
        elif isinstance(node, ast.Match) and asks_kind(node.subject):
            kinds = {said for case in node.cases for said in strings_of(case.pattern)} & FAMILIES.keys()
            found += [f"line {node.lineno}: compares a kind with {kind}" for kind in sorted(kinds)]
        elif isinstance(node, ast.Subscript) and asks_kind(node.slice):
            kinds = strings_of(node.value) & FAMILIES.keys()
            found += [f"line {node.lineno}: looks a kind up beside {kind}" for kind in sorted(kinds)]
        if isinstance(node, ast.Attribute) and is_model(node.value) and node.attr in FIELDS:
            found.append(f"line {node.lineno}: reads the field {node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found += [f"line {node.lineno}: asks for the field {name}" for name in sorted(strings_of(node) & FIELDS)]
        elif isinstance(node, ast.Constant) and node.value in WORDS:
            found.append(f"line {node.lineno}: names {node.value}")
    return found


def names_of_formats(source: str) -> list[str]:
    """Return the places of a source that ask which input format a family has."""
    return [
        f"line {node.lineno}: compares an input format"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any("input_format" in (getattr(x, "id", ""), getattr(x, "attr", "")) for x in ast.walk(node))
    ]


def names_of_kinds(source: str) -> list[str]:
    """Return the places of a source that ask which kind a task has, or what class its rows have."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            asked = any(asks_kind(side) for side in (node.left, *node.comparators))
            found += [f"line {node.lineno}: compares a kind"] if asked and strings_of(node) & KINDS.keys() else []
        elif isinstance(node, ast.Match) and asks_kind(node.subject):
            found.append(f"line {node.lineno}: compares a kind")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = {getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(node.args[1])}
            found += [f"line {node.lineno}: asks for {name}" for name in sorted(names & CLASSES_OF_KINDS)]
    return found


def is_model(node: ast.AST) -> bool:
    """Return True if an expression is called `model`, as the config of a model is: `model`, `config.model`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "model"


def strings_of(node: ast.AST) -> set[str]:
    return {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def asks_kind(node: ast.AST) -> bool:
    """Return whether an expression is a `kind`, an attribute `.kind`, or an entry `["kind"]`."""
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and x.id == "kind" or isinstance(x, ast.Attribute) and x.attr == "kind":
            return True
        if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant) and x.slice.value == "kind":
            return True
    return False


@pytest.mark.parametrize(
    "module",
    [name for name in FILES if not any(within(name, room) for room in MAY_NAME_FAMILIES + READS_EARLIER_VERSIONS)],
)
def test_nobody_names_a_family(module):
    """Fails when a module asks which family a model is of, instead of what it needs to know of it."""
    found = names_of_families(FILES[module].read_text(encoding="utf-8"), module)
    assert not found, f"{module}: {found}; ask family_of(config) or the Model, whose fields say what differs"


@pytest.mark.parametrize("module", [name for name in FILES if not any(within(name, room) for room in MAY_NAME_KINDS)])
def test_nobody_asks_for_a_kind_of_task(module):
    """Fails when a module asks which kind a task has, instead of asking the task what it needs."""
    found = names_of_kinds(FILES[module].read_text(encoding="utf-8"))
    assert not found, f"{module}: {found}; ask the task, whose class says what differs"


def test_each_kind_has_a_loss_and_a_name():
    """Fails when a kind with a head lacks a loss, or its class has another name than task.json and the flags give."""
    assert KINDS.keys() == set(get_args(Kind))
    assert LOSSES.keys() >= {name for name, kind in KINDS.items() if not kind.generates}
    assert all(task.__dataclass_fields__["kind"].default == name for name, task in KINDS.items())


@pytest.mark.parametrize("module", FILES)
def test_nobody_compares_an_input_format(module):
    """Fails when a module asks which input format a model has, instead of asking the format what it needs."""
    found = names_of_formats(FILES[module].read_text(encoding="utf-8"))
    assert not found, f"{module}: {found}; ask FORMATS[family.input_format], whose fields say what differs"


def test_the_formats_are_those_of_the_families():
    """Fails when a family names a format that the table lacks, or the table has one that no family reads."""
    assert {family.input_format for family in FAMILIES.values()} == FORMATS.keys()


def test_the_reader_finds_what_it_should():
    """Fails when one way to ask for a family passes unseen, or a task's kind is taken for a model's."""
    for source in (
        "from jaxlm.models.gpt import GPT1",
        "from jaxlm.models import bert",
        "def f():\n    import jaxlm.models.bert",
        "from anywhere import GPTConfig",
        "isinstance(model, Bert)",
        "isinstance(model, models.BertConfig)",
        "config.kind == 'gpt'",
        "'bert' != saved['model']['kind']",
        "kind in ('gpt', 'other')",
        "match config.kind:\n    case 'gpt' | 'x': pass",
        "rate = {'gpt': 1.0}[config.kind]",
        "from jaxlm.models.gpt.model import GPT",
        "config.model.num_heads",
        "hasattr(model, 'tables')",
        "'pooler' in params['backbone']",
        "leaves['encoder_blocks']",
    ):
        assert names_of_families(source), source
    for source in (
        "from jaxlm.models.model import Inputs",
        "from jaxlm.models.heads.linear import task_head",
        "task.kind == 'span'",
        "tokenizer == 'gpt1'",
        "source.model.kind != asked.kind",
        "config.model.num_layers",
        "execution.attention",
    ):
        assert not names_of_families(source), source
    for source in ("family.input_format == 'bert'", "input_format in ('gpt1', 'x')", "'gpt1' != a.family.input_format"):
        assert names_of_formats(source), source
    for source in (
        "task.kind == 'span'",
        "kind in ('span', 'x')",
        "isinstance(row, SpanExample)",
        "isinstance(t, a.Spans)",
    ):
        assert names_of_kinds(source), source
    assert not names_of_kinds("task.kind == other.kind") and not names_of_kinds("isinstance(x, Example)")
    assert not names_of_formats("FORMATS[family.input_format].reads_last")
    assert {"jaxlm.models.gpt", "jaxlm.models.bert"} <= MODULES and "jaxlm.models.family" not in MODULES
    assert {"GPT", "GPTConfig", "Bert", "BertConfig"} <= NAMES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_complete(name):
    """Fails when a family is listed under another name, its config has more fields than a model may (sixteen, and its
    name), or a published size is not sound."""
    family = FAMILIES[name]
    fields = family.config.__dataclass_fields__
    assert family.name == name == fields["kind"].default and len(fields.keys() - {"kind"}) <= 16
    assert sum(field.type in (bool, "bool") for field in fields.values()) <= 1
    assert Path(FILES[build(family.config()).arithmetic.module.__module__]).parent.name == name
    assert family.carries == (build(family.config(vocab_size=9)).stream_carry(1) is not None)
    assert family.keeps_output_layer == build(family.config(vocab_size=9)).output_layer.available({})
    assert family.sizes.items() <= SIZES.items()
    for config in family.sizes.values():
        config.check()
        model = build(config)
        assert family_of(config) is family is model.family and hash(model) == hash(build(config))
        assert model == build(config) and model.flops_per_token(128) > 0 and model.max_length >= 128
    assert family.vocab_size in {config.vocab_size for config in family.sizes.values()}
