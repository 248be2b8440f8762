"""Single random faults in a directory: what a disk, a copy, a hand or a file system may do to one of its files.

A fault is drawn from a random generator, so that a seed brings it back on the same files.
"""

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

# By how often they are drawn. What does not fit a file (a block of an empty one) becomes a truncation.
WEIGHTS = {
    "flip a bit": 6,
    "set a byte": 3,
    "zero a block": 2,
    "truncate": 3,
    "append": 1,
    "delete": 2,
    "duplicate a block": 2,
    "swap two blocks": 2,
    "change a value": 3,
    "nest": 1,
    "make a directory": 1,
    "make a pipe": 1,
    "make a device": 1,
    "take the right to read": 2,
}
VALUES = ["NaN", "-Infinity", "1e999", "-1", "0", "3", "99999999999999999999999", "1" * 5000, "null", '"x"', "[]", "{}"]
VALUES += ["true", '"../../../etc/passwd"', '"/dev/zero"', '"\\ud800"', "2.5"]
_NUMBER = re.compile(rb'(?<=[:,\[] )-?\d+(?:\.\d+)?(?:e-?\d+)?|(?<=: )"[^"\n]{0,60}"|true|false|null')
SKIPPED = ("lock",)  # a run's lock holds nothing


@dataclass(frozen=True)
class Fault:
    """What was done. path: of the file, below the directory. forbidden: only root may read it now."""

    kind: str
    path: str
    detail: str = ""
    forbidden: bool = False

    def __str__(self) -> str:
        return f"{self.kind} in {self.path}" + (f" ({self.detail})" if self.detail else "")


def files_of(directory: Path) -> list[Path]:
    """The files, in an order that random names in them (Orbax's) do not decide."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name not in SKIPPED]
    key = lambda path: (len(path.parts), str(path.parent.relative_to(directory)), path.stat().st_size, path.name)  # noqa: E731
    return sorted(found, key=key)


def damage(directory: Path, rng: random.Random, *, only: str | None = None) -> Fault:
    """Do one random fault to one random file below a directory.

    only: a folder, `run/`, whose files are meant, or a pattern that the name of the file must match.
    """
    files = files_of(directory)
    if only is not None and only.endswith("/"):
        files = [path for path in files if path.relative_to(directory).is_relative_to(only)]
    elif only is not None:
        files = [path for path in files if path.match(only)]
    # Of many files of one kind, as a checkpoint has them, not more than of others: by folder, then by file.
    folder = rng.choice(sorted({path.parent for path in files}))
    files = [path for path in files if path.parent == folder]
    file = rng.choice(files)
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    content = file.read_bytes()
    name = str(file.relative_to(directory))
    if kind == "delete":
        file.unlink()
    elif kind == "make a directory":
        file.unlink()
        file.mkdir()
    elif kind == "make a pipe":
        file.unlink()
        os.mkfifo(file)
    elif kind == "make a device":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif kind == "take the right to read":
        file.chmod(0)
        return Fault(kind, name, forbidden=True)
    else:
        changed, detail = _changed(content, kind, rng)
        if changed == content:
            kind, changed, detail = "truncate", content[: len(content) // 2], "to its half"
        if changed == content:
            kind, changed, detail = "append", b"\0", "a zero"
        file.write_bytes(changed)
        return Fault(kind, name, detail)
    return Fault(kind, name)


def _changed(content: bytes, kind: str, rng: random.Random) -> tuple[bytes, str]:
    """The content with a fault in it, and where; the content itself where the kind does not fit."""
    size = len(content)
    if not size:
        return content, ""
    at = rng.randrange(size)
    block = rng.choice([1, 7, 64, 512, 4096])
    other = rng.randrange(size)
    if kind == "flip a bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :], f"byte {at}"
    if kind == "set a byte":
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :], f"byte {at}"
    if kind == "zero a block":
        return content[:at] + bytes(len(content[at : at + block])) + content[at + block :], f"{block} from {at}"
    if kind == "truncate":
        return content[:at], f"to {at} of {size}"
    if kind == "append":
        return content + rng.randbytes(block), f"{block} bytes"
    if kind == "duplicate a block":
        return content[: at + block] + content[at:], f"{block} at {at}"
    if kind == "swap two blocks":
        first, second = sorted((at, other))
        block = min(block, second - first, size - second)
        one, two = content[first : first + block], content[second : second + block]
        between = content[first + block : second]
        return content[:first] + two + between + one + content[second + block :], f"{block} at {first} and {second}"
    values = list(_NUMBER.finditer(content))
    if not values:
        return content, ""
    value = rng.choice(values)
    new = b"[" * 200_000 + b"]" * 200_000 if kind == "nest" else rng.choice(VALUES).encode()
    detail = f"{value.group().decode(errors='replace')} -> {new[:20].decode()}"
    return content[: value.start()] + new + content[value.end() :], detail


def copied(specimen: Path, to: Path) -> Path:
    """A fresh copy of a specimen to damage, which anybody may read."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(specimen, to, symlinks=True)
    return to
