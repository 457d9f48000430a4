"""The directory over both buses: who is there, who left, who was lost."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from kvflow.bus.connect import connect_bus
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.directory import BUCKET, Directory, DirectoryChange, Joined, Left, Synced
from kvflow.errors import BusError
from kvflow.messages import (
    EngineCard,
    EngineProfile,
    EngineRef,
    KvGeometry,
    ModelFingerprint,
    PeerHello,
    Subjects,
    encode,
)

TTL_S = 1.0

pytestmark = pytest.mark.anyio


class Site:
    """Make directories of one cluster, each on a bus client of its own."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]], settings: Settings) -> None:
        self._connect = connect
        self.settings = settings
        self.directories: list[Directory] = []
        self.buses: list[Bus] = []

    async def bus(self) -> Bus:
        bus = await self._connect()
        self.buses.append(bus)
        return bus

    async def directory(self) -> Directory:
        directory = Directory(await self.bus(), self.settings)
        self.directories.append(directory)
        return directory

    async def close(self) -> None:
        for directory in self.directories:
            await directory.close()
        for bus in self.buses:
            await bus.close()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    over_nats = request.param == "nats"
    settings = Settings(
        cluster=f"c{secrets.token_hex(4)}",
        card_ttl_s=TTL_S,
        nats_url=request.getfixturevalue("nats_url") if over_nats else "",
    )
    broker = MemoryBroker()

    async def connect() -> Bus:
        return await connect_bus(settings, name="test") if over_nats else MemoryBus(broker)

    made = Site(connect, settings)
    yield made
    await made.close()


