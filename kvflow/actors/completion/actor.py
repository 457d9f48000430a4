"""The completion actor's driver: one per target engine rank. Decode, step, perform."""

import time
from collections.abc import Callable

import anyio
import anyio.abc
import structlog

from kvflow.actors.base import Mailbox, decoding_handler
from kvflow.actors.completion.state import (
    Complete,
    CompletionState,
    Effect,
    Hello,
    Input,
    Limits,
    Listen,
    Reject,
    SourceBack,
    SourceLost,
    Tick,
    step,
)
from kvflow.actors.outbox import Outbox
from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.dataplane.port import Notified, TransferAgent
from kvflow.directory import DirectoryChange, Joined, Left
from kvflow.errors import WireError
from kvflow.events import EventSink
from kvflow.messages import (
    AnyMessage,
    EngineProfile,
    PeerHello,
    RankDelivered,
    Subjects,
    TransferBound,
    TransferFailed,
    TransferStarted,
    decode,
    shard_of,
)

log = structlog.get_logger()


class CompletionActor:
    """Turn the notifications that reach one target rank into completions."""

    def __init__(
        self,
        *,
        bus: Bus,
        settings: Settings,
        profile: EngineProfile,
        agent: TransferAgent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._profile = profile
        self._agent = agent
        self._clock = clock
        self._shards = settings.shards
        self._subjects = Subjects(settings.cluster)
        self._mailbox: Mailbox[Input] = Mailbox("completion")
        self._outbox = Outbox(bus, EventSink(bus, self._subjects, "completion"), "completion")
        self.state = CompletionState(profile.engine, profile.rank, limits_of(settings))
        self.rejected = 0

    @property
    def malformed(self) -> int:
        """Return how many messages and notifications were dropped because they could not be decoded."""
        return self._mailbox.malformed

    def on_notified(self, event: Notified) -> None:
        """Take a notification of the agent; called on the event loop."""
        try:
            message = decode(event.payload)
            if isinstance(message, PeerHello):
                return  # a peer's warm-up: arriving was all it had to do
            if not isinstance(message, RankDelivered):
                raise WireError(f"unexpected {type(message).__name__}")
        except WireError as error:
            self._mailbox.malformed += 1
            log.warning("notification_dropped", peer=event.peer, error=str(error), count=self._mailbox.malformed)
            return
        self._mailbox.put(message)

    def on_directory_change(self, change: DirectoryChange) -> None:
        """Take a change of the directory; called on the event loop.

        Who leaves in order has first ended all its WRITEs: only a loss takes anything back.
        """
        if isinstance(change, Left) and change.reason == "lost":
            self._mailbox.put(SourceLost(change.engine), own=True)
        elif isinstance(change, Joined):
            self._mailbox.put(SourceBack(change.card.engine), own=True)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready once subscribed."""
        me, rank = self._profile.engine, self._profile.rank
        handler = decoding_handler(self._mailbox, _as_input, TransferBound, TransferStarted, TransferFailed, PeerHello)
        subscriptions = [
            await self._bus.subscribe(self._subjects.completion(me, rank), handler),
            await self._bus.subscribe(self._subjects.completion(me), handler),
        ]
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._outbox.run)
                task_status.started()
                await self._serve()
        finally:
            with anyio.move_on_after(1.0, shield=True):
                for subscription in subscriptions:
                    await subscription.unsubscribe()

    async def _serve(self) -> None:
        ticked = self._clock()
        while True:
            batch = self._mailbox.drain() or await self._wait(ticked)
            now = self._clock()
            due = self.state.tick_s()
            if due is not None and now - ticked >= due:
                ticked = now
                batch.append(Tick())
            for item in batch:
                for effect in step(self.state, item, now):
                    self._perform(effect)
            # Gives the publisher and the bus a turn even when the mailbox never runs empty.
            await anyio.lowlevel.checkpoint()

    async def _wait(self, ticked: float) -> list[Input]:
        due = self.state.tick_s()
        if due is None:
            return [await self._mailbox.get()]
        with anyio.move_on_after(max(0.0, ticked + due - self._clock())):
            return [await self._mailbox.get()]
        return []

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Complete():
                message = effect.message
                shard = shard_of(message.transfer_id, self._shards)
                self._outbox.send(self._subjects.engine(message.target, message.rank), message)
                self._outbox.send(self._subjects.control(shard, "report", message.target), message)
            case Listen():
                self._agent.listen(effect.seconds)
            case Reject():
                self.rejected += 1
                if self.rejected & (self.rejected - 1) == 0:  # at powers of two, so that a flood does not flood the log
                    log.warning("delivery_rejected", reason=effect.reason, count=self.rejected)


def _as_input(message: AnyMessage) -> Input:
    if isinstance(message, PeerHello):
        return Hello(message.poll_s)
    if isinstance(message, TransferBound | TransferStarted | TransferFailed):
        return message
    raise WireError(f"unexpected {type(message).__name__}")


def limits_of(settings: Settings) -> Limits:
    """Derive the actor's bounds: nothing is kept beyond the longest life that matching allows a transfer."""
    longest = settings.source_wait_s + settings.compute_wait_s + settings.transfer_wait_s + settings.source_lease_s
    return Limits(
        pending=settings.max_live_transfers,
        memories=settings.max_live_transfers,
        memory_s=longest + settings.quarantine_s,
        stale_s=longest + settings.quarantine_s,
    )
