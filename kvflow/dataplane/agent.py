"""The event-loop side of an agent: `TransferAgent` over an owner thread and a driver."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from kvflow.config import Settings
from kvflow.dataplane.geometry import check_segments
from kvflow.dataplane.memory import MappedRanges, MemoryRange
from kvflow.dataplane.owner import Driver, Owner, Peer
from kvflow.dataplane.port import AgentEvent, AgentSink, NotifyFailed, PieceFailed, Plan
from kvflow.errors import KvflowError, PeerError, TransferError
from kvflow.messages import KvSegment

OPEN_TIMEOUT_S = 120.0  # registering hundreds of GiB pins them page by page
_CLOSE_MARGIN_S = 5.0

T = TypeVar("T")

log = structlog.get_logger()


class AgentMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="kvflow.agent.v1"):
    """Tell a peer how to reach an agent: `blob` is the engine's own metadata, `segments` what may be written to."""

    engine: str
    name: str
    segments: tuple[KvSegment, ...]
    blob: bytes


_decoder = msgspec.msgpack.Decoder(AgentMetadata)


class DrivenAgent:
    """Serve the transfer engine port with a driver; the adapters only add their drivers."""

    def __init__(
        self,
        name: str,
        ranges: Sequence[MemoryRange],
        sink: AgentSink,
        driver: Driver,
        *,
        engine: str,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
    ) -> None:
        """Map and register the ranges, blocking until that is done; raise TransferError when it fails.

        `sink` is called on `loop`, also after an event's sender has been closed.
        """
        self._name = name
        self._engine = engine
        self._sink = sink
        self._loop = loop
        self._settings = settings
        self._closed: asyncio.Future[None] | None = None
        # Whether it was closed in vain: its thread hangs in the transfer engine, with the memory registered.
        self.stuck = False
        self._ranges = MappedRanges(ranges)
        self._owner = Owner(name, driver, self._ranges.segments, self._emit, settings)
        try:
            self._blob = self._owner.opened.result(timeout=OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise TransferError(
                f"agent {name} did not start within {OPEN_TIMEOUT_S:g} s",
                remedy="check the NIXL backend and its devices",
            ) from error
        except Exception as error:
            self._ranges.close()
            if isinstance(error, KvflowError):
                raise
            raise TransferError(f"agent {name} did not start: {error!r}") from error

    @property
    def name(self) -> str:
        """Return the agent's unique name."""
        return self._name

    @property
    def segments(self) -> tuple[KvSegment, ...]:
        """Return the registered segments with their addresses in this process."""
        return self._ranges.segments

    def metadata(self) -> bytes:
        """Return what a peer needs to reach this agent."""
        return msgspec.msgpack.encode(
            AgentMetadata(engine=self._engine, name=self._name, segments=self.segments, blob=self._blob)
        )

    async def add_peer(self, metadata: bytes) -> str:
        """Make a peer known and return its name; adding it again does nothing. Raises PeerError."""
        try:
            found = _decoder.decode(metadata)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise PeerError(f"not an agent's metadata: {error}") from error
        if found.engine != self._engine:
            raise PeerError(f"agent {found.name} uses {found.engine}, this one {self._engine}")
        if not found.segments:
            raise PeerError(f"agent {found.name} has no memory")
        check_segments(found.segments, f"agent {found.name}")
        if len({segment.memory for segment in found.segments}) != 1:
            raise PeerError(f"agent {found.name} mixes memory kinds")
        peer = Peer(name=found.name, blob=found.blob, segments=found.segments)
        try:
            await self._call(partial(self._owner.add_peer, peer))
        except TransferError as error:
            raise PeerError(f"cannot reach agent {found.name}: {error.message}", remedy=error.remedy) from error
        return found.name

    async def remove_peer(self, peer: str) -> None:
        """Forget a peer, failing what is in flight to it; an unknown one does nothing."""
        if self._closed is None:
            await self._call(partial(self._owner.remove_peer, peer))

    def write(self, piece: int, peer: str, plan: Plan, *, notification: bytes = b"") -> None:
        """Plan and post one piece on the owner thread; `notification` reaches the peer after its bytes."""
        if not self._owner.submit(partial(self._owner.write, piece, peer, plan, notification, time.monotonic())):
            self._loop.call_soon(self._sink, PieceFailed(piece, "the agent is closed"))

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification that is ordered after all pieces that were reported done."""
        if not self._owner.submit(partial(self._owner.notify, peer, payload, time.monotonic())):
            self._loop.call_soon(self._sink, NotifyFailed(peer, payload, "the agent is closed"))

    def listen(self, seconds: float) -> None:
        """Poll for notifications and peers' connections for at least this long from now on."""
        self._owner.submit(partial(self._owner.listen, seconds))

    async def close(self) -> None:
        """Wait (bounded) for posted pieces, deregister and stop the owner thread; calling it again does nothing."""
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = self._loop.create_future()
        try:
            self._owner.submit(self._owner.begin_close)
            await asyncio.to_thread(self._owner.thread.join, self._settings.stop_grace_s + _CLOSE_MARGIN_S)
            if self._owner.thread.is_alive():
                # Unmapping under an engine that still runs would crash it: leave the memory to the process's end.
                self.stuck = True
                log.error("owner_thread_stuck", agent=self._name)
            else:
                self._ranges.close()
        finally:
            self._closed.set_result(None)

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command on the owner thread and wait (bounded) for its result."""
        result: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = command()
            except KvflowError as error:
                self._post(partial(_settle_error, result, error))
            except Exception as error:  # the caller must hear of a bug, and the thread must outlive it
                log.exception("agent_command_raised", agent=self._name)
                self._post(partial(_settle_error, result, TransferError(f"agent {self._name} failed: {error!r}")))
            else:
                self._post(partial(_settle, result, value))

        if not self._owner.submit(run):
            raise TransferError("the agent is closed")
        try:
            async with asyncio.timeout(self._settings.transfer_wait_s):
                return await result
        except TimeoutError as error:
            raise TransferError(
                f"agent {self._name} did not answer within {self._settings.transfer_wait_s:g} s"
            ) from error

    def _emit(self, events: Sequence[AgentEvent]) -> None:
        self._post(partial(self._deliver, events))

    def _deliver(self, events: Sequence[AgentEvent]) -> None:
        for event in events:
            # Each by a callback of its own: a sink that raises loses one event, and the loop reports it.
            self._loop.call_soon(self._sink, event)

    def _post(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.warning("agent_events_dropped", agent=self._name)


def _settle(result: "asyncio.Future[T]", value: T) -> None:
    if not result.done():
        result.set_result(value)


def _settle_error(result: "asyncio.Future[T]", error: KvflowError) -> None:
    if not result.done():
        result.set_exception(error)
