"""Flags of dataclasses: the rules by which tyro describes them, the fields that they name, and their other names.

The help of a field is its docstring. A blank line begins a new paragraph; indented lines, as in examples of files, keep
their line breaks. An optional field shows the metavar of its type, and `(optional)` if its help names no default. Flags
with new names are accepted with a notice, and those of other programs are explained.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TextIO

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from jaxlm.errors import InputError

REGISTRY = ConstructorRegistry()


def fields_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, type) of each field that is a flag of a dataclass, of all members of its unions."""
    for option in _options(kind):
        if not dataclasses.is_dataclass(option):
            continue
        hints = typing.get_type_hints(option, include_extras=True)
        for field in dataclasses.fields(option):
            name = f"{prefix}{name_of_flag(field.name, hints[field.name])}"
            inner = [part for part in _options(hints[field.name]) if dataclasses.is_dataclass(part)]
            for part in inner:
                yield from fields_of(part, f"{name}." if name else "")
            if not inner:
                yield name, unmarked(hints[field.name])


def name_of_flag(field: str, hint: Any) -> str:
    """Return the name of a field's flag: its own, or that of a mark in its type; "" for a group without one."""
    named = [mark.name for mark in _marks(hint) if getattr(mark, "name", None) is not None]
    if any(mark is tyro.conf.OmitArgPrefixes for mark in _marks(hint)):
        return ""
    return named[0] if named else field


def positional_fields(kind: Any) -> set[str]:
    """Return the names of the fields of a dataclass that are arguments without a flag."""
    if not dataclasses.is_dataclass(bare := unmarked(kind)):
        return set()
    hints = typing.get_type_hints(bare, include_extras=True)
    return {name for name, hint in hints.items() if any(mark is tyro.conf.Positional for mark in _marks(hint))}


def subcommands_of(kind: Any) -> list[str]:
    """Return the names of the subcommands of a union, or none for another type."""
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else ()
    return [mark.name for member in members for mark in _marks(member) if getattr(mark, "name", None)]


def reflowed(text: str) -> str:
    """Return a text with one line per paragraph and per indented line."""
    lines: list[str] = []
    joins = False
    for line in inspect.cleandoc(text).splitlines():
        is_prose = bool(line) and not line[0].isspace()
        if is_prose and joins:
            lines[-1] += f" {line.rstrip()}"
        else:
            lines.append(line.rstrip())
        joins = is_prose
    return "\n".join(lines)


class HelpText:
    """A text stream that corrects the help texts that tyro writes to another stream.

    The group of the flags `--options.*`, which tyro titles `options options`, is `task options`. The description, whose
    paragraphs tyro prints in one line each, is wrapped at the width of the terminal.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        lines = text.replace("options options", "task options   ").split("\n")  # of the same width
        return self._stream.write("\n".join(map(_wrapped, lines)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _wrapped(line: str) -> str:
    """Return a line of prose wrapped at the width of the terminal, and any other line as it is."""
    if not (line[:1].isalpha() or line[:1] == "`"):
        return line
    width = min(shutil.get_terminal_size().columns, 120)
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


@functools.cache
def field_help(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a class that was made without a file
            continue
        body = ast.parse(textwrap.dedent(source)).body[0].body  # type: ignore[attr-defined]
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    texts[field.target.id] = reflowed(below.value.value)
    return texts


@REGISTRY.struct_rule
def _dataclass(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describe a dataclass as tyro does, with the help and the hints of this module for its fields."""
    if not dataclasses.is_dataclass(info.type) or info.type.__module__.startswith("tyro."):
        return None  # tyro wraps a union of subcommands in a dataclass of its own
    hints = typing.get_type_hints(info.type, include_extras=True)
    fields = []
    for field in dataclasses.fields(info.type):
        default, hint = _default(info, field), hints[field.name]
        text = functools.partial(_help, info.type, field.name)
        if not dataclasses.is_dataclass(unmarked(hint)) and default in (None, (), ""):
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=functools.partial(_unset, text))]
        if any(mark is tyro.conf.Positional for mark in _marks(hint)):
            hint = Annotated[hint, tyro.conf.arg(metavar=field.name.upper())]
            if default is tyro.MISSING_NONPROP:
                hint = Annotated[hint, tyro.conf.arg(help_behavior_hint="(required)")]
        fields.append(StructFieldSpec(field.name, hint, default, text))
    return StructConstructorSpec(info.type, tuple(fields))


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Describe `X | None` as X. The word None is still accepted."""
    options = _options(info.type)
    if type(None) not in options or len(options) < 2:
        return None
    rest: Any = typing.Union[tuple(option for option in options if option is not type(None))]  # noqa: UP007
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        spec,
        choices=None if spec.choices is None else (*spec.choices, "None"),
        instance_from_str=lambda words: None if list(words) == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


def _default(info: StructTypeInfo, field: dataclasses.Field) -> Any:
    """Return the default of a field: that of the given instance, else the dataclass's own, else tyro's MISSING."""
    if isinstance(info.default, info.type):
        return getattr(info.default, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return tyro.MISSING_NONPROP if field.default_factory is dataclasses.MISSING else field.default_factory()


def _help(kind: type, name: str) -> str | None:
    return field_help(kind).get(name)


def _unset(text: typing.Callable[[], str | None], _: str) -> str:
    return "" if "Default" in (text() or "") else "(optional)"


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    bare = unmarked(kind)
    is_union = typing.get_origin(bare) in (typing.Union, types.UnionType)
    return tuple(unmarked(option) for option in typing.get_args(bare)) if is_union else (bare,)


def unmarked(kind: Any) -> Any:
    """Return a type without its marks."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _marks(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


