"""What a command prints and returns when it does not succeed."""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from kvflow.errors import KvflowError, cause_of

P = ParamSpec("P")

EXIT_UNEXPECTED = 70  # sysexits' EX_SOFTWARE
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def reporting_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into one readable line (or a traceback for a defect) and an exit code."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            leave_broken_pipe()
        except Exception as error:  # noqa: BLE001 - the last resort of a program; nothing is hidden
            known = cause_of(error)
            if known is None:
                traceback.print_exc()
                sys.exit(EXIT_UNEXPECTED)
            print(describe(known), file=sys.stderr)
            sys.exit(known.exit_code)

    return guarded


def leave_broken_pipe() -> NoReturn:
    """Exit as a program does whose reader has gone, without Python's complaint about unwritten output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_BROKEN_PIPE)


def describe(error: KvflowError) -> str:
    """Return what a person should read about an error."""
    hint = f" (hint: {error.remedy})" if error.remedy else ""
    return f"kvflow: error: {error.message}{hint}"
