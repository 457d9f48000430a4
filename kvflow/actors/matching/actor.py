"""The matching actor's driver: one per shard. Replay the control stream, then decode, step, record and perform.

Every decision is written to the control stream before it is sent to those whom it concerns: one connection keeps that
order, so that a successor which replays the stream knows at least what anybody was told.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.abc
import msgspec
import structlog

from kvflow.actors.base import Mailbox, decoding_handler
from kvflow.actors.matching.effects import Bind, Confirm, Decision, Effect, Emit, Fail, Release, Revoke
from kvflow.actors.matching.fleet import Fleet
from kvflow.actors.matching.inputs import Input, Received, Tick
from kvflow.actors.matching.leader import Leadership
from kvflow.actors.matching.model import Limits, State
from kvflow.actors.matching.state import HANDLERS, resync, step
from kvflow.bus.port import Bus, StreamSpec, Subscription
from kvflow.config import Settings
from kvflow.directory import Directory, DirectoryChange, Synced
from kvflow.errors import BusError, WireError
from kvflow.events import EventSink
from kvflow.messages import AnyMessage, EngineRef, Message, Subjects, encode, shard_of

CATCH_UP_S = 30.0
DIRECTORY_WAIT_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0
BATCH = 512
REFUSALS = 3
SMALLEST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Wake the actor: it may have to lead, or to follow."""


Item = AnyMessage | DirectoryChange | RoleChanged

log = structlog.get_logger()