# Flags by their beginning: the rest of the flag stays.
FLAGS = {
    "--masking.": "--objective.masking.",
    "--next-sentence-coefficient": "--objective.next-sentence-coefficient",
    "--samples": "--num-samples",
}

# Flags of Hugging Face's Trainer and of nanoGPT, by field, with the fields that some commands have instead.
ELSEWHERE = {
    "learning_rate": ("optimizer.peak_lr",),
    "lr": ("optimizer.peak_lr",),
    "weight_decay": ("optimizer.weight_decay",),
    "warmup_steps": ("optimizer.warmup",),
    "warmup_ratio": ("optimizer.warmup",),
    "max_steps": ("num_steps",),
    "max_iters": ("num_steps",),
    "num_train_epochs": ("num_epochs",),
    "epochs": ("num_epochs",),
    "per_device_train_batch_size": ("batch_size",),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "gradient_accumulation_steps": ("micro_batches",),
    "max_length": ("length",),
    "max_seq_length": ("length",),
    "block_size": ("length",),
    "model_name_or_path": ("start",),
    "output_dir": ("run", "output"),
    "out_dir": ("run", "output"),
    "max_grad_norm": ("optimizer.clip_norm",),
    "logging_steps": ("log_every",),
    "eval_steps": ("eval_every",),
    "save_steps": ("checkpoint_every",),
    "save_total_limit": ("keep_newest",),
    "bf16": ("execution.dtype",),
    "fp16": ("execution.dtype",),
    "train_file": ("source", "custom.train", "data.store"),
    "validation_file": ("custom.dev", "data.validation"),
    "input": ("source", "data.store"),
    "wandb": ("tracker",),
    "report_to": ("tracker",),
}
# Their flags for the device, which a variable of the environment chooses here for every command.
DEVICE = ("device", "no_cuda", "use_cpu")


def with_new_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line in today's flags, and a notice for each flag that was spelled otherwise."""
    words, notices = [], []
    for word in argv:
        spelled = word.split("=")[0].replace("_", "-")
        old = next((old for old in FLAGS if spelled == old or (old.endswith(".") and spelled.startswith(old))), None)
        if old is not None:
            word = FLAGS[old] + word[len(old) :]
            notices.append(f"{spelled} is now {word.split('=')[0]}")
        words.append(word)
    return words, notices


def refuse_other_names(argv: Sequence[str], names: Mapping[str, str]) -> None:
    """Raise InputError, with our name, for a flag of another program. names: its flags, and ours."""
    for word in argv:
        spelled = word.split("=")[0].replace("_", "-")
        if spelled in names:
            raise InputError(f"{word.split('=')[0]} is not an option; did you mean {names[spelled]}?")


@contextlib.contextmanager
def usage_in_one_line(argv: Sequence[str], program: str) -> Iterator[None]:
    """Raise InputError where tyro refuses the command line `argv` of `program`, in place of its exit with a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as ended:
        if ended.code:
            raise _usage_error(said.getvalue(), argv, program) from None
        raise


def _usage_error(box: str, argv: Sequence[str], program: str) -> InputError:
    """Return the error in one line. box: what tyro printed."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ \t")
        if text.startswith(("─", "├")):
            parts.append([])
        elif text and not text.startswith(("╭", "╰")):
            parts[-1].append(text)
    first, rest = " ".join(parts[0]), [line for part in parts[1:] for line in part]
    lists, describes = (f"`{program} --help` {verb}" for verb in ("lists the options", "describes it"))
    if found := re.match(r"Missing value for argument '(\S+)'", first):
        return InputError(f"{found[1]} must have a value, got none; {describes}")
    if found := re.match(r"Unrecognized options?: ([^\s,]+)", first):
        near = next((line.split()[0] for line in rest if line.startswith("--") and "help" not in line), None)
        return InputError(f"{found[1]} is not an option; " + (f"did you mean {near}?" if near else lists))
    if found := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", first):
        known = [name for name in re.findall(r"'([^']*)'", found[3]) if name != "None"]
        return InputError(f"{found[2]} must be one of {', '.join(known)}, got {found[1]}; choose one of them")
    if found := re.match(r"Error parsing (\S+): ", first):
        names = found[1].split("/")  # of a flag with a short spelling: -b/--batch-size
        shown = (re.search(rf"{names[-1]} ([^,]+)$", line) for line in rest)
        kind = next((line[1] for line in shown if line), "VALUE")
        numbers = {"INT": "a whole number", "FLOAT": "a number"}
        words = [numbers.get(part, part.strip("{}")) for part in kind.split("|")]
        kind = f"of the form {kind}" if words == [kind] else " or ".join(words)
        spelled = [word.split("=")[0].replace("_", "-") for word in argv]
        at = next((n for n, word in enumerate(spelled) if word in names), 0)
        following = itertools.takewhile(lambda word: not word.startswith("--"), argv[at + 1 :])
        given = argv[at].partition("=")[2] or " ".join(following) or "nothing"
        return InputError(f"{names[-1]} must be {kind}, got {given}; {describes}")
    if first.startswith("Missing from") and (names := [line.split()[0] for line in parts[0] if line.startswith("--")]):
        others = [word for part in parts if part[:1] == ["Unrecognized options:"] for word in part[1:2]]
        unknown = f", and {others[0]} is not an option" if others else ""
        return InputError(f"{' and '.join(names)} must be given{unknown}; {lists}")
    return InputError(f"{first or 'the command line must be complete'}; {lists}")
