"""The matching reducer, case by case. A `Desk` feeds it messages and keeps what came out."""

from dataclasses import dataclass, field, replace

import pytest
from msgspec.structs import replace as replaced

from kvflow.actors.matching.actor import limits_of
from kvflow.actors.matching.effects import Bind, Confirm, Effect, Emit, Fail, Release, Revoke
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, PairIncompatible, Received, Tick
from kvflow.actors.matching.model import State
from kvflow.actors.matching.state import step
from kvflow.actors.transfer.actor import limits_of as transfer_limits
from kvflow.config import Settings
from kvflow.messages import (
    EngineRef,
    Message,
    SourceReleased,
    TransferBound,
    TransferErrored,
    TransferFailed,
    TransferQuiesced,
    TransferRevoked,
)
from matching_world import LIMITS, PROMPT, WAITS, cancelled, closed, completed, delivered, engine, opened, registered

P, Q, D, E = engine("p"), engine("q"), engine("d"), engine("e")


@dataclass
class Desk:
    now: float = 100.0
    state: State = field(default_factory=lambda: State(limits=LIMITS))
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        for who in (P, Q, D, E):
            step(self.state, EngineJoined(self.now, who, 1))

    def take(self, *messages: Message) -> list[Effect]:
        new: list[Effect] = []
        for message in messages:
            new += step(self.state, Received(self.now, message))
        self.effects += new
        return new

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        new = step(self.state, Tick(self.now))
        self.effects += new
        return new

    def gone(self, who: EngineRef) -> list[Effect]:
        new = step(self.state, EngineGone(self.now, who, "lost"))
        self.effects += new
        return new

    @property
    def bound(self) -> TransferBound:
        return binds(self.effects)[-1]


def binds(effects: list[Effect]) -> list[TransferBound]:
    return [effect.message for effect in effects if isinstance(effect, Bind)]


def revokes(effects: list[Effect]) -> list[TransferRevoked]:
    return [effect.message for effect in effects if isinstance(effect, Revoke)]


def fails(effects: list[Effect]) -> list[TransferFailed]:
    return [effect.message for effect in effects if isinstance(effect, Fail)]


def releases(effects: list[Effect]) -> list[SourceReleased]:
    return [effect.message for effect in effects if isinstance(effect, Release)]


def kinds(effects: list[Effect]) -> list[str]:
    return [effect.event.kind for effect in effects if isinstance(effect, Emit)]


def quiesced(bound: TransferBound, rank: int = 0) -> TransferQuiesced:
    return TransferQuiesced(transfer_id=bound.transfer_id, binding=bound.binding, source=bound.source, rank=rank)


def errored(bound: TransferBound, rank: int = 0) -> TransferErrored:
    return TransferErrored(
        transfer_id=bound.transfer_id, binding=bound.binding, source=bound.source, rank=rank, reason="transfer_error",
        detail="link down",
    )  # fmt: skip


@pytest.fixture
def desk() -> Desk:
    return Desk()


def finish(desk: Desk) -> None:
    """Check that nothing is live, and that tombstones go."""
    assert desk.state.live == 0
    assert len(desk.state.timers) == 0
    desk.wait(LIMITS.tombstone_s)
    assert (desk.state.transfers, desk.state.by_engine, len(desk.state.tombstones)) == ({}, {}, 0)


# --- the two orders, and the happy end --------------------------------------------------------------------------------


@pytest.mark.parametrize("target_first", [True, False])
def test_both_orders_bind_at_once(desk: Desk, target_first: bool) -> None:
    legs: list[Message] = [registered("t", D, start=16), opened("t", P)]
    new = desk.take(*(legs if target_first else legs[::-1]))
    bound = binds(new)[0]
    assert (bound.source, bound.target, bound.start, bound.end, bound.binding) == (P, D, 16, PROMPT - 1, 1)
    assert fails(new) == []
    assert releases(new) == []


