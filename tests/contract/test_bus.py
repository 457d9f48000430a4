"""One suite for every implementation of the bus port: in memory and over a real nats-server."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvflow.bus.connect import connect_bus
from kvflow.bus.guard import end_task
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Bus, Delivery, KvUpdate, StreamSpec
from kvflow.config import Settings
from kvflow.errors import BusError

Connect = Callable[[], Awaitable[Bus]]

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Return a function that connects one more client to one broker."""
    opened: list[Bus] = []
    broker = MemoryBroker()
    settings = Settings(nats_url=request.getfixturevalue("nats_url")) if request.param == "nats" else None

    async def connect_one() -> Bus:
        bus: Bus = MemoryBus(broker) if settings is None else await connect_bus(settings, name="test")
        opened.append(bus)
        return bus

    yield connect_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()


@pytest.fixture
def root() -> str:
    """Return a subject prefix that no other test uses."""
    return f"test{secrets.token_hex(4)}"


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def settle(bus: Bus) -> None:
    """Wait until what was published has been delivered here, as far as it goes anywhere."""
    await bus.flush()
    await asyncio.sleep(0.05)


class Inbox:
    """Collect deliveries."""

    def __init__(self) -> None:
        self.items: list[Delivery] = []
        self.caught_up: list[int] = []

    def __call__(self, delivery: Delivery) -> None:
        self.items.append(delivery)

    def note_caught_up(self) -> None:
        self.caught_up.append(len(self.items))

    @property
    def data(self) -> list[bytes]:
        return [item.data for item in self.items]


def stream_of(root: str, **changes: object) -> StreamSpec:
    spec: dict[str, object] = {"name": f"s_{root}", "subjects": (f"{root}.>",), "max_age_s": 60.0, "max_bytes": 1 << 20}
    return StreamSpec(**(spec | changes))  # type: ignore[arg-type]


async def test_messages_of_one_publisher_arrive_in_order(connect: Connect, root: str) -> None:
    sender, receiver = await connect(), await connect()
    inbox = Inbox()
    await receiver.subscribe(f"{root}.a", inbox)
    for number in range(500):
        await sender.publish(f"{root}.a", b"%d" % number)
    await eventually(lambda: len(inbox.items) == 500)
    assert inbox.data == [b"%d" % number for number in range(500)]
    assert {(item.subject, item.sequence) for item in inbox.items} == {(f"{root}.a", 0)}


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("{}.*.c", ["{}.b.c"], ["{}.b.d", "{}.b.c.d", "{}.c"]),
        ("{}.>", ["{}.a", "{}.a.b.c"], ["{}", "other.{}"]),
        ("{}.*.>", ["{}.a.b", "{}.a.b.c"], ["{}.a"]),
        ("{}.a", ["{}.a"], ["{}.A", "{}.a.b"]),
    ],
)
async def test_wildcards(bus: Bus, root: str, pattern: str, matching: list[str], other: list[str]) -> None:
    inbox = Inbox()
    await bus.subscribe(pattern.format(root), inbox)
    for subject in matching + other:
        await bus.publish(subject.format(root), b"")
    await eventually(lambda: len(inbox.items) >= len(matching))
    await settle(bus)
    assert [item.subject for item in inbox.items] == [subject.format(root) for subject in matching]


async def test_every_subscriber_gets_a_message_but_only_one_of_a_queue_group(connect: Connect, root: str) -> None:
    first, second, sender = await connect(), await connect(), await connect()
    shared, alone = Inbox(), Inbox()
    await first.subscribe(f"{root}.x", shared, queue="g")
    await second.subscribe(f"{root}.x", shared, queue="g")
    await second.subscribe(f"{root}.x", alone)
    for number in range(100):
        await sender.publish(f"{root}.x", b"%d" % number)
    await eventually(lambda: len(alone.items) == 100 and len(shared.items) >= 100)
    await settle(sender)
    assert sorted(shared.data) == sorted(alone.data)


async def test_unsubscribed_handlers_hear_nothing_more(bus: Bus, root: str) -> None:
    inbox = Inbox()
    subscription = await bus.subscribe(f"{root}.x", inbox)
    await bus.publish(f"{root}.x", b"1")
    await eventually(lambda: bool(inbox.items))
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish(f"{root}.x", b"2")
    await settle(bus)
    assert inbox.data == [b"1"]


