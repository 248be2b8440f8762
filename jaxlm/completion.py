"""Completion scripts of the console script for bash and zsh.

A script holds all words, so that TAB starts no Python: the commands, the names of the configs, the flags of each
command or subcommand with all members of its unions, and the values of flags with a fixed set of them. Where it has no
word, the shell completes files. The script is of the version that printed it.
"""

import shlex
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.config import known_configs
from jaxlm.flags import fields_of, positional_fields, subcommands_of
from jaxlm.wording import flag


@dataclass(frozen=True)
class Completed:
    """A command: its name, its one-line summary, and the dataclasses or unions that its command line is parsed into."""

    name: str
    summary: str
    arguments: Sequence[Any]


@dataclass(frozen=True)
class Words:
    """Words after a command: names for its first argument, its flags, and the values of flags that have a fixed set."""

    command: str
    names: tuple[str, ...]
    flags: tuple[str, ...]
    values: tuple[tuple[str, tuple[str, ...]], ...]


def words_of(command: Completed) -> Iterator[Words]:
    """Yield the words of a command and of each of its subcommands."""
    subcommands = {
        name: member
        for kind in command.arguments
        for name, member in zip(subcommands_of(kind), typing.get_args(kind), strict=False)
    }
    if not subcommands:
        yield _words(command.name, command.arguments)
        return
    yield Words(command.name, tuple(subcommands), ("--help",), ())
    for name, member in subcommands.items():
        yield _words(f"{command.name} {name}", [member])


def _words(command: str, arguments: Sequence[Any]) -> Words:
    positional = {name for kind in arguments for name in positional_fields(kind)}
    flags: dict[str, tuple[str, ...]] = {"--help": ()}
    for kind in arguments:
        for name, hint in fields_of(kind):
            if name in positional:
                continue
            values = tuple(dict.fromkeys((*flags.get(flag(name), ()), *_choices(hint))))
            flags[flag(name)] = values  # a field of several members has the values of all of them
            if hint is bool:
                parent, _, last = name.rpartition(".")
                flags[flag(f"{parent}.no_{last}" if parent else f"no_{last}")] = ()
    names = tuple(known_configs()) if positional & {"config", "target"} else ()
    return Words(command, names, tuple(flags), tuple((name, values) for name, values in flags.items() if values))


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the words that a field accepts, or none if it accepts others too."""
    if typing.get_origin(hint) is typing.Annotated:
        return _choices(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(str, typing.get_args(hint)))
    found = [part for part in typing.get_args(hint) if part is not type(None)]
    return tuple(word for part in found for word in _choices(part))


def script(shell: str, commands: Sequence[Completed]) -> str:
    """Return the script of a shell, bash or zsh."""
    words = [found for command in commands for found in words_of(command)]
    nested = [one.name for one in commands if any(found.command.startswith(f"{one.name} ") for found in words)]
    return {"bash": _bash, "zsh": _zsh}[shell](commands, words, nested)


def _bash(commands: Sequence[Completed], words: Sequence[Words], nested: Sequence[str]) -> str:
    first = " ".join([*(command.name for command in commands), "--help", "--version", "--completion"])
    lines = [
        "# bash completion of jaxlm; in ~/.bashrc: source <(jaxlm --completion bash)",
        "_jaxlm() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}",
        "  local command=${COMP_WORDS[1]} at=2 names='' flags='' values=''",
        "  COMPREPLY=()",
        "  if ((COMP_CWORD == 1)); then",
        f'    COMPREPLY=($(compgen -W {shlex.quote(first)} -- "$current"))',
        "    return",
        "  fi",
        *_nested(nested, '((COMP_CWORD > 2)) && command="$command ${COMP_WORDS[2]}" at=3'),
        "  case $command in",
    ]
    for one in words:
        lines += [f"    {shlex.quote(one.command)})", f"      names={_joined(one.names)} flags={_joined(one.flags)}"]
        lines += [*_values(one, lambda values: f"values={_joined(values)}"), "      ;;"]
    lines += [
        "    --completion) names='bash zsh' ;;",
        "  esac",
        "  if [[ -n $values ]]; then",
        '    COMPREPLY=($(compgen -W "$values" -- "$current"))',
        "  elif [[ $current == -* ]]; then",
        '    COMPREPLY=($(compgen -W "$flags" -- "$current"))',
        "  elif ((COMP_CWORD == at)); then",
        '    COMPREPLY=($(compgen -W "$names" -- "$current"))',
        "  fi",
        "}",
        "complete -o bashdefault -o default -F _jaxlm jaxlm",
    ]
    return "\n".join(lines)


def _zsh(commands: Sequence[Completed], words: Sequence[Words], nested: Sequence[str]) -> str:
    described = [shlex.quote(f"{one.name}:{one.summary}") for one in commands]
    lines = [
        "#compdef jaxlm",
        "# zsh completion of jaxlm; in ~/.zshrc, after compinit: source <(jaxlm --completion zsh)",
        "_jaxlm() {",
        "  local command=$words[2] current=$words[CURRENT] previous=$words[CURRENT-1] at=3",
        "  local -a commands names flags values",
        "  if ((CURRENT == 2)); then",
        f"    commands=({' '.join(described)})",
        "    _describe command commands",
        "    compadd -- --help --version --completion",
        "    return",
        "  fi",
        *_nested(nested, '((CURRENT > 3)) && { command="$command $words[3]"; at=4; }'),
        "  case $command in",
    ]
    for one in words:
        names, flags = shlex.join(one.names), shlex.join(one.flags)
        lines += [f"    {shlex.quote(one.command)})", f"      names=({names}) flags=({flags})"]
        lines += [*_values(one, lambda values: f"values=({shlex.join(values)})"), "      ;;"]
    lines += [
        "    --completion) names=(bash zsh) ;;",
        "  esac",
        "  if (($#values)); then",
        "    compadd -a values",
        "  elif [[ $current == -* ]]; then",
        "    compadd -a flags",
        "  else",
        "    ((CURRENT == at)) && compadd -a names",
        "    ((CURRENT == at)) && [[ -n $names && $names[1] != */* ]] || _files  # a subcommand is not a file",
        "  fi",
        "}",
        "compdef _jaxlm jaxlm",
    ]
    return "\n".join(lines)


def _nested(commands: Sequence[str], action: str) -> list[str]:
    """Return the lines that add a subcommand to the command, for the commands that have some."""
    return ["  case $command in", f"    {' | '.join(commands)}) {action} ;;", "  esac"] if commands else []


def _values(one: Words, assigned: Callable[[tuple[str, ...]], str]) -> list[str]:
    """Return the lines that set the values of the flag before the cursor."""
    if not one.values:
        return []
    cases = [f"        {name}) {assigned(values)} ;;" for name, values in one.values]
    return ["      case $previous in", *cases, "      esac"]


def _joined(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))
