"""The transfer actor's driver, its ties to targets and the outbox, over an in-memory bus and a scripted agent."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc
import pytest

from kvflow.actors.completion.actor import CompletionActor
from kvflow.actors.outbox import Outbox
from kvflow.actors.rank import AgentInbox, run_rank_over
from kvflow.actors.transfer.actor import TransferActor
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Delivery, StreamSpec
from kvflow.config import Settings
from kvflow.dataplane.port import Notified, NotifyFailed, PieceDone, PieceFailed, Plan
from kvflow.directory import Directory, Joined, Left
from kvflow.errors import BusError, PeerError, TransferError
from kvflow.events import EventSink
from kvflow.messages import (
    EngineCard,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    KvSegment,
    KvView,
    Message,
    ModelFingerprint,
    PeerHello,
    RankDelivered,
    SourceClosed,
    SourceProgress,
    Subjects,
    TransferBound,
    TransferDelivered,
    TransferErrored,
    TransferFailed,
    TransferStarted,
    decode,
    encode,
    pack_blocks,
)

pytestmark = pytest.mark.anyio

SETTINGS = Settings(cluster="c")
SUBJECTS = Subjects("c")
SOURCE = EngineRef(engine_id="p", incarnation="1")
TARGET = EngineRef(engine_id="d", incarnation="1")
SEGMENT = KvSegment(address=1 << 20, length=1 << 16)


class ScriptedAgent:
    """Record what the actor asks for; the test answers."""

    name = "agent-p"
    segments = (SEGMENT,)

    def __init__(self) -> None:
        self.writes: list[tuple[int, str, Plan, bytes]] = []
        self.notified: list[tuple[str, Message]] = []
        self.listened: list[float] = []
        self.peers: list[str] = []
        self.refuse_peers = False
        self.refuse_writes = False

    def metadata(self) -> bytes:
        return b"m"

    async def add_peer(self, metadata: bytes) -> str:
        if self.refuse_peers:
            raise PeerError("no route")
        self.peers.append(metadata.decode())
        return metadata.decode()

    async def remove_peer(self, peer: str) -> None:
        self.peers.remove(peer)

    def write(self, piece: int, peer: str, plan: Plan, *, notification: bytes = b"") -> None:
        if self.refuse_writes:
            raise TransferError("closed")
        self.writes.append((piece, peer, plan, notification))

    def notify(self, peer: str, payload: bytes) -> None:
        self.notified.append((peer, decode(payload)))

    def listen(self, seconds: float) -> None:
        self.listened.append(seconds)

    async def close(self) -> None:
        return


class CardsOnly(Directory):
    """A directory whose cards the test sets."""

    def __init__(self) -> None:
        super().__init__(MemoryBus(MemoryBroker()), SETTINGS)

    lapsed = 0

    def lapses(self, engine: EngineRef, rank: int) -> int:
        assert (engine, rank) == (SOURCE, 0)
        return self.lapsed

    def set(self, *cards: EngineCard) -> None:
        self._cards = {(card.engine, card.rank): card for card in cards}


def geometry(row: int = 8) -> KvGeometry:
    view = KvView(
        layer="0", part="kv", group=0, segment=0, offset=0, blocks=16, block_tokens=4, heads=1, head_start=0,
        total_heads=1, row_bytes=row, block_stride=4 * row, head_stride=4 * row, token_stride=row,
    )  # fmt: skip
    return KvGeometry(dtype="u8", num_blocks=16, groups=(KvGroup(block_tokens=4),), views=(view,))


def profile(engine: EngineRef, role: Any, row: int = 8) -> EngineProfile:
    return EngineProfile(
        engine=engine, rank=0, ranks=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, roles=(role,), host="h",
        model="m", geometry=geometry(row), fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip


def card(agent: str = "agent-d", row: int = 8, segments: tuple[KvSegment, ...] = (SEGMENT,)) -> EngineCard:
    return EngineCard(
        profile=profile(TARGET, "target", row), agent=agent, nixl_metadata=agent.encode(), segments=segments,
        placement="process",
    )  # fmt: skip


class Rig:
    """Hold one actor and what it said."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.agent = ScriptedAgent()
        self.directory = CardsOnly()
        self.actor = TransferActor(
            bus=self.bus, settings=SETTINGS, profile=profile(SOURCE, "source"), agent=self.agent,
            directory=self.directory,
        )  # fmt: skip
        self.heard: list[tuple[str, Message]] = []

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        await self.bus.subscribe(SUBJECTS.control_shard(0), self._hear)
        await self.bus.subscribe(SUBJECTS.completion(TARGET, 0), self._hear)
        await tasks.start(self.actor.run)

    def _hear(self, delivery: Delivery) -> None:
        self.heard.append((delivery.subject, decode(delivery.data)))

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    def join(self, new: EngineCard) -> None:
        self.directory.set(new)
        self.actor.on_directory_change(Joined(new))

    def leave(self) -> None:
        self.directory.set()
        self.actor.on_directory_change(Left(TARGET, 0, "lost"))

    async def say(self, message: Message) -> None:
        await self.bus.publish(SUBJECTS.transfer(SOURCE, 0), encode(message))


