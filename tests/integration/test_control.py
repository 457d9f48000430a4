"""Registration and matching as actors, over the in-memory bus and over NATS."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from kvflow.actors.control import run_control
from kvflow.bus.connect import connect_bus
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Bus, Delivery
from kvflow.config import Settings
from kvflow.directory import Directory
from kvflow.errors import ConfigError
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
    Role,
    SourceReleased,
    Subjects,
    TransferBound,
    TransferEvent,
    TransferFailed,
    TransferQuiesced,
    TransferRevoked,
    decode,
    encode,
    pack_blocks,
    shard_of,
)
from matching_world import PROMPT, cancelled, closed, completed, delivered, engine, opened, registered

pytestmark = pytest.mark.anyio

P, D = engine("p"), engine("d")
TIMEOUT_S = 10.0
MakeBus = Callable[[Settings], "contextlib.AbstractAsyncContextManager[Bus]"]


def card(me: EngineRef, role: Role, *, agent: str = "agent", model: str = "m") -> EngineCard:
    view = KvView(
        layer="0", part="kv", group=0, segment=0, offset=0, blocks=1000, block_tokens=16, heads=1, head_start=0,
        total_heads=1, row_bytes=4, block_stride=64, head_stride=64, token_stride=4,
    )  # fmt: skip
    profile = EngineProfile(
        engine=me, rank=0, ranks=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, roles=(role,), host="h", model=model,
        geometry=KvGeometry(dtype="bfloat16", num_blocks=1000, groups=(KvGroup(block_tokens=16),), views=(view,)),
        fingerprint=ModelFingerprint(fields=(("model", model),)),
    )  # fmt: skip
    segments = (KvSegment(address=4096, length=64_000),)
    return EngineCard(profile=profile, agent=agent, nixl_metadata=b"", segments=segments, placement="process")


@dataclass
class Cluster:
    bus: Bus
    settings: Settings
    directory: Directory
    heard: dict[str, list[Message]] = field(default_factory=dict)

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.settings.cluster)

    async def listen(self) -> None:
        subjects = self.subjects
        for name, subject in {
            "transfer": subjects.transfer(P),
            "completion": subjects.completion(D),
            "source": subjects.engine(P),
            "target": subjects.engine(D),
            "events": subjects.events_all(),
        }.items():
            self.heard[name] = []
            await self.bus.subscribe(subject, self._hearer(name))

    def _hearer(self, name: str) -> Callable[[Delivery], None]:
        return lambda delivery: self.heard[name].append(decode(delivery.data))

    async def send(self, kind: str, who: EngineRef, message: Message) -> None:
        shard = shard_of(message.transfer_id, self.settings.shards)  # type: ignore[attr-defined]
        await self.bus.publish(self.subjects.control(shard, kind, who), encode(message))

    async def register(self, message: Message) -> None:
        await self.bus.publish(self.subjects.registration(), encode(message))

    async def hear(self, name: str, kind: type[Message], count: int = 1) -> list[Message]:
        with anyio.fail_after(TIMEOUT_S):
            while True:
                found = [message for message in self.heard[name] if isinstance(message, kind)]
                if len(found) >= count:
                    return found
                await anyio.sleep(0.01)

    @asynccontextmanager
    async def control(self, *actors: str) -> AsyncIterator[None]:
        """Run control actors on a connection of the cluster until the block ends."""
        ready = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, set(actors or ("registration", "matching")), ready.set)
            with anyio.fail_after(TIMEOUT_S):
                await ready.wait()
            yield
            tasks.cancel_scope.cancel()

    async def _run(self, actors: set[str], ready: Callable[[], None]) -> None:
        await run_control(bus=self.bus, settings=self.settings, actors=actors, ready=ready)


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
def make_bus(request: pytest.FixtureRequest) -> MakeBus:
    broker = MemoryBroker()
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    @asynccontextmanager
    async def make(settings: Settings) -> AsyncIterator[Bus]:
        if url:
            values = {name: getattr(settings, name) for name in settings.__struct_fields__}
            bus = await connect_bus(Settings(**{**values, "nats_url": url}), name="test")
        else:
            bus = MemoryBus(broker)
        try:
            yield bus
        finally:
            await bus.close()

    return make


@asynccontextmanager
async def cluster(make_bus: MakeBus, *, model: str = "m", **changes: float) -> AsyncIterator[Cluster]:
    settings = Settings(cluster=f"test-{secrets.token_hex(4)}", **changes)  # type: ignore[arg-type]
    async with make_bus(settings) as bus:
        directory = Directory(bus, settings)
        made = Cluster(bus, settings, directory)
        await made.listen()
        await directory.publish(card(P, "source"))
        await directory.publish(card(D, "target", model=model))
        try:
            yield made
        finally:
            await directory.close()


def offer(transfer: str = "t", **changes: object) -> Message:
    message = registered(transfer, D, end=PROMPT - 1)
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**values, "blocks": (pack_blocks([7, 8, 9]),), **changes})


async def test_a_transfer_from_registration_to_release(make_bus: MakeBus) -> None:
    async with cluster(make_bus, shards=3) as c, c.control():
        await c.register(offer())
        await c.send("source", P, opened("t", P))
        bound = (await c.hear("transfer", TransferBound))[0]
        assert isinstance(bound, TransferBound)
        assert bound.blocks == (pack_blocks([7, 8, 9]),)
        assert (await c.hear("completion", TransferBound))[0] == bound
        await c.send("source", P, closed("t", P))
        await c.send("report", P, delivered("t", bound.binding, P))
        await c.send("report", D, completed(bound))
        assert isinstance((await c.hear("source", SourceReleased))[0], SourceReleased)
        await c.hear("transfer", SourceReleased)
        events = await c.hear("events", TransferEvent, 6)
        kinds = [event.kind for event in events if isinstance(event, TransferEvent)]
        assert set(kinds) == {"registered", "opened", "bound", "sealed", "released", "completed"}
        assert all(event.at > 0 and event.actor == "matching" for event in events if isinstance(event, TransferEvent))


async def test_i7_a_bad_registration_is_refused_and_the_actors_go_on(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control():
        await c.bus.publish(c.subjects.registration(), b"\xff nonsense")
        await c.bus.publish(c.subjects.control(0, "source", P), b"\x00")
        await c.send("source", P, opened("t", EngineRef(engine_id="", incarnation="")))
        await c.register(offer(target=EngineRef(engine_id="", incarnation="")))
        await c.register(offer(blocks=(pack_blocks([7, 8, 5000]),)))
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "bad_registration"
        await c.register(offer("u"))
        await c.send("source", P, opened("u", P))
        await c.hear("transfer", TransferBound)


async def test_i2_only_matching_ends_a_registration_that_is_sent_again(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control():
        await c.register(offer())
        await c.send("source", P, opened("t", P))
        bound = (await c.hear("transfer", TransferBound))[0]
        assert isinstance(bound, TransferBound)
        # As if the cards had changed meanwhile: the blocks do not fit any more, but WRITEs into them are under way.
        await c.register(offer(blocks=(pack_blocks([7, 8, 5000]),), repeated=True))
        revoked = (await c.hear("transfer", TransferRevoked))[0]
        assert isinstance(revoked, TransferRevoked)
        assert not [message for message in c.heard["target"] if isinstance(message, TransferFailed)]
        await c.send("report", P, TransferQuiesced(transfer_id="t", binding=bound.binding, source=P, rank=0))
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "cancelled"
        assert "bad_registration" in failed.detail


async def test_i4_completion_that_got_lost_is_told_again_to_who_asks(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control():
        heard: list[Message] = []
        await c.bus.subscribe(c.subjects.engine(D, 0), lambda delivery: heard.append(decode(delivery.data)))
        await c.register(offer())
        await c.send("source", P, opened("t", P))
        bound = (await c.hear("transfer", TransferBound))[0]
        assert isinstance(bound, TransferBound)
        await c.send("report", D, completed(bound))
        with anyio.fail_after(TIMEOUT_S):
            while not heard:
                await c.register(offer(repeated=True))
                await anyio.sleep(0.05)
        assert heard[0] == completed(bound)


async def test_an_unknown_engine_is_refused_after_a_moment(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control("registration"):
        await c.directory.withdraw(D, 0)
        await anyio.sleep(0.1)
        await c.register(offer())
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "unknown_engine"


async def test_a_registration_right_before_its_card_is_let_in(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control():
        await c.directory.withdraw(D, 0)
        await anyio.sleep(0.1)
        await c.register(offer())
        await c.send("source", P, opened("t", P))
        await anyio.sleep(0.1)
        await c.directory.publish(card(D, "target"))
        await c.hear("transfer", TransferBound)


async def test_i4_cancel_is_answered(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, c.control():
        await c.register(cancelled("t", D))
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "cancelled"
        await c.hear("completion", TransferFailed)


async def test_incompatible_engines_are_never_bound(make_bus: MakeBus) -> None:
    async with cluster(make_bus, model="another") as c, c.control():
        await c.register(offer())
        await c.send("source", P, opened("t", P))
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "incompatible"
        assert c.heard["transfer"] == []


async def test_i4_a_restarted_matching_actor_goes_on(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c:
        async with c.control():
            await c.register(offer())
            await c.send("source", P, opened("t", P))
            first = (await c.hear("transfer", TransferBound))[0]
        await c.send("source", P, closed("t", P))  # while nobody is matching
        async with c.control():
            assert (await c.hear("transfer", TransferBound, 2))[1] == first
            assert isinstance(first, TransferBound)
            await c.send("report", P, delivered("t", first.binding, P))
            await c.send("report", D, completed(first))
            await c.hear("source", SourceReleased)
        assert not [m for m in c.heard["target"] if isinstance(m, TransferFailed)]


async def test_a_restarted_transfer_actor_counts_as_lost(make_bus: MakeBus) -> None:
    async with cluster(make_bus, quarantine_s=0.2) as c, c.control():
        await c.register(offer(source_wait_s=0.2))
        await c.send("source", P, opened("t", P))
        await c.hear("transfer", TransferBound)
        await c.directory.publish(card(P, "source", agent="another agent"))
        await c.hear("transfer", TransferRevoked)
        failed = (await c.hear("target", TransferFailed))[0]
        assert isinstance(failed, TransferFailed)
        assert failed.reason == "source_lost"


async def test_only_control_actors_can_be_run() -> None:
    with pytest.raises(ConfigError):
        await run_control(bus=MemoryBus(), settings=Settings(), actors={"transfer"}, ready=lambda: None)


async def test_i1_one_of_two_control_processes_leads_and_the_other_takes_over(make_bus: MakeBus) -> None:
    async with cluster(make_bus) as c, make_bus(c.settings) as other_bus:
        second = Cluster(other_bus, c.settings, c.directory)
        async with second.control():
            async with c.control():
                await c.register(offer())
                await c.send("source", P, opened("t", P))
                first = (await c.hear("transfer", TransferBound))[0]
                await anyio.sleep(0.3)
                assert c.heard["transfer"] == [first], "two processes took the same decision"
            await c.send("source", P, closed("t", P))
            assert isinstance(first, TransferBound)
            await c.send("report", P, delivered("t", first.binding, P))
            await c.hear("source", SourceReleased)
        async with c.control():
            await c.send("report", D, completed(first))
            await c.register(offer("u"))
            await c.send("source", P, opened("u", P))
            await c.hear("transfer", TransferBound, 2)
