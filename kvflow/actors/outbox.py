"""Publish what an actor has to say, in order, beside its loop: a slow or absent bus never holds the actor up."""

import time

import anyio
import structlog

from kvflow.actors.base import Mailbox
from kvflow.bus.port import Bus
from kvflow.errors import BusError, WireError
from kvflow.events import EventSink
from kvflow.messages import Message, TransferEvent, encode

RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0
# Longer than a broker's restart; what is older than this has long been overtaken by matching's own bounds.
GIVE_UP_S = 60.0
# What a bus that is there refuses so often will never go (too large, say), and must not hold up the rest.
REFUSALS = 3

log = structlog.get_logger()


class Outbox:
    """Queue messages and events for one publishing task. Messages outlive a short absence of the bus; events do not."""

    def __init__(self, bus: Bus, events: EventSink, owner: str) -> None:
        self._bus = bus
        self._events = events
        self._owner = owner
        self._queue: Mailbox[tuple[str, bytes] | TransferEvent] = Mailbox(f"{owner}.outbox")
        self.lost = 0

    def send(self, subject: str, message: Message) -> None:
        """Publish a message soon, after all that was handed over before it."""
        self._queue.put((subject, encode(message)))

    def emit(self, event: TransferEvent) -> None:
        """Publish a lifecycle event soon."""
        self._queue.put(event)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            item = await self._queue.get()
            if isinstance(item, TransferEvent):
                await self._emit(item)
            else:
                await self._publish(*item)

    async def _emit(self, event: TransferEvent) -> None:
        try:
            await self._events.emit(event)
        except WireError as error:  # what it tells of came from a peer: an empty transfer id, for one
            log.warning("event_unaddressable", actor=self._owner, error=str(error))

    async def _publish(self, subject: str, data: bytes) -> None:
        give_up_at = time.monotonic() + GIVE_UP_S
        pause = RETRY_FIRST_S
        refusals = 0
        while True:
            try:
                await self._bus.publish(subject, data)
                return
            except BusError as error:
                refusals += self._bus.connected
                if refusals >= REFUSALS or time.monotonic() >= give_up_at:
                    self.lost += 1
                    log.error("message_lost", actor=self._owner, subject=subject, lost=self.lost, error=str(error))
                    return
            await anyio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)