async def until(check: Callable[[], object]) -> None:
    with anyio.fail_after(5):
        while not check():  # noqa: ASYNC110 - what is waited for has no event of its own
            await anyio.sleep(0.002)


def bound(binding: int = 1) -> TransferBound:
    return TransferBound(
        transfer_id="t", binding=binding, source=SOURCE, source_attempt=0, target=TARGET, target_attempt=0,
        request_id="r", start=0, end=7, first_blocks=(0,), blocks=(pack_blocks([3, 4]),),
    )  # fmt: skip


PROGRESS = SourceProgress(
    transfer_id="t", attempt=0, source=SOURCE, rank=0, tokens_final=8, first_blocks=(0,),
    blocks=(pack_blocks([1, 2]),), last=True,
)  # fmt: skip
SEAL = SourceClosed(transfer_id="t", attempt=0, source=SOURCE, request_id="p", reason="finished")


async def test_engines_that_meet_are_connected_before_the_first_request() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await until(lambda: rig.agent.notified)
        assert rig.agent.peers == ["agent-d"]
        assert isinstance(rig.agent.notified[0][1], PeerHello)
        await until(lambda: rig.of(PeerHello))
        await rig.say(PROGRESS)
        await rig.say(bound())
        await until(lambda: rig.agent.writes)
        piece, peer, plan, _ = rig.agent.writes[0]
        assert peer == "agent-d"
        assert plan().total_bytes == 7 * 8
        assert rig.of(TransferStarted)
        await rig.bus.publish(SUBJECTS.control(0, "source", SOURCE), encode(SEAL))
        rig.actor.on_agent_event(PieceDone(piece, 56, 2, 0.0, 0.0))
        await until(lambda: rig.of(TransferDelivered))
        assert isinstance(rig.agent.notified[-1][1], RankDelivered)
        tasks.cancel_scope.cancel()


async def test_a_binding_to_a_target_not_seen_yet_waits_for_its_card() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        await rig.say(PROGRESS)
        await rig.say(bound())
        await anyio.sleep(0.05)
        assert not rig.agent.writes
        rig.join(card())
        await until(lambda: rig.agent.writes)
        tasks.cancel_scope.cancel()


async def test_a_target_that_never_shows_up_fails_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.actors.transfer.peers.CARD_WAIT_S", 0.1)
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        await rig.say(bound())
        await until(lambda: rig.of(TransferErrored))
        (report,) = rig.of(TransferErrored)
        assert isinstance(report, TransferErrored)
        assert report.reason == "unknown_engine"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("new", "reason"),
    [(card(row=4), "incompatible"), (card(segments=()), "incompatible")],
    ids=["rows", "no-memory"],
)
async def test_an_unusable_card_is_refused(new: EngineCard, reason: str) -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(new)
        await rig.say(bound())
        await until(lambda: rig.of(TransferErrored))
        (report,) = rig.of(TransferErrored)
        assert isinstance(report, TransferErrored)
        assert report.reason == reason
        assert not rig.agent.peers
        tasks.cancel_scope.cancel()


