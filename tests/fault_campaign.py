"""The fault campaign: seed after seed, a fault, a reading, and a judgement, written to a journal.

`python tests/fault_campaign.py DIRECTORY FIRST END` judges seeds that the journal does not have; a seed that ended the
process is judged by whoever starts it again. Every tenth seed damages what a command reads, and runs the command.
"""

import contextlib
import functools
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fault_subjects import RECORDS, Subject, subjects
from faults import Fault, copied, damage

from jaxlm.errors import InputError, RunError, one_line

SECONDS = 60  # that a reading may take longer than the undamaged one
MEMORY = 1 << 30  # bytes of addresses that a reading may take
NOBODY = 65534
COMMAND_EVERY = 10
SOUND = ("refused", "refused by fingerprint", "recovered", "unaffected", "a record differs")


class TooLong(BaseException):
    """A reading did not end."""


@contextlib.contextmanager
def bounded(fault: Fault) -> Iterator[None]:
    """Limits of time and memory, and the rights of somebody else where the fault takes them away."""

    def ring(*_: Any) -> None:
        raise TooLong(f"no end after {SECONDS} s")

    former = signal.signal(signal.SIGALRM, ring)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY, limits[1]))
    drops = fault.forbidden and os.geteuid() == 0
    signal.alarm(SECONDS)
    if drops:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if drops:
            os.seteuid(0)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings that are logged."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("jaxlm").addHandler(listener)
    try:
        yield lines
    finally:
        logging.getLogger("jaxlm").removeHandler(listener)


class Specimens:
    """The undamaged files of each subject and what reading them gives, made once for a campaign."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.subjects = {subject.name: subject for subject in subjects()}

    @functools.cache  # noqa: B019
    def of(self, name: str) -> tuple[Path, tuple[Any, Any]]:
        """A specimen and what reading it gives."""
        place = self.directory / name.replace(" ", "-")
        if not place.exists():
            fresh = place.with_name(place.name + ".new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            self.subjects[name].make(fresh)
            fresh.rename(place)
        return place, self.subjects[name].read(self._elsewhere(place))

    def judged(self, seed: int) -> dict[str, Any]:
        """One fault of a seed, and how reading it ends."""
        rng = random.Random(seed)
        some = list(self.subjects.values())
        subject = rng.choices(some, [each.weight for each in some])[0]
        specimen, expected = self.of(subject.name)
        copy = self._elsewhere(specimen)
        fault = damage(copy, rng, only=subject.only)
        began = time.monotonic()
        outcome, said = judgement(subject, copy, expected, fault)
        _remove(copy)
        return {
            "seed": seed,
            "subject": subject.name,
            "kind": fault.kind,
            "fault": str(fault),
            "outcome": outcome,
            "said": said,
            "seconds": round(time.monotonic() - began, 2),
        }

    def _elsewhere(self, specimen: Path) -> Path:
        """A copy in a place that is the same for all copies of a specimen: results name their places."""
        place = Path(tempfile.gettempdir()) / f"jaxlm-faults-{os.getpid()}" / specimen.name
        _remove(place)
        place.parent.mkdir(exist_ok=True)
        place.parent.chmod(0o755)
        return copied(specimen, place)


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


def judgement(subject: Subject, copy: Path, expected: tuple[Any, Any], fault: Fault) -> tuple[str, str]:
    """How a reading of damaged files ends: one of SOUND, or what is wrong; and what it said."""
    with warned() as warnings:
        try:
            with bounded(fault):
                pin, result = subject.read(copy)
        except (InputError, RunError) as error:
            said = one_line(error)
            return ("refused", said) if str(copy) in said else ("a line that names no file", said)
        except TooLong as error:
            return "no end", str(error)
        except (Exception, SystemExit) as error:  # whatever it is, a user would see a traceback
            return "traceback", f"{type(error).__name__}: {one_line(error)[:500]}"
    said = "; ".join(warnings)
    if (pin, result) == expected:
        return ("recovered" if warnings else "unaffected"), said
    if pin != expected[0]:
        return "refused by fingerprint", said
    if Path(fault.path).name in RECORDS:
        return "a record differs", said
    if warnings and any(result == other for other in subject.older(copy)):
        return "recovered", said
    return "silent difference", said


def main(directory: Path, first: int, end: int) -> None:
    """Judge the seeds from `first` to `end` - 1 that the journal lacks."""
    from fault_commands import Commands

    directory.mkdir(parents=True, exist_ok=True)
    specimens, commands = Specimens(directory / "specimens"), Commands(directory / "commands")
    known = {line["seed"] for line in journal(directory)}
    doing = directory / f"doing-{first}"
    for seed in range(first, end):
        if seed in known:
            continue
        doing.write_text(str(seed))
        line = (commands if seed % COMMAND_EVERY == 0 else specimens).judged(seed)
        write(directory, line)
    doing.unlink(missing_ok=True)
    shutil.rmtree(commands.place.parent, ignore_errors=True)
    shutil.rmtree(Path(tempfile.gettempdir()) / f"jaxlm-faults-{os.getpid()}", ignore_errors=True)


def journal(directory: Path) -> list[dict[str, Any]]:
    """What was judged: the last line of each seed; a torn line is left out."""
    found: dict[int, dict[str, Any]] = {}
    file = directory / "journal.jsonl"
    for text in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            found[line["seed"]] = line
    return list(found.values())


def write(directory: Path, line: dict[str, Any]) -> None:
    """Append to the journal."""
    with (directory / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
