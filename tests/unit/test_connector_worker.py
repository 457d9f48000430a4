from collections.abc import Callable

import msgspec
import pytest
import structlog
from connector_fakes import BLOCK, ENGINE, completed, failed, released, worker

from kvflow.config import Settings
from kvflow.connector.bounds import answer_bound_s
from kvflow.connector.step import NO_RESULTS, Hold, LoadStart, Progress, StepMeta
from kvflow.connector.worker import ASK_HELD_S, EARLY_KEPT_S, HOUSEKEEPING_S
from kvflow.messages import CloseReason, PeerHello, SourceClosed, SourceProgress, Subjects, TargetCancelled, pack_blocks

SETTINGS = Settings()
FENCE_S = SETTINGS.card_ttl_s + SETTINGS.quarantine_s


def loads(*request_ids: str, attempt: int = 1, bound_s: float = 100.0) -> StepMeta:
    return StepMeta(loads=tuple(LoadStart(request_id, "t1", attempt, bound_s) for request_id in request_ids))


def held(*request_ids: str, attempt: int = 1, bound_s: float = 100.0, reason: CloseReason = "finished") -> StepMeta:
    return StepMeta(held=tuple(Hold(request_id, "t1", attempt, bound_s, reason) for request_id in request_ids))


def test_progress_goes_to_the_rank_s_own_transfer_actor() -> None:
    half, port, _ = worker(rank=1)
    blocks = pack_blocks([4])
    half.after_forward(StepMeta(progress=(Progress("r", "t1", 3, BLOCK, (0,), (blocks,), last=True),)))
    ((subject, message),) = port.letters
    assert subject == Subjects("default").transfer(ENGINE, 1)
    assert message == SourceProgress(
        transfer_id="t1", attempt=3, source=ENGINE, rank=1, tokens_final=BLOCK, first_blocks=(0,), blocks=(blocks,),
        last=True,
    )  # fmt: skip


def test_progress_of_a_device_waits_until_it_is_done() -> None:
    half, port, _ = worker()
    acts: list[Callable[[], None]] = []
    meta = StepMeta(progress=(Progress("r", "t1", 1, BLOCK, (0,), (b"",), last=False),))
    half.after_forward(meta, acts.append)
    assert not port.letters
    acts[0]()
    assert len(port.letters) == 1


def test_load_is_reported_exactly_once() -> None:
    half, port, _ = worker()
    half.begin_step(loads("r"))
    assert half.results(set()) is NO_RESULTS
    port.inbox.extend([completed("r", 1), completed("r", 1), failed("r", 1)])
    results = half.results(set())
    assert (results.received, results.failed, results.sent) == ({"r"}, set(), set())
    assert half.results(set()) is NO_RESULTS


def test_failed_load_is_reported_as_received_and_failed() -> None:
    half, port, _ = worker()
    half.begin_step(loads("r"))
    port.inbox.append(failed("r", 1))
    results = half.results(set())
    assert (results.received, results.failed) == ({"r"}, {"r"})
    assert half.counters["failed_source_lost"] == 1


def test_answer_that_overtakes_its_load_is_kept() -> None:
    half, port, _ = worker()
    port.inbox.append(completed("r", 1))
    assert half.results(set()) is NO_RESULTS
    half.begin_step(loads("r"))
    assert half.results(set()).received == {"r"}


def test_answers_to_other_attempts_ranks_and_transfers_are_ignored() -> None:
    half, port, _ = worker()
    half.begin_step(loads("r", attempt=5))
    port.inbox.extend([completed("r", 4), completed("r", 5, rank=1), completed("r", 5, transfer_id="other")])
    assert half.results(set()) is NO_RESULTS
    assert half.waiting == 1


def test_source_is_reported_as_sent_only_after_it_is_held() -> None:
    half, port, _ = worker()
    port.inbox.append(released("r", 1))
    assert half.results(set()) is NO_RESULTS
    half.begin_step(held("r"))
    assert half.results({"r"}).sent == {"r"}
    assert half.results({"r"}) is NO_RESULTS