async def test_a_target_that_cannot_be_reached_at_first_is_tried_again_for_the_next_binding() -> None:
    rig = Rig()
    rig.agent.refuse_peers = True
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await rig.say(PROGRESS)
        await rig.say(bound())
        await until(lambda: rig.of(TransferErrored))
        rig.agent.refuse_peers = False
        await rig.say(bound(2))
        await until(lambda: rig.agent.writes)
        tasks.cancel_scope.cancel()


async def test_a_replaced_agent_is_dropped_and_the_new_one_connected() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card("old"))
        await until(lambda: rig.agent.peers == ["old"])
        await until(lambda: TARGET in rig.actor.state.peers)
        rig.join(card("new"))
        await until(lambda: rig.agent.peers == ["new"])
        rig.leave()
        await until(lambda: not rig.agent.peers)
        assert TARGET not in rig.actor.state.peers
        tasks.cancel_scope.cancel()


async def test_a_write_or_notification_that_the_agent_refuses_is_reported() -> None:
    rig = Rig()
    rig.agent.refuse_writes = True
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await rig.say(PROGRESS)
        await rig.say(bound())
        await until(lambda: rig.of(TransferErrored))
        (report,) = rig.of(TransferErrored)
        assert isinstance(report, TransferErrored)
        assert "closed" in report.detail
        tasks.cancel_scope.cancel()


async def test_a_notification_that_fails_is_sent_again() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await until(lambda: rig.agent.notified)
        await rig.say(PROGRESS)
        await rig.say(bound())
        await until(lambda: rig.agent.writes)
        await rig.bus.publish(SUBJECTS.control(0, "source", SOURCE), encode(SEAL))
        rig.actor.on_agent_event(PieceDone(1, 56, 2, 0.0, 0.0))
        await until(lambda: len(rig.agent.notified) == 2)
        peer, message = rig.agent.notified[1]
        rig.actor.on_agent_event(NotifyFailed(peer, encode(message), "flush failed"))
        await until(lambda: len(rig.agent.notified) == 3)
        assert rig.agent.notified[2] == (peer, message)
        # Neither a failed warm-up nor an unreadable payload concerns any binding.
        rig.actor.on_agent_event(NotifyFailed(peer, encode(rig.agent.notified[0][1]), ""))
        rig.actor.on_agent_event(NotifyFailed(peer, b"?", ""))
        tasks.cancel_scope.cancel()


async def test_the_scheduler_is_heard_through_the_control_stream_as_well() -> None:
    rig = Rig()
    await rig.bus.ensure_stream(
        StreamSpec(name=SUBJECTS.stream("control"), subjects=(SUBJECTS.control_all(),), max_age_s=60)
    )
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        await rig.bus.publish(SUBJECTS.control(0, "source", SOURCE), encode(SEAL))
        await until(lambda: rig.actor.state.sources)
        assert rig.actor.state.sources["t", 0].sealed
        tasks.cancel_scope.cancel()


class FlakyBus(MemoryBus):
    """Refuse to publish a number of times."""

    failures = 0

    async def publish(self, subject: str, data: bytes) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise BusError("away")
        await super().publish(subject, data)


async def test_messages_outlive_an_absence_of_the_bus_in_order() -> None:
    bus = FlakyBus(MemoryBroker())
    bus.failures = 2
    heard: list[bytes] = []
    await bus.subscribe("x.>", lambda delivery: heard.append(delivery.data))
    outbox = Outbox(bus, EventSink(bus, SUBJECTS, "test"), "test")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.send("x.1", SEAL)
        outbox.send("x.2", PROGRESS)
        await until(lambda: len(heard) == 2)
        assert [decode(data) for data in heard] == [SEAL, PROGRESS]
        assert outbox.lost == 0
        tasks.cancel_scope.cancel()