async def test_i7_a_handler_that_raises_keeps_its_subscription(bus: Bus, root: str) -> None:
    seen: list[bytes] = []

    def handler(delivery: Delivery) -> None:
        seen.append(delivery.data)
        raise ValueError("a mistake in a handler")

    await bus.subscribe(f"{root}.x", handler)
    await bus.publish(f"{root}.x", b"1")
    await bus.publish(f"{root}.x", b"2")
    await eventually(lambda: seen == [b"1", b"2"])


async def test_handlers_do_not_run_inside_publish(bus: Bus, root: str) -> None:
    inbox = Inbox()
    await bus.subscribe(f"{root}.x", inbox)
    await bus.publish(f"{root}.x", b"")
    assert inbox.items == []
    await eventually(lambda: len(inbox.items) == 1)


@pytest.mark.parametrize("bad", ["", ".", "a..b", "a.*", "a.>", "a b", "a\r\nPING", "x" * 5000])
async def test_i7_what_is_no_subject_is_refused_and_the_bus_lives(bus: Bus, root: str, bad: str) -> None:
    inbox = Inbox()
    await bus.subscribe(f"{root}.x", inbox)
    with pytest.raises(BusError, match="not a subject"):
        await bus.publish(bad, b"")
    await bus.publish(f"{root}.x", b"1")
    await eventually(lambda: inbox.data == [b"1"])


async def test_the_longest_subject_is_delivered(bus: Bus, root: str) -> None:
    inbox = Inbox()
    await bus.subscribe(f"{root}.>", inbox)
    await bus.publish(f"{root}." + "x" * 3500, b"1")
    await eventually(lambda: inbox.data == [b"1"])


async def test_replay_delivers_the_past_then_follows(connect: Connect, root: str) -> None:
    sender, reader = await connect(), await connect()
    await sender.ensure_stream(stream_of(root))
    await sender.ensure_stream(stream_of(root))
    for number in range(300):
        await sender.publish(f"{root}.{number % 3}", b"%d" % number)
    await sender.flush()
    inbox = Inbox()
    await reader.replay(f"s_{root}", f"{root}.1", inbox, on_caught_up=inbox.note_caught_up)
    await eventually(lambda: inbox.caught_up == [100])
    await sender.publish(f"{root}.1", b"new")
    await eventually(lambda: len(inbox.items) == 101)
    assert inbox.data == [b"%d" % number for number in range(1, 300, 3)] + [b"new"]
    sequences = [item.sequence for item in inbox.items]
    assert sequences == [*range(2, 300, 3), 301]
    assert inbox.caught_up == [100]


async def test_replay_of_an_empty_stream_is_caught_up_at_once(bus: Bus, root: str) -> None:
    await bus.ensure_stream(stream_of(root))
    inbox = Inbox()
    await bus.replay(f"s_{root}", f"{root}.>", inbox, on_caught_up=inbox.note_caught_up)
    await eventually(lambda: inbox.caught_up == [0])
    await bus.publish(f"{root}.x", b"1")
    await eventually(lambda: inbox.data == [b"1"])
    assert inbox.caught_up == [0]


async def test_replay_can_be_limited_to_the_last_seconds_or_to_what_is_new(bus: Bus, root: str) -> None:
    await bus.ensure_stream(stream_of(root))
    await bus.publish(f"{root}.x", b"old")
    await bus.flush()
    await asyncio.sleep(0.7)
    await bus.publish(f"{root}.x", b"recent")
    await bus.flush()
    recent, new = Inbox(), Inbox()
    await bus.replay(f"s_{root}", f"{root}.x", recent, on_caught_up=recent.note_caught_up, since_s=0.4)
    await bus.replay(f"s_{root}", f"{root}.x", new, on_caught_up=new.note_caught_up, since_s=0)
    await eventually(lambda: recent.caught_up == [1] and new.caught_up == [0])
    await bus.publish(f"{root}.x", b"new")
    await eventually(lambda: recent.data == [b"recent", b"new"] and new.data == [b"new"])


async def test_a_stopped_replay_hears_nothing_more(bus: Bus, root: str) -> None:
    await bus.ensure_stream(stream_of(root))
    inbox = Inbox()
    subscription = await bus.replay(f"s_{root}", f"{root}.x", inbox)
    await bus.publish(f"{root}.x", b"1")
    await eventually(lambda: len(inbox.items) == 1)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish(f"{root}.x", b"2")
    await settle(bus)
    assert inbox.data == [b"1"]


