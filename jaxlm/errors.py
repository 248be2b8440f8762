"""Errors that a user can fix, and the exit codes that all commands share.

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
LOGGERS = ("jaxlm", "py.warnings")  # the program's messages and libraries' warnings, one line each


class InputError(Exception):
    """Wrong input or usage. The message is one line: the field or file, the rule, the value and the fix."""


class RunError(Exception):
    """A failure of a run that is not due to its input: a full disk, exhausted memory, a loss that is not finite."""


class Stopped(Exception):
    """A stop by SIGTERM or SIGINT after everything was saved; the same command continues."""


def run_command(main: Callable[[], None]) -> None:
    """Call `main` and end the process with the exit code for its outcome and one line on standard error."""
    _log_to_standard_error()
    try:
        main()
    except (InputError, RunError, Stopped, KeyboardInterrupt, BrokenPipeError) as error:
        sys.exit(report(error))


def report(error: BaseException) -> int:
    """Print why the program ended and return its exit code (one line for expected errors)."""
    match error:
        case InputError():
            print(f"error: {one_line(error)}", file=sys.stderr)
            return EXIT_INPUT
        case RunError():
            print(f"failed: {one_line(error)}", file=sys.stderr)
        case Stopped():
            print(one_line(error), file=sys.stderr)
            return EXIT_STOPPED
        case KeyboardInterrupt():  # in a command that has nothing to save
            print("failed: interrupted", file=sys.stderr)
        case BrokenPipeError():  # the reader of the output has ended (`| head`)
            sys.stderr.close()
        case _:
            traceback.print_exception(error)
    return EXIT_FAILED


class _Plain(logging.Formatter):
    """A formatter that prints the message alone; warnings get a prefix."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().strip()
        return f"warning: {text}" if record.levelno >= logging.WARNING else text


def _log_to_standard_error() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library may have added a handler to the root logger
        logger.handlers = [handler]
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_, **__: one_line(message)


def one_line(error: BaseException | str) -> str:
    """Return the text of an error with single blanks as white space; a long text is shortened to its two ends."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE // 2]} … {text[-LONGEST_LINE // 2 :]}"
