"""Follow the lifecycle events of a cluster and print them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from kvflow.actors.base import Mailbox, decoding_handler
from kvflow.bus.connect import connect_bus
from kvflow.bus.port import Bus, BusState
from kvflow.config import Settings
from kvflow.events import EventSink
from kvflow.messages import AnyMessage, EngineEvent, Subjects, TransferEvent
from kvflow.monitor.filter import Event, EventFilter
from kvflow.monitor.render import as_json, as_text

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Say what to show and when to end; None means no end."""

    event_filter: EventFilter = field(default_factory=EventFilter)
    since_s: float = 0.0
    count: int | None = None
    timeout_s: float | None = None
    as_json: bool = False


def run_watch(settings: Settings, options: WatchOptions) -> None:
    """Print events on stdout until the options or Ctrl-C end it; raise BusError when NATS cannot be reached."""
    colors = sys.stdout.isatty() and not options.as_json

    def show(event: Event) -> None:
        line = as_json(event) if options.as_json else as_text(event, colors=colors)
        # Flushed each time: whoever reads from a pipe wants events when they happen.
        print(line, flush=True)  # noqa: T201

    anyio.run(_connect_and_watch, settings, options, show)


async def watch_events(bus: Bus, subjects: Subjects, options: WatchOptions, show: Callable[[Event], None]) -> int:
    """Show events until the options end it; return how many were shown."""
    mailbox: Mailbox[AnyMessage] = Mailbox("watch")
    handler = decoding_handler(mailbox, None, TransferEvent, EngineEvent)
    subscription = await bus.replay(subjects.stream("events"), subjects.events_all(), handler, since_s=options.since_s)
    shown = 0
    try:
        with anyio.move_on_after(options.timeout_s):
            while options.count is None or shown < options.count:
                event = await mailbox.get()
                if isinstance(event, TransferEvent | EngineEvent) and options.event_filter.accepts(event):
                    show(event)
                    shown += 1
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
            await subscription.unsubscribe()
    return shown


async def _connect_and_watch(settings: Settings, options: WatchOptions, show: Callable[[Event], None]) -> None:
    subjects = Subjects(settings.cluster)
    bus = await connect_bus(settings, name="kvflow-watch", on_state=_log_state)
    try:
        # Whoever comes first makes the stream, so that watching may begin before any node runs.
        await EventSink(bus, subjects, "watch").ensure_stream(settings.events_retention_s)
        await watch_events(bus, subjects, options, show)
    finally:
        with anyio.CancelScope(shield=True):
            await bus.close()


def _log_state(state: BusState, detail: str) -> None:
    if state not in {"connected", "closed"}:
        log.warning("bus_state", state=state, detail=detail)
