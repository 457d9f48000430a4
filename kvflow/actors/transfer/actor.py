"""The transfer actor's driver: one per source engine rank. Decode, step, perform.

Agent calls are made in the same turn of the loop in which their cause was taken from the mailbox; publishing goes
through the outbox's own task.
"""

import time
from collections.abc import Callable

import anyio
import anyio.abc
import structlog

from kvflow.actors.base import Mailbox, decoding_handler
from kvflow.actors.outbox import Outbox
from kvflow.actors.transfer.book import TransferState
from kvflow.actors.transfer.model import (
    CardLapsed,
    DeliveryFailed,
    DropPeer,
    Effect,
    Emit,
    Input,
    Limits,
    PostPiece,
    Report,
    SendNotification,
    StartPeer,
    Tick,
    Wake,
)
from kvflow.actors.transfer.peers import Peers
from kvflow.actors.transfer.state import step
from kvflow.bus.port import Bus, Subscription
from kvflow.config import Settings
from kvflow.dataplane.plan import BlockTable, PairPlan
from kvflow.dataplane.port import NotifyFailed, PieceDone, PieceFailed, Plan, Runs, TransferAgent
from kvflow.directory import Directory, DirectoryChange
from kvflow.errors import BusError, KvflowError, WireError
from kvflow.events import EventSink
from kvflow.messages import (
    EngineProfile,
    RankDelivered,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    Subjects,
    TransferBound,
    TransferRevoked,
    decode,
    encode,
    shard_of,
)

TICK_S = 0.5

log = structlog.get_logger()


