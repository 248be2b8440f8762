"""Parts of messages and of JSON: counted nouns, suggestions for misspelled words, fields as flags, and NaN."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `1,200 steps`, `0.5 epochs`. plural: default, the noun and an s."""
    shown = f"{number:,}" if isinstance(number, int) else plain_number(number)
    return f"{shown} {noun if number == 1 else plural or noun + 's'}"


def either(words: Sequence[str]) -> str:
    """Return words as `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def plain_number(value: float) -> str:
    """Return a number with three significant digits, never in scientific notation from 0.001 on: `32,700`, `0.21`."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def byte_size(size: float) -> str:
    """Return a number of bytes as `740 bytes`, `23.4 kB`, `1.2 MB` or `3.5 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return counted(int(size), "byte")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean X?` with the name in `known` that is nearest to a misspelled word, else `otherwise`.

    Case, hyphens and underscores are ignored in the comparison.
    """
    names = {_folded(name): name for name in known}
    near = difflib.get_close_matches(_folded(word), names, n=1)
    return f"did you mean {names[near[0]]}?" if near else otherwise


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the three names in `known` that are nearest to a word, the nearest first, separated by commas."""
    return ", ".join(difflib.get_close_matches(word, list(known), n=3, cutoff=0.0))


def lacks_field(where: str, names: str | Sequence[str], known: Iterable[str], remedy: str = "") -> str:
    """Return the error for a row at `where` without a field, or without any of several names of one.

    known: the fields that the row has.
    """
    wanted = " or ".join(map(repr, [names] if isinstance(names, str) else names))
    has = ", ".join(known)[:300] or "none"
    return f"{where} has no field {wanted}; its fields are {has}" + (f"; {remedy}" if remedy else "")


def similar_directory(path: str | Path, holding: str, otherwise: str = "") -> str:
    """Return `did you mean X?` with the directory next to a missing one that is nearest in name, else `otherwise`.

    holding: name of a file that the directory must contain.
    """
    place = Path(path)
    try:
        names = [entry.name for entry in place.parent.iterdir() if (entry / holding).is_file()]
    except OSError:
        return otherwise
    near = difflib.get_close_matches(place.name, names, n=1)
    return f"did you mean {place.parent / near[0]}?" if near else otherwise


def flag(field: str) -> str:
    """Return the flag of a field: `--optimizer.peak-lr` for `optimizer.peak_lr`."""
    return "--" + field.replace("_", "-")


def with_flags(text: str, fields: Collection[str]) -> str:
    """Return an error message with the names of fields as flags.

    Names with a dot or an underscore are replaced everywhere but in quotes and paths. A name that is also an English
    word (`length`) is replaced at the beginning of the text, or after a colon or semicolon, before `must` and before
    `: OLD -> NEW`.
    """
    if not fields:
        return text
    longest_first = sorted(fields, key=len, reverse=True)
    special = "|".join(re.escape(name) for name in longest_first if "_" in name or "." in name)
    plain = "|".join(re.escape(name) for name in longest_first if not ("_" in name or "." in name))
    before, after = r"(?<![\w./'\"`-])", r"(?![\w/'\"`=-]|\.\w)"
    for pattern in (
        rf"{before}(?:{special}){after}" if special else "",
        rf"(?:^|(?<=[:;] ))(?:{plain})(?= must\b|: [^;]* -> )" if plain else "",
    ):
        if pattern:
            text = re.sub(pattern, lambda match: flag(match[0]), text)
    return text


def with_arguments(text: str) -> str:
    """Return an error message with flags as arguments of a function: `top_p` for `--top-p`.

    What follows the name of a program, up to a semicolon, is a command line, which keeps its flags.
    """
    return ";".join(map(_without_flags, text.split(";")))


def _without_flags(clause: str) -> str:
    found = re.search(r"python -m |pip |launch/|gcloud |hf (?:auth|upload)", clause)
    words, command = (clause[: found.start()], clause[found.start() :]) if found else (clause, "")
    return re.sub(r"(?<![\w-])--([a-z][\w.-]*)", lambda flag: flag[1].replace("-", "_"), words) + command


def _folded(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities, which JSON lacks, as the strings that Python's `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def shortened(text: str) -> str:
    """Return a text of an error, without its middle if it has more than 300 characters."""
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]}"
