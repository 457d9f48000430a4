"""From cards to engines and pairs, and who of several matching processes leads."""

import os

import anyio
import msgspec
import pytest

from kvflow.actors.matching import leader
from kvflow.actors.matching.fleet import Fleet
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, PairIncompatible
from kvflow.actors.matching.leader import Candidate, Leadership
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.directory import Joined, Left
from kvflow.messages import (
    EngineCard,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    KvSegment,
    KvView,
    ModelFingerprint,
    Subjects,
)
from matching_world import engine

P, D = engine("p"), engine("d")


def card(me: EngineRef, rank: int = 0, ranks: int = 1, *, agent: str = "a", model: str = "m") -> EngineCard:
    view = KvView(
        layer="0", part="kv", group=0, segment=0, offset=0, blocks=10, block_tokens=16, heads=1, head_start=0,
        total_heads=1, row_bytes=4, block_stride=64, head_stride=64, token_stride=4,
    )  # fmt: skip
    profile = EngineProfile(
        engine=me, rank=rank, ranks=ranks, tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1,
        roles=("source", "target"), host="h", model=model,
        geometry=KvGeometry(dtype="bfloat16", num_blocks=10, groups=(KvGroup(block_tokens=16),), views=(view,)),
        fingerprint=ModelFingerprint(fields=(("model", model),)),
    )  # fmt: skip
    segments = (KvSegment(address=4096, length=640),)
    return EngineCard(profile=profile, agent=agent, nixl_metadata=b"", segments=segments, placement="process")


def test_an_engine_joins_with_its_last_rank_and_goes_with_its_first() -> None:
    fleet = Fleet()
    assert list(fleet.learn(Joined(card(P, 0, 2)), 1.0)) == []
    assert list(fleet.learn(Joined(card(P, 1, 2)), 2.0)) == [EngineJoined(2.0, P, 2)]
    assert list(fleet.learn(Joined(card(P, 1, 2)), 3.0)) == []
    assert list(fleet.learn(Left(P, 0, "lost"), 4.0)) == [EngineGone(4.0, P, "rank 0: lost")]
    assert list(fleet.learn(Left(P, 1, "lost"), 5.0)) == []


def test_new_actors_of_a_rank_mean_that_the_old_are_gone() -> None:
    fleet = Fleet()
    list(fleet.learn(Joined(card(P)), 1.0))
    events = list(fleet.learn(Joined(card(P, agent="b")), 2.0))
    assert [type(event) for event in events] == [EngineGone, EngineJoined]


def test_pairs_that_differ_are_told_in_both_directions() -> None:
    fleet = Fleet()
    list(fleet.learn(Joined(card(P)), 1.0))
    events = list(fleet.learn(Joined(card(D, model="other")), 1.0))
    pairs = {(event.source, event.target) for event in events if isinstance(event, PairIncompatible)}
    assert pairs == {(P, D), (D, P)}


def test_i7_a_card_that_makes_no_sense_is_incompatible_with_everybody() -> None:
    fleet = Fleet()
    list(fleet.learn(Joined(card(P)), 1.0))
    bad = msgspec.structs.replace(card(D), segments=())
    events = list(fleet.learn(Joined(bad), 1.0))
    assert any(isinstance(event, PairIncompatible) for event in events)


# --- leadership -------------------------------------------------------------------------------------------------------


async def stand(broker: MemoryBroker, tasks: anyio.abc.TaskGroup) -> Leadership:
    made = Leadership(MemoryBus(broker), "c")
    with anyio.fail_after(5):
        await tasks.start(made.run)
    return made


async def until(leadership: Leadership, leads: bool) -> None:
    with anyio.fail_after(5):
        while leadership.leads != leads:  # noqa: ASYNC110 - `leads` also changes by the mere passing of time
            await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_the_first_leads_and_the_next_follows_when_it_resigns() -> None:
    broker = MemoryBroker()
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as inner:
            first = await stand(broker, inner)
            await until(first, True)
            second = await stand(broker, tasks)
            await anyio.sleep(0.7)
            assert (first.leads, second.leads) == (True, False)
            inner.cancel_scope.cancel()
        await until(second, True)
        assert not first.leads
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_dead_process_of_this_host_is_passed_over() -> None:
    broker = MemoryBroker()
    bucket = await MemoryBus(broker).key_value(Subjects("c").bucket(leader.BUCKET), ttl_s=60.0)
    async with anyio.create_task_group() as tasks:
        alive = Candidate(leader._process_space(), os.getppid())
        dead = Candidate(leader._process_space(), 2**22 + 1)
        await bucket.put("0", msgspec.msgpack.encode(dead))
        made = await stand(broker, tasks)
        await until(made, True)
        await bucket.put("0", msgspec.msgpack.encode(alive))
        await until(made, False)
        await bucket.put("0", b"another version")
        await anyio.sleep(0.2)
        assert not made.leads
        await bucket.delete("0")
        await until(made, True)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_leader_that_could_not_refresh_stands_back_first() -> None:
    now = 0.0
    made = Leadership(MemoryBus(), "c", clock=lambda: now)
    async with anyio.create_task_group() as tasks:
        await tasks.start(made.run)
        await until(made, True)
        changes: list[bool] = []
        made.on_change(lambda: changes.append(made.leads))
        now += leader.SURE_S
        assert not made.leads
        await anyio.sleep(leader.REFRESH_S + 0.2)
        now += leader.SETTLE_S
        await until(made, True)
        assert changes == [False, True]
        tasks.cancel_scope.cancel()
