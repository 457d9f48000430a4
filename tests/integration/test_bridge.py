"""The bridge thread between engine threads and a bus, and what it does while either end is away."""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import structlog

from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Bus, StateHandler
from kvflow.config import Settings
from kvflow.connector.bridge import OUTBOX_LIMIT, Bridge
from kvflow.connector.engine_rank import EngineRank
from kvflow.connector.link import SchedulerLink, WorkerLink
from kvflow.directory import Directory
from kvflow.errors import BusError
from kvflow.messages import (
    EngineCard,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    Message,
    ModelFingerprint,
    PeerHello,
    SourceReleased,
    Subjects,
    decode,
    encode,
)

ENGINE = EngineRef(engine_id="engine", incarnation="one")
HELLO = PeerHello(source=ENGINE, rank=0, target=ENGINE, target_rank=0)
SUBJECTS = Subjects("default")
WAIT_S = 10.0


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def profile() -> EngineProfile:
    return EngineProfile(
        engine=ENGINE, rank=0, ranks=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, roles=("source", "target"),
        host="host", model="model",
        geometry=KvGeometry(dtype="bfloat16", num_blocks=1, groups=(KvGroup(block_tokens=16),), views=()),
        fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip


class World:
    """Connect bridges to one in-memory broker; `urls` keeps what they asked for, `away` refuses them."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.away = False
        self.urls: list[str] = []
        self.buses: list[MemoryBus] = []
        self.heard: list[Message] = []
        self.bridges: list[Bridge] = []
        self.closing: list[asyncio.Future[None]] = []

    async def connect(self, settings: Settings, _name: str, on_state: StateHandler) -> Bus:
        self.urls.append(settings.nats_url)
        if self.away:
            raise BusError("nobody listens there")
        bus = MemoryBus(self.broker, on_state=on_state)
        await bus.subscribe("test.>", lambda delivery: self.heard.append(decode(delivery.data)))
        self.buses.append(bus)
        return bus

    def bridge(self, settings: Settings | None = None) -> Bridge:
        bridge = Bridge(settings or Settings(nats_url="nats://there"), connect=self.connect)
        self.bridges.append(bridge)
        return bridge

    def publish(self, subject: str, data: bytes) -> None:
        async def send() -> None:
            bus = MemoryBus(self.broker)
            await bus.publish(subject, data)
            await bus.flush()
            await bus.close()

        anyio.run(send)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for bridge in made.bridges:
        bridge.close()


def test_letters_arrive_in_order_and_are_made_on_the_bridge_thread(world: World) -> None:
    bridge = world.bridge()
    bridge.start()
    threads: list[str] = []

    def make() -> Message:
        threads.append(threading.current_thread().name)
        return HELLO

    for rank in range(200):
        bridge.post("test.a", PeerHello(source=ENGINE, rank=rank, target=ENGINE, target_rank=0))
    bridge.post("test.a", make)
    eventually(lambda: len(world.heard) == 201)
    assert [message.rank for message in world.heard if isinstance(message, PeerHello)] == [*range(200), 0]
    assert threads == ["kvflow-bridge"]


def test_letters_posted_before_the_bus_is_there_are_sent_later(world: World) -> None:
    world.away = True
    bridge = world.bridge()
    bridge.start()
    bridge.post("test.a", HELLO)
    eventually(lambda: len(world.urls) >= 2)
    assert bridge.down_for() > 0
    world.away = False
    eventually(lambda: world.heard == [HELLO])
    eventually(lambda: bridge.connected and bridge.down_for() == 0)


def test_i7_letter_that_cannot_be_sent_does_not_hold_up_the_next(world: World) -> None:
    bridge = world.bridge()
    bridge.start()

    def broken() -> Message:
        raise ValueError("no such thing")

    bridge.post("test.a", broken)
    bridge.post("test.a", HELLO)
    eventually(lambda: world.heard == [HELLO])
    assert bridge.counters["dropped"] == 1


def test_letter_that_nobody_needs_any_more_is_not_sent(world: World) -> None:
    bridge = world.bridge()
    bridge.start()
    bridge.post("test.a", lambda: None)
    bridge.post("test.a", HELLO)
    eventually(lambda: world.heard == [HELLO])
    assert (bridge.counters["unneeded"], bridge.counters["dropped"]) == (1, 0)


def test_bus_that_is_closed_on_purpose_is_no_warning(world: World) -> None:
    bridge = world.bridge()
    bridge.start()
    eventually(lambda: bridge.connected)
    with structlog.testing.capture_logs() as logs:
        bridge.call(lambda: world.closing.append(asyncio.ensure_future(world.buses[0].close())))
        eventually(lambda: any(entry["event"] == "bridge_disconnected" for entry in logs))
    assert {entry["log_level"] for entry in logs if entry["event"] == "bridge_disconnected"} == {"info"}


def test_i2_rank_whose_agent_got_stuck_never_counts_as_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Callable[[], None]] = []

    async def run_rank_over(*, stuck: Callable[[], None], **_: object) -> None:
        begun.append(stuck)
        try:
            await asyncio.Event().wait()
        finally:
            if len(begun) > 1:
                stuck()

    monkeypatch.setattr("kvflow.actors.rank.run_rank_over", run_rank_over)

    async def scenario() -> None:
        may_attach = asyncio.Event()
        may_attach.set()
        rank = EngineRank(Settings(), profile(), [], may_attach)
        task = asyncio.create_task(rank.run(MemoryBus(MemoryBroker())))
        await asyncio.sleep(0.01)
        assert rank.detached_for() == 0
        rank.fence()
        await asyncio.sleep(0.01)
        assert rank.detached_for() > 0
        rank.resume()
        await asyncio.sleep(0.01)
        rank.fence()
        await asyncio.sleep(0.01)
        assert len(begun) == 2
        assert rank.detached_for() == 0
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())


def test_outbox_is_bounded(world: World) -> None:
    bridge = world.bridge()
    for _ in range(OUTBOX_LIMIT + 3):
        bridge.post("test.a", HELLO)
    assert bridge.counters["dropped"] == 3


def test_url_comes_from_the_node_file_and_another_node_is_followed(world: World, tmp_path: Path) -> None:
    node = tmp_path / "node.json"
    settings = Settings(runtime_dir=str(tmp_path))
    bridge = world.bridge(settings)
    bridge.start()
    time.sleep(0.3)
    assert not world.urls
    node.write_text("{ half of")
    time.sleep(0.3)
    node.write_text(json.dumps({"nats_url": "nats://first", "cluster": "default", "pid": 1, "more": 2}))
    eventually(lambda: bridge.connected)
    node.write_text(json.dumps({"nats_url": "nats://second", "cluster": "default", "pid": 2}))
    bridge.call(lambda: world.closing.append(asyncio.ensure_future(world.buses[0].close())))
    eventually(lambda: world.urls == ["nats://first", "nats://second"])
    eventually(lambda: bridge.connected)


def test_node_of_another_cluster_is_not_ours(world: World, tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text(json.dumps({"nats_url": "nats://there", "cluster": "other", "pid": 1}))
    bridge = world.bridge(Settings(runtime_dir=str(tmp_path)))
    bridge.start()
    time.sleep(0.5)
    assert not world.urls


def test_scheduler_is_ready_while_all_its_ranks_have_cards(world: World) -> None:
    settings = Settings(nats_url="nats://there")
    link = SchedulerLink(world.bridge(settings))
    link.start(ENGINE, 1)
    eventually(lambda: bool(world.buses))
    time.sleep(0.1)
    assert not link.ready
    card = EngineCard(profile=profile(), agent="a", nixl_metadata=b"", segments=(), placement="process")

    async def join_and_leave() -> None:
        bus = MemoryBus(world.broker)
        directory = Directory(bus, settings)
        await directory.publish(card)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: link.ready))
        await directory.withdraw(ENGINE, 0)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: not link.ready))
        await directory.close()
        await bus.close()

    anyio.run(join_and_leave)
    link.close()
    link.close()


def test_i7_worker_hears_answers_and_drops_everything_else(world: World, tmp_path: Path) -> None:
    settings = Settings(nats_url="nats://there", runtime_dir=str(tmp_path))
    link = WorkerLink(world.bridge(settings), "process")
    inbox: deque[Message] = deque()
    link.start(profile(), [], inbox)
    answer = SourceReleased(transfer_id="t", attempt=1, source=ENGINE, request_id="r")
    eventually(lambda: bool(world.buses))
    time.sleep(0.1)
    world.publish(SUBJECTS.engine(ENGINE, 0), b"\xc1 not a message")
    world.publish(SUBJECTS.engine(ENGINE), encode(HELLO))
    world.publish(SUBJECTS.engine(ENGINE, 1), encode(answer))
    world.publish(SUBJECTS.engine(ENGINE, 0), encode(answer))
    world.publish(SUBJECTS.engine(ENGINE), encode(answer))
    eventually(lambda: len(inbox) == 2)
    assert list(inbox) == [answer, answer]
    assert link.detached_for() > 0
    link.close()


def test_close_is_bounded_and_sends_what_is_left(world: World) -> None:
    bridge = world.bridge()
    bridge.start()
    eventually(lambda: bridge.connected)
    for _ in range(50):
        bridge.post("test.a", HELLO)
    began = time.monotonic()
    bridge.close()
    assert time.monotonic() - began < 5
    assert len(world.heard) == 50
    bridge.post("test.a", HELLO)  # must not raise