def test_i8_happy_path_leaves_nothing(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D), closed("t", P))
    assert releases(desk.effects) == []
    new = desk.take(delivered("t", 1, P))
    assert [(r.source, r.outcome) for r in releases(new)] == [(P, "delivered")]
    desk.take(completed(desk.bound))
    assert kinds(desk.effects) == ["opened", "registered", "bound", "sealed", "released", "completed"]
    finish(desk)


def test_late_registration_binds_within_the_lease(desk: Desk) -> None:
    desk.take(opened("t", P), closed("t", P))
    desk.wait(LIMITS.source_lease_s - 1)
    assert binds(desk.take(registered("t", D)))


def test_i3_source_is_released_only_when_all_ranks_have_written() -> None:
    desk = Desk()
    step(desk.state, EngineJoined(desk.now, P, 2))
    desk.take(opened("t", P, ranks=2), registered("t", D), closed("t", P))
    assert releases(desk.take(delivered("t", 1, P, 0), delivered("t", 1, P, 0))) == []
    assert releases(desk.take(delivered("t", 1, P, 1)))


def test_seal_after_completion_releases_at_once(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    assert releases(desk.take(completed(desk.bound))) == []
    assert [r.outcome for r in releases(desk.take(closed("t", P)))] == ["delivered"]
    finish(desk)


def test_release_is_told_again_to_an_engine_that_asks_again(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D), closed("t", P), delivered("t", 1, P))
    desk.take(completed(desk.bound))
    again = desk.take(closed("t", P))
    assert [r.outcome for r in releases(again)] == ["delivered"]
    assert kinds(again) == []


def test_fan_out_waits_for_all_expected_targets(desk: Desk) -> None:
    desk.take(opened("t", P, expected=2), registered("t", D), registered("t", E), closed("t", P))
    assert [b.target for b in binds(desk.effects)] == [D, E]
    assert releases(desk.take(delivered("t", 1, P))) == []
    assert releases(desk.take(delivered("t", 2, P)))


def test_empty_range_counts_as_served(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D, start=PROMPT - 1))
    assert binds(desk.effects) == []
    assert [r.outcome for r in releases(desk.take(closed("t", P)))] == ["unused"]
    finish(desk)


def test_i4_registration_asked_again_is_not_taken_twice_and_is_told_how_it_ended(desk: Desk) -> None:
    again = replaced(registered("t", D), repeated=True)
    desk.take(registered("t", D), opened("t", P))
    assert desk.take(again, again) == []
    desk.take(closed("t", P), completed(desk.bound))
    confirmed = [effect.message for effect in desk.take(again) if isinstance(effect, Confirm)]
    assert confirmed == [completed(desk.bound)]
    assert desk.take(registered("t", D)) == []
    finish(desk)


def test_i4_every_rank_hears_again_that_it_has_every_byte() -> None:
    desk = Desk()
    step(desk.state, EngineJoined(desk.now, D, 2))
    desk.take(registered("t", D, ranks=2), opened("t", P), closed("t", P))
    desk.take(completed(desk.bound, 0))
    again = replaced(registered("t", D, ranks=2), repeated=True)
    assert desk.take(again) == []
    desk.take(completed(desk.bound, 1))
    assert [effect.message.rank for effect in desk.take(again) if isinstance(effect, Confirm)] == [0, 1]


@pytest.mark.parametrize("cancel", [True, False])
def test_i4_registration_asked_again_after_its_failure_is_answered(desk: Desk, cancel: bool) -> None:
    again = replaced(registered("t", D), repeated=True)
    desk.take(registered("t", D))
    first = fails(desk.take(cancelled("t", D)) if cancel else desk.wait(WAITS[0]))
    assert len(first) == 1
    assert fails(desk.take(again)) == first
    finish(desk)


def test_i4_registration_of_which_only_the_repetition_arrives_is_bound(desk: Desk) -> None:
    desk.take(opened("t", P), replaced(registered("t", D), repeated=True))
    assert len(binds(desk.effects)) == 1


