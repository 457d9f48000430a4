"""What the traffic counts as arrived, cancelled and failed."""

import itertools
import math

import anyio
import pytest

from kvflow.messages import EngineRef, TransferEvent
from kvflow.messages.events import TransferEventKind
from kvflow.sim.control import SimProcess
from kvflow.sim.load import PlannedTransfer
from kvflow.sim.request import RequestResult
from kvflow.sim.traffic import Deliveries, Traffic

NUMBERS = itertools.count()
SOURCE = EngineRef(engine_id="p", incarnation="1")


def delivered(
    transfer: str, rank: int = 0, binding: int = 1, kind: TransferEventKind = "delivered", done: int = 100
) -> TransferEvent:
    return TransferEvent(
        kind=kind, transfer_id=transfer, at=0.0, actor="transfer", binding=binding, source=SOURCE, rank=rank,
        tokens=done, tokens_total=100, bytes_done=done, bytes_early=40, descriptors=3, pieces=2,
    )  # fmt: skip


def test_deliveries_count_each_rank_once_and_keep_the_last_totals() -> None:
    deliveries = Deliveries()
    deliveries.add(delivered("a", kind="progress", done=60))
    for event in (delivered("a"), delivered("a"), delivered("a", rank=1), delivered("b"), delivered("b", binding=2)):
        deliveries.add(event)
    deliveries.add(delivered("a", kind="progress", done=80))
    deliveries.add(delivered("c", kind="started"))
    assert [deliveries.total("bytes_done"), deliveries.total("bytes_early")] == [400, 160]
    assert [deliveries.total("descriptors"), deliveries.total("pieces")] == [12, 8]


@pytest.mark.anyio
async def test_events_of_all_ranks_are_waited_for() -> None:
    deliveries = Deliveries()
    for event in (delivered("a"), delivered("a", rank=1), delivered("b")):
        deliveries.add(event)
    deliveries.add(delivered("b", rank=1, kind="progress", done=99))
    assert await deliveries.missing({"a"}, 2, 0.1) == 0
    assert await deliveries.missing({"a", "b", "c"}, 2, 0.1) == 2
    async with anyio.create_task_group() as group:
        group.start_soon(deliver_soon, deliveries)
        assert await deliveries.missing({"a", "b"}, 2, 5.0) == 0


async def deliver_soon(deliveries: Deliveries) -> None:
    await anyio.sleep(0.05)
    deliveries.add(delivered("b", rank=1, kind="progress"))


def result(outcome: str = "finished", **times: float) -> RequestResult:
    return RequestResult(request_id=f"t{next(NUMBERS)}-target", outcome=outcome, output=[1], prompt_tokens=65, **times)  # type: ignore[arg-type]


def planned(*, abort: bool = False) -> PlannedTransfer:
    return PlannedTransfer(number=0, prompt=[1], output_tokens=1, late=False, abort_after_s=0.01 if abort else None)


@pytest.fixture
def traffic() -> Traffic:
    silent = object.__new__(SimProcess)
    return Traffic(silent, silent)


def test_latency_counts_from_when_both_were_ready(traffic: Traffic) -> None:
    for source_done in (13.5, 5.0):
        arrived = result(allocated_at=10.0, received_at=14.0, first_token_at=15.0, external_tokens=64, submitted_at=9.0)
        traffic._count(planned(), result(first_token_at=source_done, submitted_at=8.0), arrived)
    assert traffic.latencies_s == [0.5, 4.0]
    assert all(math.isclose(ttft, 7.0) for ttft in traffic.ttfts_s)
    assert len(traffic.arrived) == 2
    assert traffic.counts["tokens_moved"] == 128


def test_a_full_hit_on_the_target_needs_no_transfer(traffic: Traffic) -> None:
    traffic._count(planned(), result(), result(local_hit_tokens=64))
    assert traffic.counts["already_there"] == 1
    assert not traffic.failures


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (result(), result(loads_failed=1, received_at=1.0)),
        (result(), result()),
        (result("aborted"), result(received_at=1.0)),
        (result(), result("load_failed")),
        (result("rejected"), result(received_at=1.0)),
    ],
)
def test_everything_else_is_a_failure(traffic: Traffic, source: RequestResult, target: RequestResult) -> None:
    traffic._count(planned(), source, target)
    assert traffic.failures.total() == 1
    assert not traffic.arrived


def test_an_abort_is_cancelled_when_it_came_in_time(traffic: Traffic) -> None:
    traffic._count(planned(abort=True), result(), result("aborted"))
    traffic._count(planned(abort=True), result("aborted"), result("aborted"))
    traffic._count(planned(abort=True), result(), result(received_at=1.0, external_tokens=64))
    traffic._count(planned(abort=True), result("rejected"), result("aborted"))
    assert traffic.counts["cancelled"] == 2
    assert len(traffic.arrived) == 1
    assert traffic.failures.total() == 1