def card_of(
    engine_id: str = "e", incarnation: str = "1", rank: int = 0, ranks: int = 1, agent: str = "a"
) -> EngineCard:
    profile = EngineProfile(
        engine=EngineRef(engine_id=engine_id, incarnation=incarnation), rank=rank, ranks=ranks, tp_rank=rank,
        tp_size=ranks, pp_rank=0, pp_size=1, roles=("source", "target"), host="h", model="m",
        geometry=KvGeometry(dtype="bfloat16", num_blocks=8, groups=(), views=()),
        fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip
    return EngineCard(profile=profile, agent=agent, nixl_metadata=b"md", segments=(), placement="process")


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def test_watch_tells_the_present_cards_then_synced(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    first, second = card_of("a"), card_of("b/ä.x", "2")
    await publisher.publish(first)
    await publisher.publish(second)
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    await eventually(lambda: Synced() in changes)
    assert sorted((c.card for c in changes[:-1] if isinstance(c, Joined)), key=lambda c: c.engine) == [first, second]
    assert changes[-1] == Synced()
    assert watcher.cards == {(first.engine, 0): first, (second.engine, 0): second}
    assert watcher.synced


async def test_watch_of_an_empty_directory_is_synced(site: Site) -> None:
    changes: list[DirectoryChange] = []
    await (await site.directory()).watch(changes.append)
    await eventually(lambda: changes == [Synced()])


async def test_i8_joining_staying_and_leaving(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card = card_of()
    await publisher.publish(card)
    await eventually(lambda: changes == [Synced(), Joined(card)])
    await asyncio.sleep(2.5 * TTL_S)
    assert changes == [Synced(), Joined(card)]
    await publisher.withdraw(card.engine, 0)
    await publisher.withdraw(card.engine, 0)
    await eventually(lambda: changes[2:] == [Left(card.engine, 0, "left")])
    assert watcher.cards == {}
    await asyncio.sleep(1.5 * TTL_S)
    assert len(changes) == 3


async def test_i4_an_engine_that_stops_refreshing_is_lost_in_a_known_time(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card = card_of()
    await publisher.publish(card)
    await eventually(lambda: Joined(card) in changes)
    await publisher.close()  # as if its process had been killed: nobody withdraws the card
    died = time.monotonic()
    await eventually(lambda: len(changes) == 3)
    assert changes[2] == Left(card.engine, 0, "lost")
    assert time.monotonic() - died < TTL_S + 1.0
    assert watcher.cards == {}


async def test_two_watchers_on_one_directory_and_on_two(site: Site) -> None:
    publisher, one, two = await site.directory(), await site.directory(), await site.directory()
    card = card_of()
    seen: list[list[DirectoryChange]] = [[], [], []]
    first = await one.watch(seen[0].append)
    await two.watch(seen[1].append)
    await publisher.publish(card)
    await eventually(lambda: all(changes == [Synced(), Joined(card)] for changes in seen[:2]))
    await one.watch(seen[2].append)
    await eventually(lambda: seen[2] == [Joined(card), Synced()])
    await first.unsubscribe()
    await first.unsubscribe()
    await publisher.withdraw(card.engine, 0)
    left = Left(card.engine, 0, "left")
    await eventually(lambda: seen[1][-1] == left and seen[2][-1] == left)
    assert left not in seen[0]


async def test_a_restarted_engine_is_another_engine(site: Site) -> None:
    before, after, watcher = await site.directory(), await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    old, new = card_of(incarnation="1"), card_of(incarnation="2")
    await before.publish(old)
    await eventually(lambda: Joined(old) in changes)
    await before.close()
    await after.publish(new)
    await eventually(lambda: Joined(new) in changes)
    await eventually(lambda: Left(old.engine, 0, "lost") in changes)
    assert list(watcher.engines()) == [new.engine]


async def test_a_changed_card_joins_again_and_a_repeated_one_does_not(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card, changed = card_of(agent="a"), card_of(agent="b")
    await publisher.publish(card)
    await publisher.publish(card)
    await publisher.publish(changed)
    await eventually(lambda: Joined(changed) in changes)
    await asyncio.sleep(1.5 * TTL_S)
    assert changes == [Synced(), Joined(card), Joined(changed)]


async def test_engines_are_complete_when_all_ranks_have_cards(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    await watcher.watch(lambda _: None)
    ranks = [card_of("tp", rank=rank, ranks=2) for rank in (1, 0)]
    await publisher.publish(ranks[0])
    await eventually(lambda: len(watcher.cards) == 1)
    assert watcher.engines() == {}
    assert watcher.engines(complete=False) == {ranks[0].engine: (ranks[0],)}
    await publisher.publish(ranks[1])
    await eventually(lambda: len(watcher.cards) == 2)
    assert watcher.engines() == {ranks[0].engine: (ranks[1], ranks[0])}


async def test_i7_bad_cards_are_ignored(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    bucket = await (await site.bus()).key_value(Subjects(site.settings.cluster).bucket(BUCKET), ttl_s=TTL_S)
    good = card_of("good")
    hello = PeerHello(source=good.engine, rank=0, target=good.engine, target_rank=0)
    far = msgspec.structs.replace(good, profile=msgspec.structs.replace(good.profile, rank=7))
    for key, value in (
        ("e.1.0", b"\xc1garbage"),
        ("e.1.0", b""),
        ("e.1.0", encode(hello)),
        ("e.1.0", encode(good)),  # another engine's card
        ("good.1.7", encode(far)),  # a rank beyond its own number of ranks
        ("not-a-key", encode(good)),
        ("a.b.x", encode(good)),
        ("a.=ZZ.0", encode(good)),
        ("a.b.00", encode(good)),
    ):
        await bucket.put(key, value)
    await publisher.publish(good)
    await eventually(lambda: Joined(good) in changes)
    assert changes == [Synced(), Joined(good)]
    assert watcher.bad_cards == 9


async def test_clusters_do_not_see_each_other(site: Site) -> None:
    publisher = await site.directory()
    other = Directory(await site.bus(), msgspec.structs.replace(site.settings, cluster=site.settings.cluster + "x"))
    site.directories.append(other)
    changes: list[DirectoryChange] = []
    await other.watch(changes.append)
    await publisher.publish(card_of())
    await asyncio.sleep(0.2)
    assert changes == [Synced()]


async def test_a_handler_that_raises_does_not_end_the_watch(site: Site) -> None:
    publisher, watcher = await site.directory(), await site.directory()
    changes: list[DirectoryChange] = []

    def handler(change: DirectoryChange) -> None:
        changes.append(change)
        raise ValueError("a mistake in a handler")

    await watcher.watch(handler)
    await publisher.publish(card_of())
    await eventually(lambda: len(changes) == 2)


class Deaf:
    """A bus whose buckets never tell of expiry, and that can be away."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.connected = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)


async def test_a_watcher_counts_on_its_own_clock_but_not_while_the_bus_is_away() -> None:
    bus = MemoryBus()
    settings = Settings(card_ttl_s=0.4)
    deaf = Deaf(bus)
    watcher = Directory(deaf, settings)  # type: ignore[arg-type]
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card = card_of()
    bucket = await bus.key_value(Subjects(settings.cluster).bucket(BUCKET), ttl_s=3600)
    await bucket.put(Subjects(settings.cluster).card_key(card.engine, 0), encode(card))
    await eventually(lambda: Joined(card) in changes)
    deaf.connected = False
    await asyncio.sleep(1.5)
    assert len(changes) == 2
    deaf.connected = True
    back = time.monotonic()
    await eventually(lambda: changes[2:] == [Left(card.engine, 0, "lost")])
    assert 0.2 < time.monotonic() - back < 1.6
    await watcher.close()
    await bus.close()


async def test_refreshing_goes_on_after_the_bus_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    settings = Settings(card_ttl_s=0.6)
    publisher, watcher = Directory(MemoryBus(broker), settings), Directory(MemoryBus(broker), settings)
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card = card_of()
    await publisher.publish(card)
    bucket = await publisher._open()
    put = bucket.put
    refused = 0

    async def refuse(key: str, value: bytes) -> None:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise BusError("away")
        await put(key, value)

    monkeypatch.setattr(bucket, "put", refuse)
    await asyncio.sleep(1.5)
    assert refused > 3
    assert changes == [Synced(), Joined(card)]
    await publisher.close()
    await watcher.close()


async def test_i2_a_lapse_is_noticed_at_once_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(card_ttl_s=0.4)
    publisher = Directory(MemoryBus(MemoryBroker()), settings)
    card = card_of()
    await publisher.publish(card)
    bucket = await publisher._open()
    put = bucket.put

    async def refuse(key: str, value: bytes) -> None:
        raise BusError("away")

    monkeypatch.setattr(bucket, "put", refuse)
    assert publisher.lapses(card.engine, 0) == 0
    await asyncio.sleep(0.5)
    assert publisher.lapses(card.engine, 0) == 1
    monkeypatch.setattr(bucket, "put", put)
    await asyncio.sleep(0.2)
    assert publisher.lapses(card.engine, 0) == 1
    time.sleep(0.5)  # noqa: ASYNC251 - the whole process stands still
    assert publisher.lapses(card.engine, 0) == 2
    await asyncio.sleep(0.2)
    assert publisher.lapses(card.engine, 0) == 2
    await publisher.close()


async def test_i1_a_watcher_that_stood_still_does_not_declare_everybody_lost() -> None:
    broker = MemoryBroker()
    settings = Settings(card_ttl_s=0.6)
    watcher = Directory(Deaf(MemoryBus(broker)), settings)  # type: ignore[arg-type]
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    card = card_of()
    bucket = await MemoryBus(broker).key_value(Subjects(settings.cluster).bucket(BUCKET), ttl_s=3600)
    key = Subjects(settings.cluster).card_key(card.engine, 0)
    await bucket.put(key, encode(card))
    await eventually(lambda: Joined(card) in changes)
    await asyncio.sleep(0.2)
    time.sleep(1.5)  # noqa: ASYNC251 - meanwhile the card is refreshed, which is read only later
    await asyncio.sleep(0.3)
    await bucket.put(key, encode(card))
    await asyncio.sleep(0.3)
    assert changes == [Synced(), Joined(card)]
    await watcher.close()
