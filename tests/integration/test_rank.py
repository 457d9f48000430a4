"""Two engines' rank actors over a real bus and agent: every byte of the cache is checked."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from rank_support import Conductor, FakeEngine, content, eventually, serving
from rank_support import test_settings as make_settings

import kvflow.actors.rank as rank_module
from kvflow.actors.completion.actor import CompletionActor
from kvflow.actors.rank import AgentInbox, agent_name, run_rank
from kvflow.actors.transfer.actor import TransferActor
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.dataplane.memory_agent import MemoryAgent, MemoryFabric
from kvflow.dataplane.port import TransferAgent
from kvflow.directory import Directory
from kvflow.messages import (
    Subjects,
    TransferCompleted,
    TransferDelivered,
    TransferErrored,
    TransferEvent,
    TransferQuiesced,
    TransferStarted,
    encode,
)

pytestmark = pytest.mark.anyio


@dataclass
class World:
    """Hold what a test needs, on one kind of bus and agent."""

    settings: Settings
    bus: Bus
    conductor: Conductor
    make_agent: Callable[[FakeEngine, int, AgentInbox], TransferAgent]
    fabric: MemoryFabric | None
    engines: list[FakeEngine] = field(default_factory=list)
    transfers: list[TransferActor] = field(default_factory=list)
    completions: list[CompletionActor] = field(default_factory=list)

    def engine(self, name: str, **options: Any) -> FakeEngine:
        self.engines.append(FakeEngine(name, seed=len(self.engines), **options))
        return self.engines[-1]

    async def run(self, engine: FakeEngine, rank: int, ready: Callable[[], None]) -> None:
        inbox = AgentInbox()
        agent = self.make_agent(engine, rank, inbox)
        try:
            await run_rank(
                bus=self.bus, settings=self.settings, profile=engine.profile(rank), agent=agent, inbox=inbox,
                placement="process", ready=ready,
            )  # fmt: skip
        finally:
            with anyio.CancelScope(shield=True):
                await agent.close()

    async def assert_idle(self) -> None:
        """Check that only memories of what has ended are left, and that they go with time."""
        await eventually(lambda: not any(actor.state.sources for actor in self.transfers))
        for actor in self.transfers:
            assert not actor.state.bindings
            assert not actor.state.pieces
            actor.state.expire_memories(float("inf"))
            assert not actor.state.live
        assert not any(actor.state.pending for actor in self.completions)


@pytest.fixture(params=["memory", pytest.param("nixl", marks=[pytest.mark.nats, pytest.mark.nixl])])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def world(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    cluster = f"rank-{secrets.token_hex(4)}"
    fabric: MemoryFabric | None = None
    loop = asyncio.get_running_loop()
    if kind == "memory":
        settings = make_settings(cluster)
        memory_fabric = fabric = MemoryFabric()
        bus: Bus = MemoryBus(MemoryBroker())

        def make_agent(engine: FakeEngine, rank: int, inbox: AgentInbox) -> TransferAgent:
            return MemoryAgent(
                agent_name(engine.profile(rank)), engine.ranges(rank), inbox, loop=loop, settings=settings,
                fabric=memory_fabric,
            )  # fmt: skip
    else:
        pytest.importorskip("nixl._api")
        from kvflow.bus.connect import connect_bus
        from kvflow.dataplane.nixl_agent import NixlAgent

        settings = make_settings(cluster, nats_url=request.getfixturevalue("nats_url"))
        bus = await connect_bus(settings, name="test")

        def make_agent(engine: FakeEngine, rank: int, inbox: AgentInbox) -> TransferAgent:
            return NixlAgent(agent_name(engine.profile(rank)), engine.ranges(rank), inbox, loop=loop, settings=settings)

    world = World(settings, bus, Conductor(bus, Subjects(cluster)), make_agent, fabric)
    _record(world, monkeypatch)
    yield world
    await bus.close()
    for engine in world.engines:
        engine.close()


def _record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Transfer(TransferActor):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            world.transfers.append(self)

    class Completion(CompletionActor):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            world.completions.append(self)

    monkeypatch.setattr(rank_module, "TransferActor", Transfer)
    monkeypatch.setattr(rank_module, "CompletionActor", Completion)


def _pieces_done(conductor: Conductor) -> int:
    return len([event for event in conductor.of(TransferEvent) if event.kind == "progress"])


async def _completed(world: World, transfer: str, ranks: int) -> None:
    # Each rank's completion goes to its worker and to matching.
    await eventually(lambda: len(world.conductor.of(TransferCompleted, transfer)) == 2 * ranks)


async def test_i5_chunks_arrive_while_the_source_computes_and_every_byte_is_right(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    tokens, end = 200, 199
    kv = content(1, tokens)
    mine, theirs = source.allocate(tokens), target.allocate(end)
    conductor = world.conductor
    await conductor.listen(target)
    async with serving(world.run, source, target):
        await conductor.opened(source, "t", tokens)
        await conductor.bound(source, target, "t", theirs, 0, end)
        known = done = 0
        for final, pieces in ((50, 1), (51, 1), (130, 2), (200, 3)):
            source.write(0, kv, mine, done, final)
            blocks = mine[: -(-final // source.block_tokens)]
            await conductor.progress(source, "t", blocks, final, known=known, last=final == tokens)
            known, done = len(blocks), final
            await eventually(lambda pieces=pieces: _pieces_done(conductor) == pieces)  # type: ignore[misc]
        assert not conductor.of(TransferCompleted), "not sealed yet"
        await conductor.closed(source, "t")
        await _completed(world, "t", 1)
        target.assert_holds(kv, theirs, 0, end)
        await eventually(lambda: conductor.of(TransferDelivered))
        (report,) = conductor.of(TransferDelivered)
        assert report.bytes_total == kv[:, :, :end].size
        assert report.bytes_early > 0
        assert report.pieces == 3
        await eventually(lambda: conductor.of(TransferEvent)[-1].kind == "delivered")
        kinds = [event.kind for event in conductor.of(TransferEvent)]
        assert kinds == ["started", "progress", "progress", "progress", "delivered"]
        await conductor.released(source, "t")
        await world.assert_idle()


async def test_late_binding_of_a_partial_range_rides_its_notification(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    kv = content(2, 100)
    mine, theirs = source.allocate(100), target.allocate(99)
    source.write(0, kv, mine, 0, 100)
    await world.conductor.listen(target)
    async with serving(world.run, source, target):
        await world.conductor.progress(source, "t", mine, 100, last=True)
        await world.conductor.closed(source, "t")
        await anyio.sleep(0.05)
        await world.conductor.bound(source, target, "t", theirs, 37, 99)
        await _completed(world, "t", 1)
        target.assert_holds(kv, theirs, 37, 99)
        await world.conductor.released(source, "t")
        await world.assert_idle()


@pytest.mark.parametrize(
    ("source_ranks", "target_ranks", "source_block", "target_block"), [(2, 1, 16, 16), (1, 2, 16, 32), (2, 4, 32, 16)]
)
async def test_ranks_and_block_sizes_may_differ(
    world: World, source_ranks: int, target_ranks: int, source_block: int, target_block: int
) -> None:
    source = world.engine("p", ranks=source_ranks, block_tokens=source_block)
    target = world.engine("d", ranks=target_ranks, block_tokens=target_block)
    kv = content(3, 150)
    mine, theirs = source.allocate(150), target.allocate(149)
    await world.conductor.listen(target)
    async with serving(world.run, source, target):
        await world.conductor.bound(source, target, "t", theirs, 0, 149)
        for start, final in ((0, 90), (90, 150)):
            for rank in range(source_ranks):
                source.write(rank, kv, mine, start, final)
            await world.conductor.progress(source, "t", mine, final, last=final == 150)
        await world.conductor.closed(source, "t")
        await _completed(world, "t", target_ranks)
        target.assert_holds(kv, theirs, 0, 149)
        await eventually(lambda: len(world.conductor.of(TransferDelivered)) == source_ranks)
        await world.conductor.released(source, "t")
        await world.assert_idle()


async def test_i2_after_quiesced_nothing_is_written_any_more(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    kv = content(4, 200)
    mine, theirs = source.allocate(200), target.allocate(199)
    source.write(0, kv, mine, 0, 200)
    if world.fabric is not None:
        world.fabric.delay_s = 0.2
    await world.conductor.listen(target)
    async with serving(world.run, source, target):
        await world.conductor.bound(source, target, "t", theirs, 0, 199)
        await world.conductor.progress(source, "t", mine[:6], 96)
        await eventually(lambda: "started" in [event.kind for event in world.conductor.of(TransferEvent)])
        await world.conductor.revoked(source, "t")
        await eventually(lambda: world.conductor.of(TransferQuiesced))
        frozen = target.caches[0].copy()
        await world.conductor.progress(source, "t", mine, 200, last=True)
        await world.conductor.closed(source, "t")
        await world.conductor.bound(source, target, "t", theirs, 0, 199)
        await anyio.sleep(0.4)
        assert np.array_equal(frozen, target.caches[0])
        assert not world.conductor.of(TransferCompleted)
        assert not world.conductor.of(TransferDelivered)


async def test_a_preempted_source_starts_again_and_the_target_gets_one_attempt_only(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    old, kv = content(5, 120), content(6, 120)
    mine, again, theirs = source.allocate(120), source.allocate(120), target.allocate(119)
    conductor = world.conductor
    await conductor.listen(target)
    async with serving(world.run, source, target):
        await conductor.bound(source, target, "t", theirs, 0, 119)
        source.write(0, old, mine, 0, 64)
        await conductor.progress(source, "t", mine[:4], 64)
        await conductor.closed(source, "t", "preempted")
        await conductor.revoked(source, "t")
        await eventually(lambda: conductor.of(TransferQuiesced))
        await conductor.opened(source, "t", 120, attempt=1)
        await conductor.bound(source, target, "t", theirs, 0, 119, binding=2, attempt=1)
        source.caches[0][:] = 0
        source.write(0, kv, again, 0, 120)
        await conductor.progress(source, "t", again, 120, last=True, attempt=1)
        await conductor.closed(source, "t", attempt=1)
        await _completed(world, "t", 1)
        target.assert_holds(kv, theirs, 0, 119)
        assert {message.binding for message in conductor.of(TransferCompleted)} == {2}
        await conductor.released(source, "t", attempt=1)
        await world.assert_idle()


async def test_many_transfers_at_once_leave_nothing_behind(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    kv = content(7, 60)
    mine, theirs = source.allocate(60), target.allocate(59)
    source.write(0, kv, mine, 0, 60)
    conductor = world.conductor
    await conductor.listen(target)
    async with serving(world.run, source, target):
        for number in range(40):
            name = f"t{number}"
            steps = [
                conductor.opened(source, name, 60),
                conductor.progress(source, name, mine, 60, last=True),
                conductor.bound(source, target, name, theirs, 0, 59, request_id=name),
                conductor.closed(source, name),
            ]
            for index in np.random.default_rng(number).permutation(len(steps)):
                await steps[index]
        await eventually(lambda: len(conductor.of(TransferDelivered)) == 40)
        await eventually(lambda: len(conductor.of(TransferCompleted)) == 80)
        target.assert_holds(kv, theirs, 0, 59)
        for number in range(40):
            await conductor.released(source, f"t{number}")
        await world.assert_idle()


async def test_i7_nonsense_does_not_stop_the_actors(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    kv = content(8, 40)
    mine, theirs = source.allocate(40), target.allocate(39)
    source.write(0, kv, mine, 0, 40)
    subjects, bus = world.conductor.subjects, world.bus
    await world.conductor.listen(target)
    stray = TransferStarted(transfer_id="t", binding=9, source=source.ref, rank=0, target=source.ref, target_rank=0)
    async with serving(world.run, source, target):
        for subject in (subjects.transfer(source.ref, 0), subjects.completion(target.ref, 0)):
            for data in (b"", b"\xff" * 100, b"\x80", encode(stray), encode(stray)[:-3]):
                await bus.publish(subject, data)
        # Blocks outside the caches: refused by the planner at the last moment, nothing is written.
        await world.conductor.progress(source, "t", mine, 40, last=True)
        await world.conductor.closed(source, "t")
        await world.conductor.bound(source, target, "t", [1 << 31] * 3, 0, 39, binding=1)
        await eventually(lambda: world.conductor.of(TransferErrored))
        (error,) = world.conductor.of(TransferErrored)
        assert "outside the cache" in error.detail
        assert not target.caches[0].any()
        await world.conductor.bound(source, target, "t", theirs, 0, 39, binding=2)
        await _completed(world, "t", 1)
        target.assert_holds(kv, theirs, 0, 39)


async def test_an_incompatible_target_is_refused_with_the_reason(world: World) -> None:
    source, target = world.engine("p"), world.engine("d", row=48)
    await world.conductor.listen(target)
    async with serving(world.run, source, target):
        await world.conductor.bound(source, target, "t", [1, 2], 0, 20)
        await eventually(lambda: world.conductor.of(TransferErrored))
        (error,) = world.conductor.of(TransferErrored)
        assert error.reason == "incompatible"
        assert "48 bytes" in error.detail


async def test_a_target_that_leaves_fails_its_bindings_and_one_that_returns_works(world: World) -> None:
    source, target = world.engine("p"), world.engine("d")
    kv = content(9, 100)
    mine, theirs = source.allocate(100), target.allocate(99)
    source.write(0, kv, mine, 0, 100)
    conductor = world.conductor
    await conductor.listen(target)
    async with serving(world.run, source, target) as groups:
        await conductor.opened(source, "t", 100)
        await conductor.bound(source, target, "t", theirs, 0, 99)
        await conductor.progress(source, "t", mine[:2], 32)
        await eventually(lambda: len(conductor.of(TransferEvent)) >= 2)
        groups["d"].cancel_scope.cancel()
        await eventually(lambda: conductor.of(TransferErrored))
        assert conductor.of(TransferErrored)[0].reason == "target_lost"
        async with serving(world.run, target):
            await conductor.bound(source, target, "t", theirs, 0, 99, binding=2)
            await conductor.progress(source, "t", mine, 100, known=0, last=True)
            await conductor.closed(source, "t")
            await _completed(world, "t", 1)
            target.assert_holds(kv, theirs, 0, 99)


async def test_i2_a_card_goes_only_when_nothing_of_its_rank_can_land(world: World) -> None:
    # Matching counts on it: from a card that left on, WRITEs are over after the quarantine.
    source = world.engine("p")
    directory = Directory(world.bus, world.settings)
    await directory.watch(lambda _change: None)
    present: list[int] = []
    make_agent = world.make_agent

    def watched(engine: FakeEngine, rank: int, inbox: AgentInbox) -> TransferAgent:
        agent = make_agent(engine, rank, inbox)
        close = agent.close

        async def closing() -> None:
            await close()
            await anyio.sleep(0.05)
            present.append(len(directory.cards))

        agent.close = closing  # type: ignore[method-assign]
        return agent

    world.make_agent = watched
    async with serving(world.run, source):
        await eventually(lambda: directory.cards)
    assert present[0] == 1
    await eventually(lambda: not directory.cards)
    await directory.close()
