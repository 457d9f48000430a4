import itertools

import msgspec
import pytest
from connector_fakes import BLOCK, ENGINE, GROUP, scheduler, source_params, step, target_params

from kvflow.actors.matching.actor import limits_of
from kvflow.config import Settings
from kvflow.connector.bounds import answer_bound_s, hold_bound_s, load_bound_s
from kvflow.connector.digest import prompt_digest
from kvflow.connector.questions import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_AT_ONCE
from kvflow.connector.step import EMPTY_STEP
from kvflow.messages import (
    KvGroup,
    SourceClosed,
    SourceOpened,
    Subjects,
    TargetCancelled,
    TargetRegistered,
    shard_of,
    unpack_blocks,
)

PROMPT = list(range(100, 100 + 4 * BLOCK))


def test_source_is_opened_while_it_queues() -> None:
    half, port = scheduler(settings=Settings(shards=8))
    half.on_new_request("r", source_params(expected_targets=2), PROMPT, "salt")
    (subject, message), *others = port.letters
    assert not others
    assert subject == Subjects("default").control(shard_of("t1", 8), "source", ENGINE)
    assert message == SourceOpened(
        transfer_id="t1", attempt=1, source=ENGINE, request_id="r", tokens=len(PROMPT), ranks=2,
        prompt_digest=prompt_digest(PROMPT, "salt"), expected_targets=2,
    )  # fmt: skip


def test_progress_carries_only_new_blocks_and_is_capped_at_the_prompt() -> None:
    half, _ = scheduler()
    half.on_new_request("r", source_params(), PROMPT)
    (first,) = step(half, {"r": 24}, {"r": [5, 6]}).progress
    assert (first.tokens_final, first.first_blocks, first.last) == (24, (0,), False)
    assert unpack_blocks(first.blocks[0]).tolist() == [5, 6]
    (second,) = step(half, {"r": len(PROMPT) + 3}, {"r": [5, 6, 7, 8, 9]}).progress
    assert (second.tokens_final, second.first_blocks, second.last) == (len(PROMPT), (2,), True)
    assert unpack_blocks(second.blocks[0]).tolist() == [7, 8]
    assert step(half, {"r": len(PROMPT) + 4}, {"r": [5, 6, 7, 8, 9]}) is EMPTY_STEP


def test_progress_stops_at_whole_atoms_until_the_prompt_is_complete() -> None:
    half, _ = scheduler(atom_tokens=BLOCK)
    half.on_new_request("r", source_params(), PROMPT)
    assert step(half, {"r": BLOCK - 1}, {"r": [5]}) is EMPTY_STEP
    (first,) = step(half, {"r": BLOCK + 5}, {"r": [5, 6]}).progress
    assert (first.tokens_final, len(first.blocks[0])) == (BLOCK, 4)
    (last,) = step(half, {"r": len(PROMPT)}, {"r": [5, 6, 7, 8]}).progress
    assert (last.tokens_final, last.first_blocks, last.last) == (len(PROMPT), (1,), True)


def test_finished_source_is_sealed_and_held_and_its_params_go_to_the_router() -> None:
    half, port = scheduler()
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": len(PROMPT)}, {"r": [1, 2, 3, 4]})
    port.take()
    held, params = half.finished("r", aborted=False)
    assert held
    assert params == {"transfer_id": "t1", "do_remote_prefill": True, "do_remote_decode": False}
    (closed,) = port.take()
    assert isinstance(closed, SourceClosed)
    assert (closed.reason, closed.attempt) == ("finished", 1)
    meta = step(half, {})
    assert [(hold.request_id, hold.attempt) for hold in meta.held] == [("r", 1)]
    assert half.live == 0
    assert half.finished("r", aborted=False) == (False, None)


def test_i3_aborted_source_is_held_once_an_actor_knows_its_blocks() -> None:
    half, port = scheduler()
    half.on_new_request("early", source_params("t1"), PROMPT)
    half.on_new_request("late", source_params("t2"), PROMPT)
    step(half, {"late": BLOCK}, {"late": [1]})
    port.take()
    assert half.finished("early", aborted=True) == (False, None)
    assert half.finished("late", aborted=True) == (True, None)
    assert [message.reason for message in port.take() if isinstance(message, SourceClosed)] == ["aborted", "aborted"]
    assert [hold.request_id for hold in step(half, {}).held] == ["late"]


def test_i5_source_that_ends_before_its_prompt_is_computed_is_not_sealed() -> None:
    half, port = scheduler()
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": BLOCK}, {"r": [1]})
    port.take()
    assert half.finished("r", aborted=False)[0]
    (closed,) = port.take()
    assert isinstance(closed, SourceClosed)
    assert closed.reason == "error"


