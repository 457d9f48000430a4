"""Connect the halves to the bridge: presence for the scheduler, answers and attachment for a worker."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence

import structlog

from kvflow.bus.port import Bus, Delivery
from kvflow.connector.attach_client import AttachClient
from kvflow.connector.bridge import Bridge
from kvflow.connector.engine_rank import EngineRank
from kvflow.connector.node_file import socket_path
from kvflow.connector.port import Letter
from kvflow.dataplane.memory import MemoryRange
from kvflow.errors import ConfigError, WireError
from kvflow.messages import (
    EngineProfile,
    EngineRef,
    Message,
    Placement,
    SourceReleased,
    Subjects,
    TransferCompleted,
    TransferFailed,
    decode,
)

log = structlog.get_logger()

INBOX_LIMIT = 1_000_000


class SchedulerLink:
    """Implement the scheduler half's port over a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        """Use a bridge, which several links may share."""
        self._bridge = bridge
        self._present = False
        self._started = False

    @property
    def ready(self) -> bool:
        """Return whether the bus is there and all ranks' actors are in the directory."""
        return self._present and self._bridge.connected

    def start(self, engine: EngineRef, ranks: int) -> None:
        """Watch the directory for this engine's own cards."""
        self._started = True
        self._bridge.start()
        self._bridge.serve("presence", lambda bus: self._watch(bus, engine, ranks))

    def post(self, subject: str, letter: Letter) -> None:
        """Hand a letter to the bridge."""
        self._bridge.post(subject, letter)

    def close(self) -> None:
        """Leave the bridge."""
        if self._started:
            self._started = self._present = False
            self._bridge.close()

    async def _watch(self, bus: Bus, engine: EngineRef, ranks: int) -> None:
        from kvflow.directory import Directory

        directory = Directory(bus, self._bridge.settings)

        def changed(_change: object) -> None:
            present = sum(1 for owner, _rank in directory.cards if owner == engine) >= ranks
            if present != self._present:
                self._present = present
                log.info("engine_ready" if present else "engine_not_ready", engine=str(engine), ranks=ranks)

        try:
            await directory.watch(changed)
            await asyncio.Event().wait()
        finally:
            self._present = False
            await directory.close()


class WorkerLink:
    """Implement the worker half's port over a bridge."""

    def __init__(self, bridge: Bridge, placement: Placement) -> None:
        """Use a bridge; `placement` says where the actors that touch the memory run."""
        self._bridge = bridge
        self._placement = placement
        self._holder: AttachClient | EngineRank | None = None
        self._subscribed = asyncio.Event()
        self._malformed = 0
        self._created = time.monotonic()

    def start(self, profile: EngineProfile, memory: Sequence[MemoryRange], inbox: deque[Message]) -> None:
        """Subscribe to this rank's answers, then attach."""
        if self._holder is not None:
            raise ConfigError("this worker is attached already")
        bridge = self._bridge
        bridge.start()
        bridge.serve("answers", lambda bus: self._listen(bus, profile, inbox))
        if self._placement == "engine":
            self._holder = rank = EngineRank(bridge.settings, profile, memory, self._subscribed)
            bridge.serve("rank", rank.run)
        else:
            self._holder = client = AttachClient(socket_path(bridge.settings), profile, memory, self._subscribed)
            bridge.spawn("attachment", client.run)

    def post(self, subject: str, letter: Letter) -> None:
        """Hand a letter to the bridge."""
        self._bridge.post(subject, letter)

    def bus_down_for(self) -> float:
        """Return for how many seconds the bus has been unreachable."""
        return self._bridge.down_for()

    def detached_for(self) -> float:
        """Return for how many seconds no actor has had the memory."""
        return time.monotonic() - self._created if self._holder is None else self._holder.detached_for()

    def fence(self) -> None:
        """Take the memory away from its actors."""
        if self._holder is not None:
            self._bridge.call(self._holder.fence)

    def resume(self) -> None:
        """Attach again."""
        if self._holder is not None:
            self._bridge.call(self._holder.resume)

    def close(self) -> None:
        """Detach and leave the bridge, which others may go on using."""
        holder, self._holder = self._holder, None
        if holder is not None:
            self._bridge.call(holder.fence)
            self._bridge.close()

    async def _listen(self, bus: Bus, profile: EngineProfile, inbox: deque[Message]) -> None:
        def handle(delivery: Delivery) -> None:
            try:
                message = decode(delivery.data)
            except WireError as error:
                self._refuse(delivery.subject, str(error))
                return
            if not isinstance(message, TransferCompleted | TransferFailed | SourceReleased):
                self._refuse(delivery.subject, f"unexpected {type(message).__name__}")
            elif len(inbox) >= INBOX_LIMIT:
                self._refuse(delivery.subject, "the engine does not step")
            else:
                inbox.append(message)

        subjects = Subjects(self._bridge.settings.cluster)
        async with contextlib.AsyncExitStack() as stack:
            for subject in (subjects.engine(profile.engine, profile.rank), subjects.engine(profile.engine)):
                subscription = await bus.subscribe(subject, handle)
                stack.push_async_callback(subscription.unsubscribe)
            # Only now may the actors learn of this rank: an answer before the subscription would be lost.
            self._subscribed.set()
            await asyncio.Event().wait()

    def _refuse(self, subject: str, why: str) -> None:
        self._malformed += 1
        if self._malformed & (self._malformed - 1) == 0:
            log.warning("answer_dropped", subject=subject, why=why, dropped=self._malformed)
