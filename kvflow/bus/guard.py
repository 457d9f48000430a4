"""Keep the bus going whatever a handler or a dying connection does."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from kvflow.errors import BusError

T = TypeVar("T")

_FORBIDDEN = frozenset("*> \t\r\n\0")

log = structlog.get_logger()


# nats-server ends a connection that sends a control line above 4096 bytes; the rest is for reply subjects and sizes.
MAX_SUBJECT_LENGTH = 3584
CANCEL_WAIT_S = 0.5
CANCEL_TRIES = 6


def check_subject(subject: str) -> None:
    """Refuse to publish to a pattern or to what the server would answer by ending the connection; raise BusError."""
    if len(subject) > MAX_SUBJECT_LENGTH or not all(subject.split(".")) or not _FORBIDDEN.isdisjoint(subject):
        raise BusError(f"cannot publish to {subject[:80]!r}: not a subject")


def call_guarded(handler: Callable[[T], object], item: T) -> None:
    """Call a handler; log what it raises."""
    try:
        handler(item)
    except Exception as error:
        log.exception("handler_failed", handler=getattr(handler, "__qualname__", repr(handler)), error=str(error))


def call_on(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Run `work` soon on a loop (perhaps another thread's), in the order of the calls; a closed loop runs nothing."""
    if loop.is_closed():
        return
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        loop.call_soon(work)
    else:
        with contextlib.suppress(RuntimeError):  # it was closed just now
            loop.call_soon_threadsafe(work)


async def end_task(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for its end, within a bound.

    Up to Python 3.11 `wait_for`, which nats-py uses, loses a cancellation that meets its result: it may take two.
    """
    for _ in range(CANCEL_TRIES):
        task.cancel()
        done, _pending = await asyncio.wait({task}, timeout=CANCEL_WAIT_S)
        if done:
            return
    log.error("task_did_not_end", task=task.get_name())


async def bounded(work: Awaitable[None], timeout_s: float) -> None:
    """Run a closing step for at most `timeout_s`; what it raises no longer matters to anybody."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if done and not task.cancelled() and task.exception() is not None:
        log.debug("bus_close_failed", error=str(task.exception()))
