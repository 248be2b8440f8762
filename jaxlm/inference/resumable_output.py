"""Output files of JSON lines that a killed command continues: answers to prompts that are in the file are kept.

`OUTPUT.settings.json` beside the file holds the settings that made it. The file of the same prompts and settings is
continued after its last whole answer; any other file is refused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.atomic_write import check_output, write_json
from jaxlm.bounded_read import open_regular, parse_json, read_object
from jaxlm.errors import InputError


def settings_file(path: Path) -> Path:
    """Return the file of the settings of an output file."""
    return path.with_name(f"{path.name}.settings.json")


class ResumableOutput:
    """An output file with `per_prompt` lines for each of `prompts`, in order; each line has the field `prompt`.

    settings: what the lines depend on, by the names of flags without their dashes. done: the number of prompts whose
    lines were in the file when it was opened.
    InputError, before anything changes, if the file has other settings or prompts, or cannot be written.
    """

    def __init__(self, path: Path, prompts: Sequence[str], settings: Mapping[str, Any], *, per_prompt: int = 1) -> None:
        check_output(path)
        self.done, end = 0, 0
        if path.exists() and path.stat().st_size:
            _check_settings(path, settings)
            self.done, end = _answered(path, prompts, per_prompt)
        else:
            write_json(settings_file(path), dict(settings))
        self._file = path.open("ab")
        self._file.truncate(end)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the lines of the next prompt."""
        self._file.write(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
        self._file.flush()

    def __enter__(self) -> "ResumableOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError, with one difference, unless the file was made with these settings."""
    beside = settings_file(path)
    try:
        former = read_object(beside)
    except (OSError, ValueError):
        raise InputError(
            f"--output must be a new file or an earlier output of --prompts, got {path} without a readable "
            f"{beside.name}; name another file"
        ) from None
    for name in (*settings, *former):
        if settings.get(name) != former.get(name):
            raise InputError(
                f"--output must be a file of the same settings, got {path}, made with --{name} "
                f"{json.dumps(former.get(name))} instead of {json.dumps(settings.get(name))}; name another file"
            )


def _answered(path: Path, prompts: Sequence[str], per_prompt: int) -> tuple[int, int]:
    """Return the number of prompts with all their lines in the file, and the bytes of these lines.

    A killed process may leave the last prompt with fewer lines, and a last line without its end.
    """
    done = end = size = 0
    with open_regular(path) as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            if done == len(prompts):
                raise InputError(
                    f"--prompts must begin with the prompts of {path}, got {done} and the file has more; name another "
                    "--output"
                )
            if _prompt_of(line) != prompts[done]:
                raise InputError(
                    f"{path} line {number + 1} must be of prompt {done + 1} of --prompts, got another; name another "
                    "--output"
                )
            size += len(line)
            if (number + 1) % per_prompt == 0:
                done, end = done + 1, size
    return done, end


def _prompt_of(line: bytes) -> Any:
    try:
        return dict(parse_json(line)).get("prompt")
    except (ValueError, TypeError):
        return None
