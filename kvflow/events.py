"""Publish lifecycle events, for monitors only: no decision depends on them, so a lost one is counted, not raised."""

import time

import msgspec
import structlog

from kvflow.bus.port import Bus, StreamSpec
from kvflow.errors import BusError
from kvflow.messages import EngineEvent, Subjects, TransferEvent, encode

log = structlog.get_logger()


class EventSink:
    """Stamp events with wall-clock time and the actor's name, and publish them on the events subjects."""

    def __init__(self, bus: Bus, subjects: Subjects, actor: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._actor = actor
        self.lost = 0

    async def ensure_stream(self, max_age_s: float) -> None:
        """Create the stream that keeps events for `max_age_s` seconds; calling it again does nothing."""
        await self._bus.ensure_stream(
            StreamSpec(
                name=self._subjects.stream("events"), subjects=(self._subjects.events_all(),), max_age_s=max_age_s
            )
        )

    async def emit(self, event: TransferEvent | EngineEvent) -> None:
        """Publish one event; its `at` (and `actor`) are filled in here. Never raises BusError."""
        if isinstance(event, TransferEvent):
            event = msgspec.structs.replace(event, at=time.time(), actor=self._actor)
            key = event.transfer_id
        else:
            event = msgspec.structs.replace(event, at=time.time())
            key = event.engine.engine_id
        try:
            await self._bus.publish(self._subjects.event(event.kind, key), encode(event))
        except BusError as error:
            self.lost += 1
            if self.lost & (self.lost - 1) == 0:  # at powers of two, so that an outage does not flood the log
                log.warning("event_lost", actor=self._actor, lost=self.lost, error=str(error))