@pytest.mark.parametrize("same_step", [True, False])
def test_i5_preempted_source_starts_a_new_attempt_with_a_new_table(same_step: bool) -> None:
    half, port = scheduler()
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": 2 * BLOCK}, {"r": [1, 2]})
    port.take()
    if same_step:
        meta = step(half, {"r": 2 * BLOCK}, {"r": [7, 8]}, preempted=frozenset({"r"}))
    else:
        assert step(half, {}, preempted=frozenset({"r"})) is EMPTY_STEP
        # vLLM names it once more, as resumed, when it runs again.
        meta = step(half, {"r": 2 * BLOCK}, {"r": [7, 8]}, preempted=frozenset({"r"}))
    closed, opened = port.take()
    assert isinstance(closed, SourceClosed)
    assert (closed.reason, closed.attempt) == ("preempted", 1)
    assert isinstance(opened, SourceOpened)
    assert opened.attempt == 2
    (progress,) = meta.progress
    assert (progress.attempt, progress.first_blocks, progress.tokens_final) == (2, (0,), 2 * BLOCK)
    assert unpack_blocks(progress.blocks[0]).tolist() == [7, 8]


def test_source_computed_again_without_a_word_is_taken_as_preempted() -> None:
    half, port = scheduler()
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": 2 * BLOCK}, {"r": [1, 2]})
    port.take()
    (progress,) = step(half, {"r": BLOCK}, {"r": [7]}).progress
    assert [type(message) for message in port.take()] == [SourceClosed, SourceOpened]
    assert (progress.attempt, progress.tokens_final) == (2, BLOCK)


def test_source_that_arrived_while_nothing_was_ready_is_opened_when_it_runs() -> None:
    half, port = scheduler()
    port.ready = False
    half.on_new_request("r", source_params(), PROMPT)
    assert step(half, {"r": BLOCK}, {"r": [1]}) is EMPTY_STEP
    port.ready = True
    (progress,) = step(half, {"r": 2 * BLOCK}, {"r": [1, 2]}).progress
    assert progress.first_blocks == (0,)
    assert [type(message) for message in port.take()] == [SourceOpened]


def test_source_never_opened_is_not_held() -> None:
    half, port = scheduler()
    port.ready = False
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": len(PROMPT)}, {"r": [1, 2, 3, 4]})
    assert half.finished("r", aborted=False) == (False, None)
    assert half.counters["local_unavailable"] == 1
    assert not port.take()


def test_second_source_of_a_live_transfer_is_computed_without_it() -> None:
    half, port = scheduler()
    half.on_new_request("a", source_params(), PROMPT)
    half.on_new_request("b", source_params(), PROMPT)
    assert len(port.take()) == 1
    assert half.counters["local_duplicate"] == 1
    assert half.finished("b", aborted=False) == (False, None)
    half.finished("a", aborted=True)
    half.on_new_request("c", source_params(), PROMPT)
    assert [message.attempt for message in port.take() if isinstance(message, SourceOpened)] == [2]


def test_source_whose_window_moved_on_is_not_sealed() -> None:
    half, port = scheduler(groups=(GROUP, KvGroup(block_tokens=BLOCK, kind="window", window_tokens=BLOCK)))
    half.on_new_request("r", source_params(), PROMPT)
    step(half, {"r": len(PROMPT)}, {"r": [1, 2, 3, 4]})
    port.take()
    # The target computes token 63 and looks at tokens 48 to 63: block 3 is enough.
    assert half.finished("r", aborted=False, blocks=([1, 2, 3, 4], [0, 0, 0, 4]))[1] is not None
    half.on_new_request("s", source_params("t2"), PROMPT)
    step(half, {"s": len(PROMPT)}, {"s": [1, 2, 3, 4]})
    port.take()
    assert half.finished("s", aborted=False, blocks=([1, 2, 3, 4], [0, 0, 0, 0])) == (True, None)
    (closed,) = port.take()
    assert isinstance(closed, SourceClosed)
    assert closed.reason == "error"
    assert "window" in closed.detail


