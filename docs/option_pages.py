"""Reference pages of all options and configs, written from the dataclasses that the commands parse.

`docs/conf.py` calls `write_pages` before each build. The text of an option is the docstring of its field, read by
`jaxlm.flags.field_help`, as in `--help`. The pages are not committed.
"""

import dataclasses
import importlib
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union

import tyro

import jaxlm.__main__
from jaxlm.config import find_config, known_configs, load_config, to_json
from jaxlm.data.config import MEMBERS
from jaxlm.distributed.mesh import MeshConfig
from jaxlm.distributed.processes import DistributedConfig
from jaxlm.flags import field_help, reflowed
from jaxlm.models import FAMILIES
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import OBJECTIVES, MaskingConfig
from jaxlm.tasks import CustomConfig, TaskOptions
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.optimizer import OptimizerConfig

# Options that several commands share: the page of each, with the prefix that its flags have everywhere.
COMPONENTS: dict[str, tuple[str, dict[type, str]]] = {
    "models": ("Models", dict.fromkeys((family.config for family in FAMILIES.values()), "model.")),
    "data": ("Data and layouts", dict.fromkeys(MEMBERS.values(), "data.")),
    "objectives": (
        "Objectives",
        {**dict.fromkeys(OBJECTIVES.values(), "objective."), MaskingConfig: "objective.masking."},
    ),
    "optimizer": ("Optimizer", {OptimizerConfig: "optimizer."}),
    "execution": (
        "Devices and execution",
        {MeshConfig: "mesh.", Execution: "execution.", DistributedConfig: "distributed."},
    ),
    "tasks": ("Tasks", {CustomConfig: "custom.", TaskOptions: "options."}),
    "pretraining-config": ("Fields of a pretraining config", {PretrainConfig: ""}),
    "finetuning-config": ("Fields of a fine-tuning config", {FinetuneConfig: ""}),
}
PAGE_OF = {kind: page for page, (_, kinds) in COMPONENTS.items() for kind in kinds}

# The words that follow a command, for each of its dataclasses; nothing follows the others.
WORDS = {
    "pretrain": ("CONFIG",),
    "finetune": ("CONFIG",),
    "show": ("STORE | RUN …", "PRETRAINING CONFIG", "FINE-TUNING CONFIG", "--task TASK"),
    "aot": ("PRETRAINING CONFIG", "FINE-TUNING CONFIG"),
    "bench": ("CONFIG",),
    "doctor": ("", "CONFIG"),
    "report": ("RUN …",),
}


def arguments_of(command: str) -> dict[str, type]:
    """Return the dataclasses of a command, by the words that follow its name: a subcommand, or those of WORDS."""
    found = importlib.import_module(f"jaxlm.{command}").ARGUMENTS
    members = typing.get_args(found[0])
    if not members:
        return dict(zip(WORDS.get(command, ("",)), found, strict=True))
    names = [next(mark.name for mark in member.__metadata__ if getattr(mark, "name", None)) for member in members]
    return {name: typing.get_args(member)[0] for name, member in zip(names, members, strict=True)}


COMMANDS = {command: arguments_of(command) for command in jaxlm.__main__.COMMANDS}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option: its flag, or the name of a positional argument, its type, its default and its help."""

    flag: str
    type: str
    default: str | None
    help: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Options of one dataclass, and the pages of the parts that are described elsewhere."""

    kind: type
    options: list[Option]
    elsewhere: list[str]


