"""Turn SIGTERM, SIGINT and SIGHUP into orderly cancellation."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import structlog

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = structlog.get_logger()


@dataclass(slots=True)
class StopRequest:
    """Carry the wish to stop: `stop` at the first signal, `hurry` at the second, which cuts the grace short."""

    stop: anyio.Event = field(default_factory=anyio.Event)
    hurry: anyio.Event = field(default_factory=anyio.Event)


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[StopRequest]:
    """Listen for stop signals while the block runs."""
    request = StopRequest()
    async with anyio.create_task_group() as group:
        await group.start(_listen, request)
        try:
            yield request
        finally:
            group.cancel_scope.cancel()


async def run_until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, cancelling it at the first stop signal; return normally then, so that the process exits with 0."""
    async with anyio.create_task_group() as group:

        async def cancel_on_signal(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with stop_on_signals() as request:
                task_status.started()
                await request.stop.wait()
                group.cancel_scope.cancel()

        await group.start(cancel_on_signal)  # before the work may say that it is ready, and be told to stop
        await work()
        group.cancel_scope.cancel()


async def _listen(request: StopRequest, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(*STOP_SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            log.info("stop_requested", signal=signal.Signals(number).name)
            if request.stop.is_set():
                request.hurry.set()
            request.stop.set()
