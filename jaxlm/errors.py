"""Errors that a user can mend, and the exit codes every command shares.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 75 stopped by a signal with everything saved.
"""

import logging
import sys
import traceback
import warnings
from collections.abc import Callable

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_STOPPED = 75

LONGEST_LINE = 4000
LOGGERS = ("jaxlm", "py.warnings")  # what the program says, and what libraries warn about, a line each


class InputError(Exception):
    """Wrong input or usage. The message is one line: the file or field, the rule, the remedy."""


class RunError(Exception):
    """A run that cannot go on for a reason that is not the input's: a full disk, memory, a loss that is not finite."""


class Stopped(Exception):
    """SIGTERM or SIGINT arrived and everything is saved; the same command continues."""


def run_command(main: Callable[[], None]) -> None:
    """Call `main` and end the process with the exit code its outcome asks for, one line on standard error."""
    _say_on_standard_error()
    try:
        main()
    except (InputError, RunError, Stopped, KeyboardInterrupt, BrokenPipeError) as error:
        sys.exit(report(error))


def report(error: BaseException) -> int:
    """Say on standard error what ended the program, in one line where it is no bug; its exit code."""
    match error:
        case InputError():
            print(f"error: {one_line(error)}", file=sys.stderr)
            return EXIT_INPUT
        case RunError():
            print(f"failed: {one_line(error)}", file=sys.stderr)
        case Stopped():
            print(one_line(error), file=sys.stderr)
            return EXIT_STOPPED
        case KeyboardInterrupt():  # of a command that has nothing to save
            print("failed: interrupted", file=sys.stderr)
        case BrokenPipeError():  # the reader of our output went away (`| head`)
            sys.stderr.close()
        case _:
            traceback.print_exception(error)
    return EXIT_FAILED


class _Plain(logging.Formatter):
    """The message alone; a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().strip()
        return f"warning: {text}" if record.levelno >= logging.WARNING else text


def _say_on_standard_error() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library may have given the root a handler of its own
        logger.handlers = [handler]
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_, **__: one_line(message)


def one_line(error: BaseException | str) -> str:
    """The text of an error, its white space made single blanks; of a long one, which quotes a file, both ends."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE // 2]} … {text[-LONGEST_LINE // 2 :]}"