def groups(kind: type, prefix: str = "") -> Iterator[Group]:
    """Yield the options of a dataclass, then those of its parts that have no page of their own."""
    hints, texts = typing.get_type_hints(kind, include_extras=True), field_help(kind)
    options: list[Option] = []
    elsewhere: list[str] = []
    inner: list[tuple[type, str]] = []
    for field in dataclasses.fields(kind):
        hint, marks = hints[field.name], _marks(hints[field.name])
        if tyro.conf.Suppress in marks:
            continue
        given = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
        name = given[0] if given else field.name
        parts = [part for part in members(hint) if dataclasses.is_dataclass(part)]
        for part in parts:
            if part in PAGE_OF:
                elsewhere.append(PAGE_OF[part])
            else:
                unnamed = not name or tyro.conf.OmitArgPrefixes in marks
                inner.append((part, prefix if unnamed else f"{prefix}{name}."))
        if not parts:
            text = texts.get(field.name) or _said_by_marks(hint, "help")
            if not text:  # the literal field of a union whose member the config file chooses
                continue
            flag = name.upper() if tyro.conf.Positional in marks else f"--{prefix}{name}".replace("_", "-")
            kind_of_value = _said_by_marks(hint, "metavar").strip("{}").replace(",", "|") or type_name(hint)
            options.append(Option(flag, kind_of_value, default_of(field), text))
    yield Group(kind, options, list(dict.fromkeys(elsewhere)))
    for part, part_prefix in inner:
        yield from groups(part, part_prefix)


def members(hint: Any) -> list[Any]:
    """Return the members of a union, or the type itself, without annotations."""
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if typing.get_origin(bare) in (Union, UnionType):
        return [part for member in typing.get_args(bare) for part in members(member)]
    return [bare]


def type_name(hint: Any) -> str:
    """Return the type of an option as `--help` shows it."""
    names = []
    for part in members(hint):
        origin, arguments = typing.get_origin(part), typing.get_args(part)
        if part is type(None):
            continue
        if origin is Literal:
            names += [str(value) for value in arguments]
        elif origin is tuple:
            names.append(f"{type_name(arguments[0])} …")
        else:
            names.append("" if part is bool else part.__name__.upper())
    return "|".join(names)