def test_i2_without_a_record_nobody_is_told_that_nothing_was_bound(desk: Desk) -> None:
    desk.state.forgot_until = desk.now + WAITS[0] + 5
    desk.take(replaced(registered("t", D), repeated=True))
    assert desk.take(closed("u", P)) == []
    assert fails(desk.wait(WAITS[0] + 4)) == []
    assert [failed.reason for failed in fails(desk.wait(1))] == ["source_timeout"]
    assert [release.outcome for release in releases(desk.take(closed("u", P)))] == ["unknown"]


# --- attempts and sources ---------------------------------------------------------------------------------------------


def test_i1_new_source_attempt_binds_after_the_old_is_quiet(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    new = desk.take(opened("t", P, 2))
    assert [r.binding for r in revokes(new)] == [1]
    assert binds(new) == []
    rebound = binds(desk.take(quiesced(desk.bound)))[0]
    assert (rebound.binding, rebound.source_attempt) == (2, 2)
    desk.take(opened("t", P, 1))
    assert desk.bound == rebound


@pytest.mark.parametrize("reason", ["preempted", "aborted", "error"])
def test_closed_source_sends_the_registration_back_to_waiting(desk: Desk, reason: str) -> None:
    desk.take(opened("t", P), registered("t", D))
    new = desk.take(closed("t", P, reason=reason))  # type: ignore[arg-type]
    assert len(revokes(new)) == 1
    assert releases(new) == []
    new = desk.take(quiesced(desk.bound))
    assert [r.outcome for r in releases(new)] == ([] if reason == "preempted" else [reason])
    assert [b.source for b in binds(desk.take(opened("t", Q)))] == [Q]


def test_failover_uses_the_spare_source(desk: Desk) -> None:
    desk.take(opened("t", P), opened("t", Q), registered("t", D))
    assert desk.bound.source == P
    desk.take(closed("t", P, reason="aborted"), quiesced(desk.bound))
    assert desk.bound.source == Q


def test_i2_no_other_source_after_a_part_was_delivered() -> None:
    desk = Desk()
    step(desk.state, EngineJoined(desk.now, P, 2))
    desk.take(opened("t", P, ranks=2), opened("t", Q), registered("t", D), closed("t", P), delivered("t", 1, P, 0))
    desk.gone(P)
    new = desk.wait(LIMITS.quarantine_s)
    assert [f.reason for f in fails(new)] == ["source_lost"]
    assert len(binds(desk.effects)) == 1


def test_completion_by_a_given_up_binding_ends_the_registration(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    first = desk.bound
    desk.take(opened("t", P, 2), quiesced(first))
    assert len(revokes(desk.take(completed(first)))) == 1
    assert [f.reason for f in fails(desk.take(quiesced(desk.bound)))] == ["transfer_error"]


def test_new_target_attempt_waits_until_the_old_is_quiet(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    first = desk.bound
    new = desk.take(registered("t", D, 2))
    assert revokes(new)
    assert binds(new) == []
    new = desk.take(quiesced(first))
    assert [(f.target_attempt, f.reason) for f in fails(new)] == [(1, "cancelled")]
    assert [b.target_attempt for b in binds(new)] == [2]


def test_older_target_attempt_that_comes_late_is_answered(desk: Desk) -> None:
    desk.take(registered("t", D, 2))
    assert [(f.target_attempt, f.reason) for f in fails(desk.take(registered("t", D, 1)))] == [(1, "cancelled")]


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_of_an_unbound_registration_is_answered_at_once(desk: Desk) -> None:
    desk.take(registered("t", D))
    assert [f.reason for f in fails(desk.take(cancelled("t", D)))] == ["cancelled"]
    finish(desk)


def test_i2_cancel_of_a_bound_registration_waits_for_every_rank() -> None:
    desk = Desk()
    step(desk.state, EngineJoined(desk.now, P, 2))
    desk.take(opened("t", P, ranks=2), registered("t", D))
    assert fails(desk.take(cancelled("t", D), quiesced(desk.bound, 0))) == []
    assert [f.reason for f in fails(desk.take(quiesced(desk.bound, 1)))] == ["cancelled"]
    assert [r.outcome for r in releases(desk.take(closed("t", P)))] == ["unused"]
    finish(desk)


def test_cancel_that_overtakes_its_registration(desk: Desk) -> None:
    assert [f.reason for f in fails(desk.take(cancelled("t", D)))] == ["cancelled"]
    assert desk.take(registered("t", D)) == []
    desk.take(opened("t", P))
    assert binds(desk.effects) == []
    assert releases(desk.take(closed("t", P)))
    finish(desk)


def test_cancel_of_a_failed_registration_is_answered_again(desk: Desk) -> None:
    desk.take(registered("t", D))
    desk.wait(WAITS[0])
    new = desk.take(cancelled("t", D))
    assert [f.reason for f in fails(new)] == ["source_timeout"]
    assert kinds(new) == []


# --- mismatches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": PROMPT + 1}, "token_mismatch"),
        ({"digest": b"other"}, "prompt_mismatch"),
        ({"ranks": 2}, "incompatible"),
    ],
)
def test_legs_that_disagree_fail_the_target(desk: Desk, changes: dict[str, int], reason: str) -> None:
    desk.take(opened("t", P))
    new = desk.take(registered("t", D, **changes))  # type: ignore[arg-type]
    assert [f.reason for f in fails(new)] == [reason]
    assert binds(new) == []
    assert releases(desk.take(closed("t", P)))


def test_incompatible_pair_fails_before_and_after_binding(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    assert revokes(step(desk.state, PairIncompatible(desk.now, P, D, "head size differs")))
    assert [(f.reason, f.detail) for f in fails(desk.take(quiesced(desk.bound)))] == [
        ("incompatible", "head size differs")
    ]
    desk.take(opened("u", P))
    assert [f.reason for f in fails(desk.take(registered("u", D)))] == ["incompatible"]


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_i4_no_source_in_time(desk: Desk) -> None:
    desk.take(registered("t", D))
    assert fails(desk.wait(WAITS[0] - 0.1)) == []
    assert [f.reason for f in fails(desk.wait(0.2))] == ["source_timeout"]
    finish(desk)


@pytest.mark.parametrize(("sealed", "wait", "reason"), [(False, 1, "compute_timeout"), (True, 2, "transfer_timeout")])
def test_i4_bound_registration_has_a_deadline(desk: Desk, sealed: bool, wait: int, reason: str) -> None:
    desk.take(opened("t", P), registered("t", D), *([closed("t", P)] if sealed else []))
    assert revokes(desk.wait(WAITS[wait]))
    assert [f.reason for f in fails(desk.take(quiesced(desk.bound)))] == [reason]


def test_the_transfer_clock_starts_when_the_source_is_ready(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    desk.wait(WAITS[1] - 1)
    desk.take(closed("t", P))
    assert revokes(desk.wait(WAITS[2] - 1)) == []
    assert revokes(desk.wait(2))


def test_i4_delivered_but_never_completed(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D), closed("t", P), delivered("t", 1, P))
    new = desk.wait(WAITS[2])
    assert [f.reason for f in fails(new)] == ["transfer_timeout"]
    assert revokes(new) == []
    finish(desk)


def test_i4_silent_transfer_actor_is_asked_again_then_fenced(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D), cancelled("t", D))
    assert len(revokes(desk.wait(LIMITS.quiesce_wait_s))) == 1
    assert [f.reason for f in fails(desk.wait(LIMITS.quarantine_s))] == ["cancelled"]


def test_lease_ends_without_a_target(desk: Desk) -> None:
    desk.take(opened("t", P), closed("t", P))
    assert [r.outcome for r in releases(desk.wait(LIMITS.source_lease_s))] == ["expired"]
    assert [f.reason for f in fails(desk.take(registered("t", D)))] == ["source_timeout"]
    finish(desk)


def test_i3_lease_does_not_end_under_a_write(desk: Desk) -> None:
    desk.take(opened("t", P, expected=2), registered("t", D, waits=(8.0, 20.0, 60.0)), closed("t", P))
    assert releases(desk.wait(LIMITS.source_lease_s)) == []
    assert [r.outcome for r in releases(desk.take(delivered("t", 1, P)))] == ["expired"]


def test_source_that_never_closes_is_let_go(desk: Desk) -> None:
    desk.take(opened("t", P))
    assert [r.outcome for r in releases(desk.wait(LIMITS.compute_wait_s))] == ["expired"]
    finish(desk)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_i1_lost_source_is_fenced_by_quarantine_before_failover(desk: Desk) -> None:
    desk.take(opened("t", P), opened("t", Q), registered("t", D))
    desk.gone(P)
    assert binds(desk.wait(LIMITS.quarantine_s - 0.1)) == []
    assert [b.source for b in binds(desk.wait(0.2))] == [Q]


def test_lost_target_is_revoked_then_dropped(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    assert revokes(desk.gone(D))
    new = desk.take(quiesced(desk.bound))
    assert [f.reason for f in fails(new)] == ["target_lost"]
    assert releases(desk.take(closed("t", P)))
    finish(desk)


def test_i2_one_failed_rank_fails_the_target_when_all_are_quiet() -> None:
    desk = Desk()
    step(desk.state, EngineJoined(desk.now, P, 2))
    desk.take(opened("t", P, ranks=2), registered("t", D))
    new = desk.take(errored(desk.bound, 1))
    assert len(revokes(new)) == 1
    assert fails(new) == []
    assert [f.detail for f in fails(desk.take(quiesced(desk.bound, 0)))] == ["source rank 1: link down"]


def test_engine_without_cards_counts_as_gone_after_a_grace(desk: Desk) -> None:
    stranger = engine("stranger")
    desk.take(opened("t", stranger), registered("t", D))
    assert revokes(desk.wait(LIMITS.engine_grace_s))
    assert kinds(desk.take(opened("u", stranger))) == ["rejected"]


# --- duplicates, nonsense, limits -------------------------------------------------------------------------------------


def test_i7_duplicates_do_nothing(desk: Desk) -> None:
    script: list[Message] = [opened("t", P), registered("t", D), closed("t", P), delivered("t", 1, P)]
    for message in script:
        desk.take(message)
        again = desk.take(message)
        assert again == [] or message == script[2]
    last = completed(desk.bound)
    desk.take(last)
    assert desk.take(last, script[1], script[3]) == []


@pytest.mark.parametrize(
    "message",
    [
        opened("t", P, ranks=0),
        opened("t", P, ranks=1 << 40),
        opened("t", P, -1),
        opened("", P),
        closed("t", P, 1 << 60),
        registered("", D),
        registered("t", D, 1 << 60),
        cancelled("t", D, -3),
        delivered("t", 9, P),
        delivered("t", 1, Q),
        delivered("t", 1, P, 1 << 62),
        delivered("t", 1, P, -1),
    ],
)
def test_i7_nonsense_changes_nothing(desk: Desk, message: Message) -> None:
    desk.take(opened("t", P), registered("t", D))
    assert desk.take(message) == []
    assert desk.state.live == 1


@pytest.mark.parametrize("waits", [(float("nan"),) * 3, (-1.0,) * 3, (float("inf"),) * 3])
def test_i7_absurd_durations_are_refused(desk: Desk, waits: tuple[float, float, float]) -> None:
    assert [f.reason for f in fails(desk.take(registered("t", D, waits=waits)))] == ["bad_registration"]
    assert len(desk.state.timers) == 0


def test_i7_bad_range_is_refused(desk: Desk) -> None:
    assert [f.reason for f in fails(desk.take(registered("t", D, start=20, end=10)))] == ["bad_registration"]
    assert desk.state.transfers == {}


def test_full_table_refuses_with_a_reason(desk: Desk) -> None:
    desk.state.limits = replace(LIMITS, max_live=2)
    desk.take(registered("a", D), registered("b", D))
    assert [f.reason for f in fails(desk.take(registered("c", D)))] == ["overloaded"]
    assert kinds(desk.take(opened("c", P))) == ["rejected"]
    assert [r.outcome for r in releases(desk.take(closed("c", P)))] == ["unknown"]
    assert desk.state.live == 2


def test_i2_live_source_is_asked_again_and_again_before_its_writes_count_as_over(desk: Desk) -> None:
    desk.state.limits = replace(LIMITS, quiesce_wait_s=40.0)
    desk.take(opened("t", P), registered("t", D), cancelled("t", D))
    asked = 1
    while desk.now < 100.0 + 44.0:
        new = desk.wait(1.0)
        asked += len(revokes(new))
        assert fails(new) == []
    assert asked == 1 + 8
    assert [f.reason for f in fails(desk.wait(1.0))] == ["cancelled"]
    finish_later = desk.take(closed("t", P, reason="aborted"))
    assert len(releases(finish_later)) == 1


def test_i2_limits_outlast_what_a_transfer_actor_takes_to_answer() -> None:
    settings = Settings(transfer_wait_s=40.0, quarantine_s=7.0)
    limits = limits_of(settings)
    assert limits.quiesce_wait_s >= transfer_limits(settings).settle_s + settings.quarantine_s


def test_cancel_after_completion_is_answered_since_the_completion_may_be_lost(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D), closed("t", P), delivered("t", 1, P))
    desk.take(completed(desk.bound))
    assert [f.reason for f in fails(desk.take(cancelled("t", D)))] == ["cancelled"]


def test_failed_registration_that_is_sent_again_is_answered_again(desk: Desk) -> None:
    desk.take(registered("t", D))
    assert [f.reason for f in fails(desk.wait(WAITS[0]))] == ["source_timeout"]
    assert [f.reason for f in fails(desk.take(registered("t", D)))] == ["source_timeout"]


def test_closing_a_replaced_attempt_again_is_answered_since_its_release_may_be_lost(desk: Desk) -> None:
    desk.take(opened("t", P, 1), closed("t", P, 1, "aborted"), opened("t", P, 2))
    assert [r.attempt for r in releases(desk.take(closed("t", P, 1, "aborted")))] == [1]


def test_i3_replaced_attempt_that_is_still_read_is_released_only_when_it_is_not(desk: Desk) -> None:
    desk.take(opened("t", P, 1), registered("t", D))
    first = desk.bound
    desk.take(opened("t", P, 2))  # the closing of attempt 1 was lost
    assert releases(desk.take(closed("t", P, 1, "aborted"))) == []
    assert [r.attempt for r in releases(desk.take(quiesced(first)))] == [1]


def test_i2_successor_of_a_lost_actor_cannot_vouch_for_what_it_had_in_flight(desk: Desk) -> None:
    desk.take(opened("t", P), registered("t", D))
    first = desk.bound
    desk.gone(P)
    step(desk.state, EngineJoined(desk.now, P, 1))
    desk.take(opened("t", Q))
    assert binds(desk.take(quiesced(first))) == []
    assert [b.source for b in binds(desk.wait(LIMITS.quarantine_s))] == [Q]


def test_cancel_of_a_replaced_registration_is_answered_again(desk: Desk) -> None:
    desk.take(registered("t", D, 1), registered("t", D, 2))
    assert [f.target_attempt for f in fails(desk.effects)] == [1]
    assert [f.target_attempt for f in fails(desk.take(cancelled("t", D, 1)))] == [1]