def test_i3_release_of_an_older_attempt_does_not_free_the_blocks() -> None:
    half, port, _ = worker()
    half.begin_step(held("r", attempt=2))
    port.inbox.append(released("r", 1))
    assert half.results(set()) is NO_RESULTS
    port.inbox.append(released("r", 2))
    assert half.results(set()).sent == {"r"}


def test_i8_early_answers_do_not_stay() -> None:
    half, port, clock = worker()
    port.inbox.append(released("r", 1))
    half.results(set())
    clock.now += EARLY_KEPT_S + HOUSEKEEPING_S
    half.results(set())
    half.begin_step(held("r"))
    assert half.results(set()) is NO_RESULTS


def test_i4_overdue_load_is_asked_about_and_then_fenced() -> None:
    half, port, clock = worker()
    half.begin_step(loads("r", bound_s=50.0))
    half.begin_step(held("s", bound_s=50.0))
    clock.now += 51
    assert half.results(set()) is NO_RESULTS
    assert [type(message) for _, message in port.letters] == [TargetCancelled, SourceClosed]
    assert port.fences == 0
    clock.now += answer_bound_s(SETTINGS) - HOUSEKEEPING_S  # matching may take so long to answer
    assert half.results(set()) is NO_RESULTS
    assert port.fences == 0
    clock.now += 2 * HOUSEKEEPING_S
    assert half.results(set()) is NO_RESULTS
    assert (port.fences, port.resumes) == (1, 0)
    # I2: nothing is given back before no actor can have the memory any more.
    port.detached = FENCE_S - 1
    clock.now += HOUSEKEEPING_S
    assert half.results(set()) is NO_RESULTS
    port.detached = FENCE_S
    clock.now += HOUSEKEEPING_S
    results = half.results(set())
    assert (results.received, results.failed, results.sent) == ({"r"}, {"r"}, {"s"})
    assert (port.fences, port.resumes) == (1, 1)
    assert half.waiting == 0


@pytest.mark.parametrize("reason", ["finished", "aborted", "error"])
def test_i4_held_source_is_asked_about_until_it_is_released(reason: CloseReason) -> None:
    half, port, clock = worker()
    half.begin_step(held("s", attempt=3, reason=reason))
    clock.now += ASK_HELD_S - 1
    half.results(set())
    assert not port.letters
    for _ in range(2):
        clock.now += ASK_HELD_S
        half.results(set())
        ((subject, closed),) = port.letters
        assert subject == Subjects("default").control(0, "source", ENGINE)
        assert isinstance(closed, SourceClosed)
        assert (closed.request_id, closed.attempt, closed.reason) == ("s", 3, reason)
        port.letters.clear()
    port.inbox.append(released("s", 3))
    assert half.results(set()).sent == {"s"}
    clock.now += ASK_HELD_S
    half.results(set())
    assert not port.letters


def test_a_cancelled_load_is_no_warning() -> None:
    half, port, _ = worker()
    half.begin_step(loads("r", "s"))
    with structlog.testing.capture_logs() as logs:
        port.inbox.append(msgspec.structs.replace(failed("r", 1), reason="cancelled"))
        port.inbox.append(failed("s", 1))
        half.results(set())
    assert [(entry["request_id"], entry["log_level"]) for entry in logs] == [("r", "info"), ("s", "warning")]


def test_i4_lost_node_ends_what_waits_within_a_bound() -> None:
    half, port, clock = worker()
    half.begin_step(loads("r"))
    half.begin_step(held("s"))
    port.detached = FENCE_S
    clock.now += HOUSEKEEPING_S
    results = half.results(set())
    assert (results.received, results.failed, results.sent) == ({"r"}, {"r"}, {"s"})


def test_i4_lost_bus_fences_what_waits() -> None:
    half, port, clock = worker()
    half.begin_step(loads("r"))
    port.down = FENCE_S + SETTINGS.transfer_wait_s + 1
    half.results(set())
    assert port.fences == 1
    clock.now += HOUSEKEEPING_S
    port.detached = FENCE_S
    assert half.results(set()).failed == {"r"}


def test_i7_unexpected_messages_are_counted() -> None:
    half, port, _ = worker()
    port.inbox.append(PeerHello(source=ENGINE, rank=0, target=ENGINE, target_rank=0))
    assert half.results(set()) is NO_RESULTS
    assert half.counters["unexpected"] == 1