def default_of(field: dataclasses.Field) -> str | None:
    """Return the default of a field as it is typed; None for a required one, "" for one without a value."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return shown if shown.strip() else repr(shown)


def escaped(text: str) -> str:
    """Return a text as Markdown that reads the same; code between backticks stays code."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if n % 2 else re.sub(r"([\\*_<>\[\]{}|#$~`])", r"\\\1", part) for n, part in enumerate(parts))


def prose(text: str) -> list[str]:
    """Return the lines of a help text in Markdown: paragraphs, and indented lines as they are."""
    lines: list[str] = []
    verbatim = False
    for line in reflowed(text).splitlines():
        if (line[:1] == " ") != verbatim:
            lines += ["", "```text"] if not verbatim else ["```", ""]
            verbatim = not verbatim
        lines.append(line.strip() if verbatim else escaped(line))
    return [*lines, "```"] if verbatim else lines


def option_lines(option: Option) -> list[str]:
    """Return an entry of a definition list."""
    term = f"`{option.flag} {option.type}".rstrip() + "`"
    if option.default is None:
        note = "required"
    elif option.default == "":
        note = "optional"
    else:
        note = f"default `{option.default}`"
    help_lines = prose(option.help)
    return [f"{term} ({note})", f": {help_lines[0]}", *(f"  {line}".rstrip() for line in help_lines[1:]), ""]


def group_lines(group: Group, here: str = "") -> list[str]:
    """Return the options of a group, and links to those that have pages of their own. here: the page of the group."""
    lines = [line for option in group.options for line in option_lines(option)]
    others = [page for page in group.elsewhere if page != here]
    if others:
        links = ", ".join(f"[{COMPONENTS[page][0]}](#options-{page})" for page in others)
        lines += [f"Further options: {links}.", ""]
    return lines


def title_of(kind: type) -> str:
    """Return the first sentence of a dataclass's docstring, without its full stop."""
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")


def command_page(command: str) -> str:
    """Return the page of a command."""
    module = importlib.import_module(f"jaxlm.{command}")
    lines = [f"(options-{command})=", f"# {command}", "", *prose(module.__doc__ or ""), ""]
    for words, kind in COMMANDS[command].items():
        usage = f"python -m jaxlm.{command} {words}".rstrip()
        lines += [f"## `{usage}`", "", f"{escaped(title_of(kind))}.", ""]
        for number, group in enumerate(groups(kind)):
            lines += [] if number == 0 else [f"### {escaped(title_of(group.kind))}", ""]
            lines += group_lines(group)
    return "\n".join(lines)


def component_page(page: str) -> str:
    """Return the page of options that several commands share."""
    title, kinds = COMPONENTS[page]
    lines = [f"(options-{page})=", f"# {title}", ""]
    for kind, prefix in kinds.items():
        for group in groups(kind, prefix):
            chosen = _chosen_by(group.kind, prefix)
            title = escaped(title_of(group.kind))
            lines += [f"## {chosen or title}", "", *([f"{title}.", ""] if chosen else []), *group_lines(group, page)]
    return "\n".join(lines)


def configs_page() -> str:
    """Return the page of all configs: their docstrings, and the fields that differ from the program's defaults."""
    lines = [
        "(options-configs)=",
        "# Configs",
        "",
        "Each config is a Python file below `configs/` with one function `config()`. The tables list the fields in",
        "which it differs from the defaults of the program, by the names of their flags.",
        "",
    ]
    for name in known_configs():
        config = load_config(name, object)
        text = find_config(name).read_text(encoding="utf-8")
        (docstring,) = re.findall(r'\A"""(.*?)"""', text, flags=re.DOTALL)
        lines += [f"## `{name}`", "", *prose(docstring), "", "| flag | value |", "|---|---|"]
        for field, value in differences(config, type(config)()).items():
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            flag = field if field == "model.kind" else f"--{field.replace('_', '-')}"  # the file fixes the family
            lines.append(f"| `{flag}` | `{shown}` |")
        lines.append("")
    return "\n".join(lines)


def differences(value: Any, default: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a config, by dotted name, that differ from those of `default`."""
    found: dict[str, Any] = {}
    if type(value) is not type(default):
        default = type(value)()
        key = "layout" if hasattr(value, "layout") else "kind"
        found[f"{prefix}{key}"] = getattr(value, key)
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(mine):
            found |= differences(mine, other, f"{prefix}{field.name}.")
        elif mine != other:
            found[f"{prefix}{field.name}"] = to_json(mine)
    return found


def index_page() -> str:
    """Return the page that lists the others."""
    names = ["configs", *COMMANDS, *COMPONENTS]
    intro = (
        "These pages are generated from the dataclasses that the commands parse. `python -m jaxlm.COMMAND --help`\n"
        "prints the same texts; for `pretrain` and `finetune` give a config first, whose values become the defaults.\n"
        "A switch `--name` is turned off by `--no-name`."
    )
    return "\n".join(["# Options", "", intro, "", "```{toctree}", ":maxdepth: 1", "", *names, "```", ""])


def pages() -> Mapping[str, str]:
    """Return all pages by the names of their files."""
    found = {"index.md": index_page(), "configs.md": configs_page()}
    found |= {f"{command}.md": command_page(command) for command in COMMANDS}
    return found | {f"{page}.md": component_page(page) for page in COMPONENTS}


def write_pages(directory: Path) -> None:
    """Write the pages that changed, and remove others."""
    directory.mkdir(parents=True, exist_ok=True)
    found = pages()
    for path in directory.glob("*.md"):
        if path.name not in found:
            path.unlink()
    for name, text in found.items():
        path = directory / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _chosen_by(kind: type, prefix: str) -> str | None:
    """Return the flag that chooses a member of a union: `--data.layout packed`."""
    for name in ("layout", "kind"):
        if prefix in ("data.", "objective.") and isinstance(getattr(kind, name, None), str):
            return f"`--{prefix}{name} {getattr(kind, name)}`"
    return None


def _marks(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def _said_by_marks(hint: Any, name: str) -> str:
    """Return `help` or `metavar` of an annotation, which a field that the members of a union share has."""
    return next((getattr(mark, name) for mark in _marks(hint) if getattr(mark, name, None)), "")