async def test_a_full_stream_drops_its_oldest_messages(bus: Bus, root: str) -> None:
    await bus.ensure_stream(stream_of(root, max_bytes=100_000))
    for number in range(30):
        await bus.publish(f"{root}.x", b"%02d" % number + bytes(10_000))
    await bus.flush()
    inbox = Inbox()
    await bus.replay(f"s_{root}", f"{root}.x", inbox, on_caught_up=inbox.note_caught_up)
    await eventually(lambda: bool(inbox.caught_up))
    numbers = [int(data[:2]) for data in inbox.data]
    assert 5 <= len(numbers) <= 10
    assert numbers == list(range(30 - len(numbers), 30))


async def test_a_stream_can_be_given_another_specification(bus: Bus, root: str) -> None:
    await bus.ensure_stream(stream_of(root))
    await bus.publish(f"{root}.x", b"kept")
    await bus.ensure_stream(stream_of(root, subjects=(f"{root}.>", f"more{root}"), max_age_s=30.0))
    await bus.publish(f"more{root}", b"captured")
    await bus.flush()
    inbox = Inbox()
    await bus.replay(f"s_{root}", ">", inbox, on_caught_up=inbox.note_caught_up)
    await eventually(lambda: inbox.caught_up == [2])
    assert inbox.data == [b"kept", b"captured"]


async def test_replay_of_a_missing_stream_is_refused(bus: Bus, root: str) -> None:
    with pytest.raises(BusError, match="does not exist"):
        await bus.replay(f"s_{root}", ">", Inbox())


class Watch:
    """Collect what a key-value watch tells."""

    def __init__(self) -> None:
        self.updates: list[KvUpdate | None] = []

    def __call__(self, update: KvUpdate | None) -> None:
        self.updates.append(update)


async def test_watch_tells_the_entries_then_none_then_changes(connect: Connect, root: str) -> None:
    writer, reader = await connect(), await connect()
    bucket = await writer.key_value(root, ttl_s=30)
    await bucket.put("a.b", b"old")
    await bucket.put("a.b", b"1")
    await bucket.put("gone", b"x")
    await bucket.delete("gone")
    watch = Watch()
    subscription = await (await reader.key_value(root, ttl_s=30)).watch(watch)
    await eventually(lambda: watch.updates == [KvUpdate("a.b", b"1"), None])
    await bucket.put("c", b"2")
    await bucket.delete("a.b")
    await bucket.delete("never.there")
    await bucket.put("c", b"3")
    await eventually(lambda: len(watch.updates) == 5)
    assert watch.updates[2:] == [KvUpdate("c", b"2"), KvUpdate("a.b", None), KvUpdate("c", b"3")]
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bucket.put("c", b"4")
    await settle(writer)
    assert len(watch.updates) == 5


async def test_watch_of_an_empty_bucket_tells_none_at_once(bus: Bus, root: str) -> None:
    watch = Watch()
    await (await bus.key_value(root, ttl_s=30)).watch(watch)
    await eventually(lambda: watch.updates == [None])


async def test_entries_expire_unless_they_are_put_again(bus: Bus, root: str) -> None:
    bucket = await bus.key_value(root, ttl_s=1.0)
    watch = Watch()
    await bucket.watch(watch)
    await bucket.put("dies", b"1")
    for _ in range(8):
        await bucket.put("lives", b"1")
        await asyncio.sleep(0.25)
    gone = [update for update in watch.updates if update is not None and update.value is None]
    assert gone == [KvUpdate("dies", None, expired=True)]
    fresh = Watch()
    await bucket.watch(fresh)
    await eventually(lambda: fresh.updates == [KvUpdate("lives", b"1"), None])


async def test_a_closed_bus_refuses_and_says_so(connect: Connect, root: str) -> None:
    bus = await connect()
    inbox = Inbox()
    await bus.subscribe(f"{root}.x", inbox)
    bucket = await bus.key_value(root, ttl_s=30)
    open_before = bus.connected
    await bus.close()
    await bus.close()
    assert (open_before, bus.connected) == (True, False)
    with pytest.raises(BusError, match="closed"):
        await bus.publish(f"{root}.x", b"")
    with pytest.raises(BusError, match="closed"):
        await bus.subscribe(f"{root}.x", inbox)
    with pytest.raises(BusError, match="closed"):
        await bucket.put("k", b"")
    with pytest.raises(BusError, match="closed"):
        await bus.flush()
    other = await connect()
    await other.publish(f"{root}.x", b"")
    await settle(other)
    assert inbox.items == []


async def test_a_task_that_loses_a_cancellation_is_ended_all_the_same() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_task(task)
    assert task.cancelled()
