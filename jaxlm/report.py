"""Write one HTML page that compares runs: `python -m jaxlm.report RUN … --output report.html`.

The page holds everything that it shows and needs no network: curves of all runs with zoom, smoothing and logarithmic
axes, the fields that differ, results of fine-tuning over seeds, confusion matrices, calibration, wrong predictions,
zero-shot tasks, samples and starts. A target is a run directory, a run at gs://, or a .json file that jaxlm.evaluate
wrote. Runs that are being trained are read as far as they are. The same files give the same page.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxlm.config import command_line
from jaxlm.errors import InputError, run_command
from jaxlm.files import atomic_output, check_output, read_regular
from jaxlm.ranges import Range
from jaxlm.wording import byte_size, counted

LONGEST_NOTE = 1 << 20  # bytes


@dataclass(frozen=True)
class Arguments:
    """Write one HTML page that compares runs."""

    targets: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, runs at gs://, or .json files that jaxlm.evaluate wrote with --output."""
    output: Path
    """The page, a file ending in .html."""
    note: Path | None = None
    """A text in Markdown for the top of the page: headings, lists, code and emphasis."""
    examples: Annotated[int, Range(0, fix="give 0 to show none")] = 20
    """Predictions and samples of each run."""


ARGUMENTS = (Arguments,)


def main() -> None:
    """Write the page and print its size."""
    arguments, _ = command_line(Arguments, program="report", description=__doc__)
    if not arguments.targets:
        raise InputError("at least one run must be given, got none; name run directories")
    if arguments.output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output must end in .html, got {arguments.output}; choose another name")
    check_output(arguments.output)
    write_report(arguments)


def write_report(arguments: Arguments) -> None:
    """Read the runs and write the page. What reads them is imported here, after the command line."""
    from jaxlm.views.report.page import page_html
    from jaxlm.views.report.run_record import read_targets

    note = None if arguments.note is None else _read_note(arguments.note)
    records, evaluations, problems = read_targets(arguments.targets, arguments.examples)
    page = page_html(records, evaluations, problems, note)
    with atomic_output(arguments.output) as file:
        file.write(page)
    shown = [counted(len(found), noun) for found, noun in ((records, "run"), (evaluations, "evaluation")) if found]
    print(f"{arguments.output}: {' and '.join(shown)}, {byte_size(len(page.encode()))}")


def _read_note(path: Path) -> str:
    """Return the text of a note. InputError if it cannot be read."""
    try:
        return read_regular(path, LONGEST_NOTE).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"--note {path} cannot be read: {reason}; give a text file in Markdown") from error


if __name__ == "__main__":
    run_command(main)