class MatchingActor:
    """Join sources and targets of one shard."""

    def __init__(
        self,
        *,
        bus: Bus,
        settings: Settings,
        directory: Directory,
        shard: int,
        leadership: Leadership | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._directory = directory
        self._shard = shard
        self._leadership = leadership
        self._clock = clock
        self._subjects = Subjects(settings.cluster)
        self._events = EventSink(bus, self._subjects, "matching")
        self._mailbox: Mailbox[Item] = Mailbox("matching")
        self._fleet = Fleet()
        self._caught_up = anyio.Event()
        self._synced = anyio.Event()
        # Numbers exceed those of any earlier matching actor, even when the control stream was lost with its broker.
        self.state = State(limits=limits_of(settings), next_binding=time.time_ns() // 1000, following=True)
        self.foreign = 0

    @property
    def malformed(self) -> int:
        """Return how many messages were dropped because they could not be decoded."""
        return self._mailbox.malformed

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready once the past has been replayed. Raises BusError when the bus refuses."""
        subscriptions = await self._subscribe()
        try:
            await self._catch_up()
            if not self.state.transfers:  # a new cluster, or the stream was lost with its broker
                bound = self._settings.compute_wait_s + self._settings.transfer_wait_s
                self.state.forgot_until = self._clock() + bound
            await self._take_role()
            task_status.started()
            await self._serve()
        finally:
            with anyio.move_on_after(1.0, shield=True):
                for subscription in subscriptions:
                    await subscription.unsubscribe()

    async def _subscribe(self) -> list[Subscription]:
        if self._leadership is not None:
            self._leadership.on_change(self._on_role)
        await self._events.ensure_stream(self._settings.events_retention_s)
        stream = StreamSpec(
            name=self._subjects.stream("control"),
            subjects=(self._subjects.control_all(),),
            max_age_s=self._settings.control_retention_s,
        )
        await self._bus.ensure_stream(stream)
        return [
            await self._directory.watch(self._on_directory),
            await self._bus.replay(
                stream.name,
                self._subjects.control_shard(self._shard),
                decoding_handler(self._mailbox, None, *HANDLERS),
                on_caught_up=self._caught_up.set,
            ),
        ]

    def _on_role(self) -> None:
        self._mailbox.put(RoleChanged())

    def _on_directory(self, change: DirectoryChange) -> None:
        self._mailbox.put(change)

    async def _catch_up(self) -> None:
        """Follow the stream until its past is known and the directory is told, or for a bounded time."""
        give_up_at = self._clock() + CATCH_UP_S
        directory_by = self._clock() + DIRECTORY_WAIT_S
        while True:
            # Asked before draining: the events are set behind the items that they stand for.
            done = self._caught_up.is_set() and (self._synced.is_set() or self._clock() >= directory_by)
            for item in self._mailbox.drain():
                self._learn(item)
            if done:
                return
            if self._clock() >= give_up_at:
                raise BusError(
                    f"the control stream of shard {self._shard} could not be replayed within {CATCH_UP_S:g} s",
                    remedy="check that NATS has JetStream enabled and is reachable",
                )
            await anyio.sleep(0.01)

    async def _serve(self) -> None:
        while True:
            await self._take_role()
            items = self._mailbox.drain() or await self._wait()
            for index in range(0, len(items), BATCH):
                effects: list[Effect] = []
                for item in items[index : index + BATCH]:
                    effects += self._learn(item)
                await self._perform_all(effects)
            deadline = self.state.next_deadline()
            if deadline is not None and deadline <= self._clock():
                await self._perform_all(self._step(Tick(self._clock())))
            await anyio.lowlevel.checkpoint()

    async def _take_role(self) -> None:
        """Lead or follow, as the election has it; without an election, lead."""
        leads = self._leadership is None or self._leadership.leads
        if leads and self.state.following:
            effects = resync(self.state, self._clock())
            log.info("matching_leads", shard=self._shard, live=self.state.live, told_again=len(effects))
            await self._perform_all(effects)
        elif not leads and not self.state.following:
            log.warning("matching_follows", shard=self._shard, live=self.state.live)
            self.state.following = True

    async def _wait(self) -> list[Item]:
        deadline = self.state.next_deadline()
        if deadline is None:
            return [await self._mailbox.get()]
        with anyio.move_on_after(max(SMALLEST_WAIT_S, deadline - self._clock())):
            return [await self._mailbox.get()]
        return []

    def _learn(self, item: Item) -> list[Effect]:
        """Step by one mailbox item."""
        now = self._clock()
        if isinstance(item, Message):
            transfer_id = getattr(item, "transfer_id", "")
            if shard_of(transfer_id, self._settings.shards) != self._shard:
                self.foreign += 1
                return []
            return self._step(Received(now, item))
        if isinstance(item, Synced):
            self._synced.set()
            return []
        if isinstance(item, RoleChanged):
            return []  # it only had to wake the loop
        effects: list[Effect] = []
        for event in self._fleet.learn(item, now):
            effects += self._step(event)
        return effects

    def _step(self, event: Input) -> list[Effect]:
        try:
            return step(self.state, event)
        except Exception:
            # A defect must cost one message, not every live transfer; deadlines end what it leaves unfinished.
            log.exception("step_failed", shard=self._shard, input=type(event).__name__)
            return []

    async def _perform_all(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                await self._emit(effect)
            else:
                await self._perform(effect)

    async def _emit(self, effect: Emit) -> None:
        try:
            await self._events.emit(effect.event)
        except WireError as error:
            log.warning("event_unaddressable", error=str(error))

    async def _perform(self, effect: Decision) -> None:
        try:
            recipients = self._recipients(effect)
        except WireError as error:  # an empty engine id, for one: nobody can be listening there
            log.warning("effect_unaddressable", effect=type(effect).__name__, error=str(error))
            return
        data = encode(effect.message)
        record = data
        if isinstance(effect, Bind):  # the registration in the stream has the blocks already
            record = encode(msgspec.structs.replace(effect.message, first_blocks=(), blocks=()))
        await self._publish(self._subjects.control(self._shard, "decision", _concerns(effect)), record)
        for subject in recipients:
            await self._publish(subject, data)

    def _recipients(self, effect: Decision) -> tuple[str, ...]:
        subjects = self._subjects
        match effect:
            case Bind(message):  # the target first: its completion actors must poll before a source connects
                return subjects.completion(message.target), subjects.transfer(message.source)
            case Revoke(message):
                return (subjects.transfer(message.source),)
            case Fail(message):
                return subjects.engine(message.target), subjects.completion(message.target)
            case Confirm(message):
                return (subjects.engine(message.target, message.rank),)
            case Release(message):
                return subjects.engine(message.source), subjects.transfer(message.source)

    async def _publish(self, subject: str, data: bytes) -> None:
        """Publish, waiting for the bus to come back: without it there is no input either, so nothing is held up."""
        pause = RETRY_FIRST_S
        refusals = 0
        while True:
            try:
                await self._bus.publish(subject, data)
                return
            except BusError as error:
                refusals += self._bus.connected
                if refusals >= REFUSALS:  # the bus is there but will not have it, as when it is too large
                    log.error("publish_refused", subject=subject, size=len(data), error=str(error))
                    return
                if pause == RETRY_FIRST_S:
                    log.warning("publish_waits", subject=subject, error=str(error))
            await anyio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)


def _concerns(effect: Decision) -> EngineRef:
    return effect.message.target if isinstance(effect, Fail | Confirm) else effect.message.source


def limits_of(settings: Settings) -> Limits:
    """Derive the reducer's bounds from the settings."""
    return Limits(
        source_lease_s=settings.source_lease_s,
        compute_wait_s=settings.compute_wait_s,
        quarantine_s=settings.quarantine_s,
        # A transfer actor cuts its WRITEs off after `transfer_wait_s`, and answers a quarantine later; the rest is for
        # messages that get lost.
        quiesce_wait_s=settings.transfer_wait_s + 2 * settings.quarantine_s,
        engine_grace_s=2 * settings.card_ttl_s,
        max_live=settings.max_live_transfers,
    )
