"""What every transfer agent promises, checked on the in-process one and on real NIXL."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from kvflow.config import Settings
from kvflow.dataplane.agent import DrivenAgent
from kvflow.dataplane.memory import MemoryRange, SharedSegment, create_shared
from kvflow.dataplane.memory_agent import MemoryAgent, MemoryFabric
from kvflow.dataplane.nixl_agent import NixlAgent
from kvflow.dataplane.port import (
    AgentEvent,
    AgentSink,
    Notified,
    NotifyFailed,
    PieceDone,
    PieceFailed,
    Runs,
    TransferAgent,
)
from kvflow.errors import MemoryAccessError, PeerError, TransferError

SIZE = 1 << 20
SETTINGS = Settings(quarantine_s=0.05, transfer_wait_s=5.0, stop_grace_s=2.0)


@dataclass
class Side:
    """One agent with its memory and the events it reported."""

    agent: DrivenAgent
    memory: SharedSegment
    events: "asyncio.Queue[AgentEvent]" = field(default_factory=asyncio.Queue)

    async def next(self, timeout_s: float = 10.0) -> AgentEvent:
        return await asyncio.wait_for(self.events.get(), timeout_s)

    def address(self, offset: int) -> int:
        return self.agent.segments[0].address + offset


Make = Callable[[str], Side]


def runs(*triples: tuple[int, int, int]) -> Callable[[], Runs]:
    """Return a plan of (local address, remote address, length)."""
    table = np.array(triples, dtype=np.uint64).reshape(-1, 3)
    return lambda: Runs(local=table[:, 0].copy(), remote=table[:, 1].copy(), length=table[:, 2].copy())


@dataclass
class Kit:
    """Make agents of one kind."""

    kind: str
    settings: Settings = SETTINGS
    fabric: MemoryFabric = field(default_factory=MemoryFabric)

    def agent(self, name: str, ranges: Sequence[MemoryRange], sink: AgentSink) -> DrivenAgent:
        loop = asyncio.get_running_loop()
        if self.kind == "nixl":
            return NixlAgent(name, ranges, sink, loop=loop, settings=self.settings)
        return MemoryAgent(name, ranges, sink, loop=loop, settings=self.settings, fabric=self.fabric)

    def make(self, name: str) -> Side:
        memory = create_shared(SIZE)
        events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        return Side(self.agent(name, [memory.range], events.put_nowait), memory, events)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Side, Side]]:
        source, target = self.make("source"), self.make("target")
        try:
            target.agent.listen(30)
            assert await source.agent.add_peer(target.agent.metadata()) == "target"
            yield source, target
        finally:
            await asyncio.gather(source.agent.close(), target.agent.close())
            source.memory.close()
            target.memory.close()


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kit:
    monkeypatch.setenv("UCX_TLS", os.environ.get("UCX_TLS", "tcp,self"))
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")
    return Kit(request.param)


@pytest.fixture
def memory_kit() -> Kit:
    return Kit("memory")


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_a_piece_arrives_before_its_notification(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            source.memory.view[:SIZE] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
            plan = runs((source.address(64), target.address(4096), 1000), (source.address(5000), target.address(9), 1))
            source.agent.write(7, "target", plan, notification=b"ready")
            assert await target.next() == Notified("source", b"ready")
            np.testing.assert_array_equal(target.memory.view[4096:5096], source.memory.view[64:1064])
            assert target.memory.view[9] == source.memory.view[5000]
            assert not target.memory.view[:9].any()
            assert not target.memory.view[10:4096].any()
            assert not target.memory.view[5096:].any()
            done = await source.next()
            assert isinstance(done, PieceDone)
            assert (done.piece, done.bytes_done, done.descriptors) == (7, 1001, 2)
            assert done.planning_s >= 0
            assert done.posting_s >= 0

    run(scenario)


def test_thousands_of_scattered_runs_arrive(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            source.memory.view[:SIZE] = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
            blocks = np.random.default_rng(3).permutation(4096)
            triples = [(source.address(i * 256), target.address(int(b) * 256), 255) for i, b in enumerate(blocks)]
            source.agent.write(1, "target", runs(*triples), notification=b"all")
            assert await target.next(30) == Notified("source", b"all")
            expected = source.memory.view.reshape(4096, 256)[:, :255]
            np.testing.assert_array_equal(target.memory.view.reshape(4096, 256)[blocks, :255], expected)
            assert not target.memory.view.reshape(4096, 256)[:, 255].any()

    run(scenario)


def test_pieces_end_each_and_a_later_notification_follows_them(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            source.memory.view[:] = 5
            for piece in range(20):
                plan = runs((source.address(piece * 512), target.address(piece * 1024), 512))
                source.agent.write(piece, "target", plan)
            ended = [await source.next() for _ in range(20)]
            assert sorted(event.piece for event in ended if isinstance(event, PieceDone)) == list(range(20))
            source.agent.notify("target", b"one")
            source.agent.notify("target", b"two")
            assert await target.next() == Notified("source", b"one")
            assert await target.next() == Notified("source", b"two")
            assert (target.memory.view.reshape(-1, 1024)[:20, :512] == 5).all()

    run(scenario)


def test_an_empty_piece_is_done_and_still_notifies(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            source.agent.write(3, "target", runs(), notification=b"nothing to write")
            assert await target.next() == Notified("source", b"nothing to write")
            done = await source.next()
            assert isinstance(done, PieceDone)
            assert done.bytes_done == 0

    run(scenario)


def test_what_cannot_be_posted_fails_and_the_agent_goes_on(kit: Kit) -> None:
    def refuse() -> Runs:
        raise TransferError("no such block")

    def crash() -> Runs:
        raise IndexError("bug in a plan")

    async def scenario() -> None:
        async with kit.pair() as (source, target):
            good = runs((source.address(0), target.address(0), 8))
            source.agent.write(1, "nobody", good)
            source.agent.write(2, "target", refuse)
            source.agent.write(3, "target", crash)
            source.agent.notify("nobody", b"hello")
            found = [await source.next() for _ in range(4)]
            assert isinstance(found[0], PieceFailed)
            assert "nobody" in found[0].detail
            assert found[1] == PieceFailed(2, "no such block")
            assert isinstance(found[2], PieceFailed)
            assert "bug in a plan" in found[2].detail
            assert isinstance(found[3], NotifyFailed)
            source.agent.write(4, "target", good)
            assert isinstance(await source.next(), PieceDone)

    run(scenario)


@pytest.mark.parametrize("shift", [(0, SIZE - 4), (SIZE - 4, 0), (-8, 0), (0, -8), (1 << 62, 0), (0, 1 << 63)])
def test_i7_a_run_outside_registered_memory_is_never_posted(kit: Kit, shift: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            inside = (source.address(0), target.address(0), 8)
            source.memory.view[:] = 9
            plan = runs(inside, (source.address(shift[0]), target.address(shift[1]), 8))
            source.agent.write(1, "target", plan, notification=b"never")
            failed = await source.next()
            assert isinstance(failed, PieceFailed)
            assert "registered memory" in failed.detail
            with pytest.raises(TimeoutError):
                await target.next(0.1)
            assert not target.memory.view.any()

    run(scenario)


def test_bad_metadata_is_refused(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            metadata = target.agent.metadata()
            for bad in (b"", b"junk", metadata[:-7], b"\xc1" * 100):
                with pytest.raises(PeerError):
                    await source.agent.add_peer(bad)
            assert await source.agent.add_peer(metadata) == "target"
            await source.agent.remove_peer("nobody")
            await source.agent.remove_peer("target")
            source.agent.write(1, "target", runs((source.address(0), target.address(0), 8)))
            assert isinstance(await source.next(), PieceFailed)
            assert await source.agent.add_peer(metadata) == "target"
            source.agent.write(2, "target", runs((source.address(0), target.address(0), 8)))
            assert isinstance(await source.next(), PieceDone)

    run(scenario)


def test_close_waits_for_pieces_in_flight_and_answers_what_comes_later(kit: Kit) -> None:
    async def scenario() -> None:
        async with kit.pair() as (source, target):
            source.memory.view[:] = 3
            source.agent.write(1, "target", runs((source.address(0), target.address(0), SIZE)))
            await asyncio.gather(source.agent.close(), source.agent.close())
            assert isinstance(await source.next(), PieceDone)
            assert target.memory.view.all()
            source.agent.write(2, "target", runs((source.address(0), target.address(0), 8)))
            source.agent.notify("target", b"late")
            assert isinstance(await source.next(), PieceFailed)
            assert isinstance(await source.next(), NotifyFailed)
            with pytest.raises(PeerError):
                await source.agent.add_peer(target.agent.metadata())
            await source.agent.remove_peer("target")

    run(scenario)


def test_i8_an_idle_agent_uses_no_cpu(kit: Kit) -> None:
    async def scenario() -> None:
        side = kit.make("idle")
        thread = side.agent._owner.thread
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        side.agent.listen(0.01)
        await asyncio.sleep(0.3)
        before = time.clock_gettime(clock)
        await asyncio.sleep(1.0)
        assert time.clock_gettime(clock) - before < 0.002
        await side.agent.close()
        side.memory.close()

    run(scenario)


def test_i2_a_failed_write_is_reported_after_the_quarantine_and_the_peer_can_be_used_again(memory_kit: Kit) -> None:
    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            memory_kit.fabric.fail_next_write("link down")
            began = time.monotonic()
            source.agent.write(1, "target", runs((source.address(0), target.address(0), 8)))
            assert await source.next() == PieceFailed(1, "link down")
            assert time.monotonic() - began >= SETTINGS.quarantine_s
            source.agent.write(2, "target", runs((source.address(0), target.address(0), 8)))
            assert isinstance(await source.next(), PieceDone)

    run(scenario)


def test_i4_a_silent_peer_fails_its_pieces_in_bounded_time_and_nothing_lands_later(memory_kit: Kit) -> None:
    memory_kit.settings = Settings(quarantine_s=0.05, transfer_wait_s=0.2, stop_grace_s=1.0)

    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            memory_kit.fabric.stall("target")
            source.memory.view[:] = 1
            for piece in (1, 2):
                source.agent.write(piece, "target", runs((source.address(0), target.address(0), 8)))
            failed = [await source.next(2.0) for _ in range(2)]
            assert all(isinstance(event, PieceFailed) for event in failed)
            assert not target.memory.view.any()

    run(scenario)


def test_i2_agent_whose_thread_hangs_says_that_its_memory_stays_registered(
    memory_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_kit.settings = Settings(stop_grace_s=0.05)
    monkeypatch.setattr("kvflow.dataplane.agent._CLOSE_MARGIN_S", 0.05)

    async def scenario() -> None:
        let_go = threading.Event()
        healthy, hanging = memory_kit.make("healthy"), memory_kit.make("hanging")
        hanging.agent._owner.submit(lambda: let_go.wait(10))  # type: ignore[arg-type]
        for side in (healthy, hanging):
            await side.agent.close()
        assert (healthy.agent.stuck, hanging.agent.stuck) == (False, True)
        let_go.set()

    run(scenario)


def test_i1_what_stood_still_for_too_long_is_given_up_and_not_driven_on(memory_kit: Kit) -> None:
    # Others took this rank for lost meanwhile: its own engine and the target may use the blocks for something else.
    memory_kit.settings = msgspec.structs.replace(SETTINGS, card_ttl_s=0.3)
    memory_kit.fabric.delay_s = 0.1

    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            source.memory.view[:] = 1
            plan = runs((source.address(0), target.address(0), 100))

            def halted() -> Runs:
                time.sleep(0.5)
                return plan()

            source.agent.write(1, "target", plan, notification=b"flying")
            source.agent.write(2, "target", halted)
            source.agent.write(3, "target", plan)
            source.agent.notify("target", b"queued")
            ended = [await source.next() for _ in range(4)]
            assert {type(event) for event in ended} == {PieceFailed, NotifyFailed}
            assert all(
                "stood still" in event.detail for event in ended if isinstance(event, PieceFailed | NotifyFailed)
            )
            assert not target.memory.view.any()
            assert target.events.empty()
            source.agent.write(4, "target", plan, notification=b"anew")
            assert await target.next() == Notified("source", b"anew")

    run(scenario)


def test_i8_a_peer_that_keeps_failing_is_not_connected_to_for_every_piece(
    memory_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every connection that UCX makes in vain keeps a socket open.
    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            plan = runs((source.address(0), target.address(0), 8))
            driver = source.agent._owner._driver
            tried = []

            def refuse(peer: object) -> None:
                tried.append(peer)
                raise TransferError("refused")

            memory_kit.fabric.fail_next_write()
            source.agent.write(0, "target", plan)
            assert isinstance(await source.next(), PieceFailed)
            with monkeypatch.context() as patch:
                patch.setattr(driver, "connect", refuse)
                for piece in range(1, 51):
                    source.agent.write(piece, "target", plan)
                    assert isinstance(await source.next(), PieceFailed)
            assert 1 <= len(tried) <= 3
            await asyncio.sleep(0.5)
            source.agent.write(51, "target", plan)
            assert isinstance(await source.next(), PieceDone)

    run(scenario)


def test_close_is_bounded_when_a_peer_is_silent(memory_kit: Kit) -> None:
    memory_kit.settings = Settings(quarantine_s=30.0, transfer_wait_s=30.0, stop_grace_s=0.2)

    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            memory_kit.fabric.stall("target")
            source.agent.write(1, "target", runs((source.address(0), target.address(0), 8)))
            await asyncio.wait_for(source.agent.close(), 2.0)
            assert isinstance(await source.next(), PieceFailed)

    run(scenario)


def test_a_delayed_piece_is_not_done_early(memory_kit: Kit) -> None:
    async def scenario() -> None:
        async with memory_kit.pair() as (source, target):
            memory_kit.fabric.delay_s = 0.1
            source.memory.view[:] = 1
            source.agent.write(1, "target", runs((source.address(0), target.address(0), 8)))
            await asyncio.sleep(0.03)
            assert source.events.empty()
            assert not target.memory.view.any()
            assert isinstance(await source.next(), PieceDone)

    run(scenario)


def test_agents_refuse_memory_that_they_cannot_use(kit: Kit) -> None:
    async def scenario() -> None:
        for ranges in ([], [MemoryRange(fd=10**6, length=10)], [MemoryRange.at(0, 10)]):
            with pytest.raises(MemoryAccessError):
                kit.agent("bad", ranges, lambda _: None)

    run(scenario)


@pytest.mark.nixl
def test_an_unknown_backend_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")

    async def scenario() -> None:
        with create_shared(4096) as memory, pytest.raises(TransferError, match="nixl_backend"):
            NixlAgent(
                "bad", [memory.range], lambda _: None, loop=asyncio.get_running_loop(),
                settings=Settings(nixl_backend="CARRIER_PIGEON"),
            )  # fmt: skip

    run(scenario)


def test_both_agents_serve_the_port(memory_kit: Kit) -> None:
    async def scenario() -> None:
        side = memory_kit.make("typed")
        agent: TransferAgent = side.agent
        assert agent.name == "typed"
        await agent.close()
        side.memory.close()

    run(scenario)