async def test_a_message_that_cannot_be_sent_for_long_is_counted_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvflow.actors.outbox.GIVE_UP_S", 0.0)
    bus = FlakyBus(MemoryBroker())
    bus.failures = 1
    heard: list[bytes] = []
    await bus.subscribe("x.>", lambda delivery: heard.append(delivery.data))
    outbox = Outbox(bus, EventSink(bus, SUBJECTS, "test"), "test")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.send("x.1", SEAL)
        outbox.send("x.2", PROGRESS)
        await until(lambda: heard)
        assert outbox.lost == 1
        assert decode(heard[0]) == PROGRESS
        tasks.cancel_scope.cancel()


async def test_i2_a_lapsed_card_fences_bindings_before_anything_is_posted() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await rig.say(bound())
        await until(lambda: rig.actor.state.bindings)
        rig.directory.lapsed = 1
        await rig.say(PROGRESS)
        await until(lambda: rig.of(TransferErrored))
        assert rig.agent.writes == []
        await rig.say(bound(2))  # lives: one lapse ends only what was bound before it
        await until(lambda: rig.agent.writes)
        tasks.cancel_scope.cancel()


async def test_a_target_that_is_cut_off_is_connected_anew_for_the_next_binding() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        await rig.start(tasks)
        rig.join(card())
        await rig.say(bound())
        await rig.say(PROGRESS)
        await until(lambda: rig.agent.writes)
        rig.directory.lapsed = 1
        await rig.say(PROGRESS)
        await until(lambda: rig.agent.peers == [])
        assert rig.of(TransferErrored) == []  # its WRITE may still land
        rig.actor.on_agent_event(PieceFailed(rig.agent.writes[0][0], "cut off"))
        await until(lambda: rig.of(TransferErrored))
        await rig.say(bound(2))
        await until(lambda: len(rig.agent.writes) == 2)
        assert rig.agent.peers == ["agent-d"]
        tasks.cancel_scope.cancel()


async def test_the_inbox_hands_events_to_whom_they_concern() -> None:
    inbox = AgentInbox()
    inbox(PieceFailed(1, ""))
    inbox(Notified("x", b""))
    assert inbox.unclaimed == 2
    rig = Rig()
    completion = CompletionActor(bus=rig.bus, settings=SETTINGS, profile=profile(TARGET, "target"), agent=rig.agent)
    inbox.attach(transfer=rig.actor, completion=completion)
    inbox(PieceFailed(1, ""))
    inbox(Notified("x", b"\xc1"))
    inbox(Notified("x", encode(PROGRESS)))
    assert inbox.unclaimed == 2
    assert completion.malformed == 2
    failed = TransferFailed(transfer_id="t", target=TARGET, target_attempt=0, request_id="r", reason="cancelled")
    async with anyio.create_task_group() as tasks:
        await tasks.start(completion.run)
        await rig.bus.publish(SUBJECTS.completion(TARGET), encode(bound()))
        await until(lambda: completion.state.pending)
        assert rig.agent.listened
        await rig.bus.publish(SUBJECTS.completion(TARGET), encode(failed))
        await until(lambda: not completion.state.pending)
        await rig.bus.publish(SUBJECTS.completion(TARGET), encode(SEAL))
        await until(lambda: completion.malformed == 3)
        tasks.cancel_scope.cancel()


async def test_an_agent_that_is_made_while_its_rank_is_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()
    closed: list[str] = []

    class SlowAgent(ScriptedAgent):
        stuck = False

        def __init__(self, name: str, *_: object, **__: object) -> None:
            super().__init__()
            made.wait(5)

        async def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr("kvflow.dataplane.nixl_agent.NixlAgent", SlowAgent)
    running = asyncio.ensure_future(
        run_rank_over(
            bus=MemoryBus(MemoryBroker()), settings=SETTINGS, profile=profile(SOURCE, "source"), ranges=[],
            placement="engine", ready=lambda: None,
        )
    )  # fmt: skip
    await anyio.sleep(0.05)
    running.cancel()
    await anyio.sleep(0.05)
    assert not running.done()
    made.set()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert closed == ["closed"]