def test_target_registers_what_it_misses_by_position() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    assert half.matched_tokens("r", 2 * BLOCK) == (2 * BLOCK - 1, True)
    assert half.matched_tokens("r", 2 * BLOCK) == (2 * BLOCK - 1, True)
    assert not port.letters
    half.allocated("r", ([5, 6, 7, 8, 9],), 2 * BLOCK - 1)
    (subject, message), *others = port.letters
    assert not others
    assert subject == Subjects("default").registration()
    assert isinstance(message, TargetRegistered)
    assert (message.start, message.end, message.prompt_tokens) == (2 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK)
    assert message.first_blocks == (2,)
    assert unpack_blocks(message.blocks[0]).tolist() == [7, 8]
    assert (message.attempt, message.ranks) == (1, 2)
    (load,) = step(half, {}).loads
    assert (load.request_id, load.transfer_id, load.attempt) == ("r", "t1", 1)
    assert half.matched_tokens("r", 0) == (0, False)


def test_target_never_starts_inside_an_atom() -> None:
    half, _ = scheduler(atom_tokens=BLOCK)
    half.on_new_request("r", target_params(), PROMPT)
    assert half.matched_tokens("r", 1) == (0, False)
    assert half.matched_tokens("r", BLOCK) == (len(PROMPT) - 1 - BLOCK, True)
    assert half.matched_tokens("r", 0) == (len(PROMPT) - 1, True)


def test_target_computes_a_short_tail_itself_and_lets_the_source_go() -> None:
    half, port = scheduler(settings=Settings(min_load_tokens=BLOCK))
    half.on_new_request("r", target_params(), PROMPT)
    assert half.matched_tokens("r", 3 * BLOCK) == (0, False)
    half.allocated("r", ([5, 6, 7, 8],), 0)
    (message,) = port.take()
    assert isinstance(message, TargetRegistered)
    assert message.start == message.end
    assert not half.counters["local_unavailable"]


def test_full_prefix_hit_registers_an_empty_range_once() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    assert half.matched_tokens("r", len(PROMPT) - 1) == (0, False)
    half.allocated("r", (), 0)
    half.allocated("r", (), 0)
    (message,) = port.take()
    assert isinstance(message, TargetRegistered)
    assert message.start == message.end == len(PROMPT) - 1
    assert message.blocks == (b"",)
    half.finished("r", aborted=False)
    assert not port.take()
    assert half.live == 0


def test_target_without_a_node_is_computed_locally_and_counted() -> None:
    half, port = scheduler()
    port.ready = False
    half.on_new_request("r", target_params(), PROMPT)
    assert half.matched_tokens("r", 0) == (0, False)
    half.allocated("r", ([1],), 0)
    assert half.counters["local_unavailable"] == 1
    port.ready = True
    assert half.matched_tokens("r", 0) == (0, False)
    assert not port.take()


def test_target_aborted_while_it_waits_is_cancelled_once_and_followed_to_its_end() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    half.allocated("r", ([1, 2, 3, 4],), half.matched_tokens("r", 0)[0])
    port.take()
    assert half.finished("r", aborted=True) == (False, None)
    assert half.finished("r", aborted=True) == (False, None)
    (cancelled,) = port.take()
    assert isinstance(cancelled, TargetCancelled)
    assert (cancelled.request_id, cancelled.attempt) == ("r", 1)
    assert half.live == 1
    half.loads_ended({"r"}, {"r"})
    assert half.live == 0


def test_target_aborted_before_it_was_scheduled_lets_the_source_go() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    half.finished("r", aborted=True)
    (message,) = port.take()
    assert isinstance(message, TargetRegistered)
    assert message.start == message.end
    assert half.live == 0


@pytest.mark.parametrize("failed", [set(), {"r"}])
def test_ended_load_is_not_tried_again(failed: set[str]) -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    half.allocated("r", ([1, 2, 3, 4],), half.matched_tokens("r", 0)[0])
    half.loads_ended({"r", "unknown"}, failed)
    half.loads_ended({"r"}, set())
    port.take()
    # Recomputed after a failure, or after a preemption.
    assert half.matched_tokens("r", 0) == (0, False)
    half.allocated("r", ([1, 2, 3, 4],), 0)
    assert not port.take()
    half.finished("r", aborted=False)
    assert half.live == 0


@pytest.mark.parametrize(
    ("role", "params"), [("target", source_params()), ("source", target_params())], ids=["source", "target"]
)
def test_request_for_a_role_that_the_engine_lacks_is_computed_locally(role: str, params: dict[str, object]) -> None:
    half, port = scheduler(roles=("target",) if role == "target" else ("source",))
    half.on_new_request("r", params, PROMPT)
    assert half.live == 0
    assert half.counters["local_wrong_role"] == 1
    assert not port.take()


