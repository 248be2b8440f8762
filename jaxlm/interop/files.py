"""The small files of a published model, and a fingerprint of its files."""

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxlm.bounded_read import open_regular, parse_json, read_regular
from jaxlm.errors import InputError

DEEPEST = 100  # maximum nesting; Python's JSON writer, which stores a config.json with the run, supports some hundreds


def read_json(file: Path) -> Any:
    """Return the values of a JSON file. InputError, one line, if it is missing or damaged."""
    try:
        return parse_json(read_regular(file))
    except FileNotFoundError:
        raise InputError(f"{file.parent} has no {file.name}; give the directory of a whole published model") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); download it again") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); download it again") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return `read_json` of a file that must hold an object with finite numbers and limited nesting."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a JSON object; download it again")
    inside: list[tuple[str, int, Any]] = [("", 0, values)]
    while inside:
        name, depth, value = inside.pop()
        if depth > DEEPEST:
            raise InputError(f"{file} is not JSON (it is nested too deeply); download it again")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{file}: {name} must be a finite number, got {value}; download it again")
        if isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else ((name, item) for item in value)
            inside += [(key, depth + 1, item) for key, item in named]
    return values


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return the SHA-256 over the contents of files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
