"""Collect the lifecycle events of transfers, so that demo and tests can say what really crossed."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import structlog

from kvflow.bus.connect import connect_bus
from kvflow.bus.port import Delivery
from kvflow.config import Settings
from kvflow.directory import Directory
from kvflow.errors import KvflowError, WireError
from kvflow.messages import Subjects, TransferEvent, decode

ENDS = frozenset({"completed", "failed", "cancelled", "rejected"})

log = structlog.get_logger()


class EventsMissing(KvflowError):  # noqa: N818 - says what happened
    """The events that were waited for did not come."""


class EventLog:
    """Hold the events of every transfer in the order of their arrival."""

    def __init__(self) -> None:
        self._events: defaultdict[str, list[TransferEvent]] = defaultdict(list)
        self._arrived = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        """Handle a bus delivery."""
        try:
            event = decode(delivery.data)
        except WireError as error:
            log.warning("event_dropped", subject=delivery.subject, error=str(error))
            return
        if isinstance(event, TransferEvent):
            self._events[event.transfer_id].append(event)
            self._arrived.set()

    def of(self, transfer_id: str, kind: str = "") -> list[TransferEvent]:
        """Return the events of a transfer, of one kind when named."""
        return [event for event in self._events[transfer_id] if not kind or event.kind == kind]

    async def wait(
        self, transfer_id: str, enough: Callable[[list[TransferEvent]], bool], *, within_s: float = 15.0
    ) -> list[TransferEvent]:
        """Wait until the events of a transfer are enough and return them; raise EventsMissing naming what came."""
        try:
            async with asyncio.timeout(within_s):
                while not enough(self.of(transfer_id)):
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            came = ", ".join(f"{event.kind} {event.reason}".strip() for event in self.of(transfer_id)) or "none"
            raise EventsMissing(f"transfer {transfer_id}: after {within_s:g} s the events are {came}") from error
        return self.of(transfer_id)

    async def wait_ended(self, transfer_id: str, *, within_s: float = 15.0) -> list[TransferEvent]:
        """Wait until the target has all bytes or never will, and return all events of the transfer."""
        return await self.wait(
            transfer_id, lambda events: any(event.kind in ENDS for event in events), within_s=within_s
        )

    async def wait_for(self, transfer_id: str, *kinds: str, within_s: float = 15.0) -> list[TransferEvent]:
        """Wait until at least one event of each kind is there and return all events of the transfer."""
        return await self.wait(
            transfer_id, lambda events: {event.kind for event in events}.issuperset(kinds), within_s=within_s
        )


async def wait_for_engines(settings: Settings, engine_ids: Collection[str], *, within_s: float) -> None:
    """Wait until all ranks of these engines are in the directory; raise EventsMissing naming those that are not.

    An engine answers HTTP before it has joined; until then it computes everything by itself.
    """
    bus = await connect_bus(settings, name="kvflow-wait")
    changed = asyncio.Event()
    directory = Directory(bus, settings)
    missing = set(engine_ids)
    try:
        async with asyncio.timeout(within_s):
            await directory.watch(lambda _change: changed.set())
            while missing := set(engine_ids) - {engine.engine_id for engine in directory.engines()}:
                changed.clear()
                await changed.wait()
    except TimeoutError as error:
        names = ", ".join(sorted(missing))
        raise EventsMissing(f"not in the directory after {within_s:g} s: {names}") from error
    finally:
        await directory.close()
        await bus.close()


@asynccontextmanager
async def collecting(settings: Settings) -> AsyncIterator[EventLog]:
    """Collect all transfer events of the cluster while the block runs."""
    events = EventLog()
    bus = await connect_bus(settings, name="kvflow-events")
    try:
        await bus.subscribe(Subjects(settings.cluster).events_all(), events.take)
        await bus.flush()
        yield events
    finally:
        await bus.close()
