"""What every process of a node does around its work: event loop, signals, and reports to the node that started it."""

import importlib.util
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from kvflow.errors import cause_of
from kvflow.node.lifeline import Supervision, report_error, report_ready
from kvflow.node.signals import run_until_signal

Ready = Callable[[], None]


def run_process(work: Callable[[Ready], Awaitable[None]], supervision: Supervision | None) -> None:
    """Run `work(ready)` on uvloop where it is installed, until a stop signal; report readiness or the error upwards."""
    use_uvloop = importlib.util.find_spec("uvloop") is not None
    served = False

    def ready() -> None:
        nonlocal served
        served = True
        if supervision:
            report_ready(supervision)

    try:
        anyio.run(run_until_signal, partial(work, ready), backend_options={"use_uvloop": use_uvloop})
    except BaseException as error:
        found = cause_of(error)
        if found is None:
            raise
        if supervision and not served and report_error(supervision, found):
            sys.exit(found.exit_code)  # the node says it: twice would be once too often
        raise found from error