def test_prompt_without_tokens_and_table_beyond_a_message_are_computed_locally() -> None:
    half, _ = scheduler()
    half.on_new_request("a", target_params(), None)
    half.on_new_request("b", target_params(), [1] * (BLOCK * 230_000))
    assert half.counters["local_no_tokens"] == half.counters["local_too_long"] == 1
    assert half.live == 0


def test_i7_hooks_for_requests_never_seen_do_nothing() -> None:
    half, port = scheduler()
    assert half.matched_tokens("x", 0) == (0, False)
    half.allocated("x", ([1],), 5)
    assert half.finished("x", aborted=True) == (False, None)
    half.loads_ended({"x"}, {"x"})
    assert step(half, {"x": 5}, preempted=frozenset({"x"})) is EMPTY_STEP
    assert not port.take()


def test_i8_nothing_is_left_after_shutdown() -> None:
    half, port = scheduler()
    half.on_new_request("a", source_params(), PROMPT)
    half.on_new_request("b", target_params("t2"), PROMPT)
    half.shutdown()
    half.shutdown()
    assert half.live == 0
    assert port.closed == 2


@pytest.mark.parametrize("settings", [Settings(), Settings(transfer_wait_s=100.0, quarantine_s=20.0, card_ttl_s=1.0)])
def test_i4_bounds_outlast_what_matching_takes_at_its_slowest(settings: Settings) -> None:
    limits = limits_of(settings)
    answer = limits.quiesce_wait_s + limits.quarantine_s
    assert answer_bound_s(settings) >= answer
    phases = settings.source_wait_s + settings.compute_wait_s + settings.transfer_wait_s
    assert load_bound_s(settings) > phases + answer
    assert hold_bound_s(settings) > settings.source_lease_s + settings.transfer_wait_s + answer


def test_i4_registration_without_an_answer_is_posted_again_until_its_load_has_ended() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    half.allocated("r", ([1, 2, 3, 4],), half.matched_tokens("r", 0)[0])
    (first,) = port.take()
    assert isinstance(first, TargetRegistered)
    assert not first.repeated
    began, asked = port.clock.now, []
    while port.clock.now < began + 120:
        port.clock.now += 0.5
        step(half, {})
        for message in port.take():
            assert message == msgspec.structs.replace(first, repeated=True)
            asked.append(port.clock.now - began)
    assert asked[:3] == [FIRST_PAUSE_S, 3 * FIRST_PAUSE_S, 7 * FIRST_PAUSE_S]
    assert {after - before for before, after in itertools.pairwise(asked[3:])} == {LONGEST_PAUSE_S}
    half.loads_ended({"r"}, set())
    port.clock.now += LONGEST_PAUSE_S
    assert step(half, {}) is EMPTY_STEP
    assert not port.take()


def test_i4_cancel_without_an_answer_takes_the_place_of_its_registration() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    half.allocated("r", ([1, 2, 3, 4],), half.matched_tokens("r", 0)[0])
    port.clock.now += FIRST_PAUSE_S / 2
    half.finished("r", aborted=True)
    _, cancelled = port.take()
    assert isinstance(cancelled, TargetCancelled)
    port.clock.now += FIRST_PAUSE_S / 2
    step(half, {})
    assert not port.take()
    port.clock.now += FIRST_PAUSE_S / 2
    step(half, {})
    assert port.take() == [cancelled]


def test_i2_registration_that_waited_for_the_bus_is_not_sent_once_its_load_has_ended() -> None:
    half, port = scheduler()
    half.on_new_request("r", target_params(), PROMPT)
    matched, _ = half.matched_tokens("r", 0)
    port.away = True
    half.allocated("r", ([1, 2, 3, 4],), matched)
    port.clock.now += FIRST_PAUSE_S
    step(half, {})
    assert len(port.outbox) == 2
    half.loads_ended({"r"}, {"r"})  # fenced: its blocks are others' now
    port.come_back()
    assert not port.take()


def test_nothing_is_asked_again_while_nobody_can_answer_nor_too_much_in_one_step() -> None:
    half, port = scheduler()
    for number in range(MOST_AT_ONCE + 1):
        half.on_new_request(f"r{number}", target_params(f"t{number}"), PROMPT)
        half.allocated(f"r{number}", ([1, 2, 3, 4],), half.matched_tokens(f"r{number}", 0)[0])
    port.take()
    port.ready = False
    port.clock.now += FIRST_PAUSE_S
    step(half, {})
    assert not port.take()
    port.ready = True
    step(half, {})
    assert len(port.take()) == MOST_AT_ONCE
    step(half, {})
    assert len(port.take()) == 1