class TransferActor:
    """Push the blocks of one source rank into its targets."""

    def __init__(
        self,
        *,
        bus: Bus,
        settings: Settings,
        profile: EngineProfile,
        agent: TransferAgent,
        directory: Directory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._profile = profile
        self._agent = agent
        self._clock = clock
        self._shards = settings.shards
        self._subjects = Subjects(settings.cluster)
        self._mailbox: Mailbox[Input] = Mailbox("transfer")
        self._outbox = Outbox(bus, EventSink(bus, self._subjects, "transfer"), "transfer")
        self._directory = directory
        self._lapses = 0
        self._peers = Peers(profile, agent, directory, self._outbox, self._subjects, self._tell)
        self.state = TransferState(profile.engine, profile.rank, profile.geometry, limits_of(settings))

    @property
    def malformed(self) -> int:
        """Return how many messages were dropped because they could not be decoded or did not belong here."""
        return self._mailbox.malformed

    def on_agent_event(self, event: PieceDone | PieceFailed | NotifyFailed) -> None:
        """Take a result of the agent; called on the event loop."""
        if not isinstance(event, NotifyFailed):
            self._mailbox.put(event, own=True)  # a lost one would leave its binding waiting for ever
            return
        try:
            message = decode(event.payload)
        except WireError as error:
            log.error("own_notification_unreadable", peer=event.peer, error=str(error))
            return
        if isinstance(message, RankDelivered):
            self._mailbox.put(DeliveryFailed(message, event.detail), own=True)
        else:
            log.info("warm_up_failed", peer=event.peer, detail=event.detail)

    def _tell(self, fact: Input) -> None:
        self._mailbox.put(fact, own=True)

    def on_directory_change(self, change: DirectoryChange) -> None:
        """Take a change of the directory; called on the event loop."""
        self._peers.on_change(change)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready once subscribed."""
        subscriptions = await self._subscribe()
        try:
            async with anyio.create_task_group() as tasks:
                self._peers.attach(tasks)
                tasks.start_soon(self._outbox.run)
                task_status.started()
                await self._serve()
        finally:
            self._peers.attach(None)
            with anyio.move_on_after(1.0, shield=True):
                for subscription in subscriptions:
                    await subscription.unsubscribe()

    async def _subscribe(self) -> list[Subscription]:
        me, subjects = self._profile.engine, self._subjects
        to_rank = decoding_handler(self._mailbox, None, SourceProgress, TransferBound, TransferRevoked, SourceReleased)
        from_scheduler = decoding_handler(self._mailbox, None, SourceOpened, SourceClosed)
        subscriptions = [
            await self._bus.subscribe(subjects.transfer(me, self._profile.rank), to_rank),
            await self._bus.subscribe(subjects.transfer(me), to_rank),
            await self._bus.subscribe(subjects.control_source(me), from_scheduler),
        ]
        try:
            # The same once more, without gaps over reconnects: a missed seal would cost the transfer its time-out.
            subscriptions.append(
                await self._bus.replay(
                    subjects.stream("control"), subjects.control_source(me), from_scheduler, since_s=0
                )
            )
        except BusError as error:
            log.info("control_stream_not_followed", engine=str(me), error=str(error))
        return subscriptions

    async def _serve(self) -> None:
        tick_at = self._clock() + TICK_S
        while True:
            batch = self._mailbox.drain() or await self._wait(tick_at)
            now = self._clock()
            if now >= tick_at:
                tick_at = now + TICK_S
                batch.append(Tick())
            lapses = self._directory.lapses(self._profile.engine, self._profile.rank)
            if lapses != self._lapses:
                self._lapses = lapses
                log.error("card_lapsed", engine=str(self._profile.engine), rank=self._profile.rank, lapses=lapses)
                batch.insert(0, CardLapsed())  # before anything that may post
            for item in batch:
                for effect in step(self.state, item, now):
                    self._perform(effect)
            # Gives the publisher and the bus a turn even when the mailbox never runs empty.
            await anyio.lowlevel.checkpoint()

    async def _wait(self, tick_at: float) -> list[Input]:
        if not self.state.live:
            return [await self._mailbox.get()]
        with anyio.move_on_after(max(0.0, tick_at - self._clock())):
            return [await self._mailbox.get()]
        return []

    def _perform(self, effect: Effect) -> None:
        match effect:
            case PostPiece():
                self._post(effect)
            case SendNotification():
                self._notify(effect.delivered)
            case Wake():
                message = effect.message
                self._outbox.send(self._subjects.completion(message.target, message.target_rank), message)
            case Report():
                shard = shard_of(effect.message.transfer_id, self._shards)
                self._outbox.send(self._subjects.control(shard, "report", self._profile.engine), effect.message)
            case Emit():
                self._outbox.emit(effect.event)
            case StartPeer():
                self._peers.want(effect.target)
            case DropPeer():
                self._peers.drop(effect.target, effect.detail)

    def _post(self, effect: PostPiece) -> None:
        tie = self._peers.tie(effect.target, effect.target_rank)
        if tie is None:
            self._mailbox.put(PieceFailed(effect.piece, f"{effect.target} is not connected"), own=True)
            return
        payload = b"" if effect.notification is None else encode(effect.notification)
        try:
            self._agent.write(effect.piece, tie.peer, planner(tie.plan, effect), notification=payload)
        except KvflowError as error:
            self._mailbox.put(PieceFailed(effect.piece, str(error)), own=True)

    def _notify(self, delivered: RankDelivered) -> None:
        tie = self._peers.tie(delivered.target, delivered.target_rank)
        if tie is None:
            self._mailbox.put(DeliveryFailed(delivered, f"{delivered.target} is not connected"), own=True)
            return
        try:
            self._agent.notify(tie.peer, encode(delivered))
        except KvflowError as error:
            self._mailbox.put(DeliveryFailed(delivered, str(error)), own=True)


def planner(plan: PairPlan, piece: PostPiece) -> Plan:
    """Return the callable that plans a piece on the agent's owner thread; it may raise TransferError."""

    def runs() -> Runs:
        source = [BlockTable(0, ids) for ids in piece.source_tables]
        target = [BlockTable(first, ids) for first, ids in zip(piece.target_first, piece.target_tables, strict=True)]
        return plan.runs(source, target, piece.start, piece.stop, range_end=piece.end)

    return runs


def limits_of(settings: Settings) -> Limits:
    """Derive the actor's bounds: nothing is kept beyond the longest life that matching allows a transfer."""
    longest = settings.source_wait_s + settings.compute_wait_s + settings.transfer_wait_s + settings.source_lease_s
    return Limits(
        sources=settings.max_live_transfers,
        bindings=settings.max_live_transfers,
        tombstones=settings.max_live_transfers,
        stale_s=longest + settings.quarantine_s,
        settle_s=settings.transfer_wait_s,
    )
