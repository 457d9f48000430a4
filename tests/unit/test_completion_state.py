"""The completion actor's reducer, one rule at a time."""

from typing import Any

import msgspec
import pytest

from kvflow.actors.completion.state import (
    Complete,
    CompletionState,
    Effect,
    Hello,
    Input,
    Limits,
    Listen,
    Reject,
    SourceBack,
    SourceLost,
    Tick,
    step,
)
from kvflow.messages import (
    EngineRef,
    RankDelivered,
    TransferBound,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
)

ME = EngineRef(engine_id="d", incarnation="1")
SOURCE = EngineRef(engine_id="p", incarnation="1")
OTHER = EngineRef(engine_id="x", incarnation="1")


class Rig:
    """Drive one state with a clock that the test moves."""

    def __init__(self, **limits: Any) -> None:
        self.state = CompletionState(ME, 1, Limits(**limits))
        self.now = 10.0
        self.effects: list[Effect] = []

    def __call__(self, event: Input) -> list[Effect]:
        self.effects = step(self.state, event, self.now)
        return self.effects

    @property
    def completed(self) -> list[TransferCompleted]:
        return [effect.message for effect in self.effects if isinstance(effect, Complete)]

    @property
    def rejected(self) -> bool:
        return any(isinstance(effect, Reject) for effect in self.effects)

    @property
    def listened(self) -> list[float]:
        return [effect.seconds for effect in self.effects if isinstance(effect, Listen)]

    def assert_nothing_left(self) -> None:
        self.now += self.state.limits.memory_s + self.state.limits.stale_s + 1
        self(Tick())
        assert not self.state.live
        assert not self.state.by_transfer
        assert self.state.tick_s() is None
        assert not self.listened


def delivered(source_rank: int = 0, writers: int = 1, binding: int = 1, **changes: Any) -> RankDelivered:
    message = RankDelivered(
        transfer_id="t",
        binding=binding,
        source=SOURCE,
        source_attempt=0,
        source_rank=source_rank,
        writers=writers,
        target=ME,
        target_attempt=2,
        target_rank=1,
        request_id="r",
    )
    return msgspec.structs.replace(message, **changes)


def bound(binding: int = 1, **changes: Any) -> TransferBound:
    message = TransferBound(
        transfer_id="t",
        binding=binding,
        source=SOURCE,
        source_attempt=0,
        target=ME,
        target_attempt=2,
        request_id="r",
        start=0,
        end=9,
        first_blocks=(0,),
        blocks=(b"",),
    )
    return msgspec.structs.replace(message, **changes)


def started(binding: int = 1, **changes: Any) -> TransferStarted:
    message = TransferStarted(transfer_id="t", binding=binding, source=SOURCE, rank=0, target=ME, target_rank=1)
    return msgspec.structs.replace(message, **changes)


def failed(**changes: Any) -> TransferFailed:
    message = TransferFailed(transfer_id="t", target=ME, target_attempt=2, request_id="r", reason="cancelled")
    return msgspec.structs.replace(message, **changes)


def test_one_writer_completes_once() -> None:
    rig = Rig()
    rig(bound())
    rig(started())
    rig(delivered())
    assert rig.completed == [
        TransferCompleted(transfer_id="t", binding=1, target=ME, target_attempt=2, request_id="r", rank=1)
    ]
    for again in (delivered(), bound(), started(), delivered()):
        rig(again)
        assert not rig.completed
    assert not rig.state.pending
    rig.assert_nothing_left()


def test_i5_all_writers_have_to_be_heard_and_one_twice_does_not_count() -> None:
    rig = Rig()
    rig(delivered(0, writers=2))
    rig(delivered(0, writers=2))
    assert not rig.completed
    rig(delivered(1, writers=2))
    assert len(rig.completed) == 1


def test_a_notification_may_come_before_everything_else() -> None:
    rig = Rig()
    rig(delivered())
    assert len(rig.completed) == 1
    rig(bound())
    assert not rig.state.pending


@pytest.mark.parametrize(
    "other",
    [
        delivered(1, writers=3),
        delivered(1, writers=2, source_attempt=1),
        delivered(1, writers=2, source=OTHER),
        delivered(1, writers=2, request_id="r2"),
        delivered(1, writers=2, target_attempt=3),
    ],
    ids=["writers", "attempt", "source", "request", "target-attempt"],
)
def test_i5_deliveries_that_disagree_never_complete(other: RankDelivered) -> None:
    rig = Rig()
    rig(delivered(0, writers=2))
    rig(other)
    assert rig.rejected
    assert not rig.completed
    rig(delivered(1, writers=2))
    assert len(rig.completed) == 1


@pytest.mark.parametrize(
    "event",
    [
        delivered(target=OTHER),
        delivered(target=EngineRef(engine_id="d", incarnation="0")),
        delivered(target_rank=0),
        delivered(writers=0),
        delivered(writers=-1),
        delivered(writers=1 << 40),
        delivered(source_rank=-1),
        started(target=OTHER),
        started(target_rank=0),
        bound(target=OTHER),
    ],
)
def test_i7_what_is_not_for_this_rank_or_makes_no_sense_is_rejected(event: Input) -> None:
    rig = Rig()
    rig(event)
    assert rig.rejected
    assert not rig.state.pending


def test_a_delivery_that_contradicts_its_binding_is_rejected() -> None:
    rig = Rig()
    rig(bound())
    rig(delivered(source_attempt=7))
    assert rig.rejected
    assert not rig.completed


def test_a_failure_forgets_the_registration_and_late_deliveries_of_it() -> None:
    rig = Rig()
    rig(bound())
    rig(bound(2, request_id="r2"))
    rig(failed())
    assert list(rig.state.pending) == [("t", 2)]
    rig(delivered())
    assert not rig.completed
    rig(delivered(binding=2, request_id="r2"))
    assert len(rig.completed) == 1
    rig.assert_nothing_left()


def test_a_failure_of_somebody_else_changes_nothing() -> None:
    rig = Rig()
    rig(bound())
    for event in (failed(target=OTHER), failed(transfer_id="u"), failed(target_attempt=1)):
        rig(event)
    assert rig.state.pending


def test_a_new_binding_of_a_registration_ends_the_one_before() -> None:
    rig = Rig()
    rig(bound(1))
    rig(bound(2, source=OTHER))
    assert list(rig.state.pending) == [("t", 2)]
    rig(delivered(binding=1))
    assert not rig.completed
    rig(delivered(binding=2, source=OTHER))
    assert len(rig.completed) == 1


def test_tables_are_bounded() -> None:
    rig = Rig(pending=2, memories=2)
    for binding in range(5):
        rig(started(binding))
    assert len(rig.state.pending) == 2
    for binding in range(10, 20):
        rig(delivered(binding=binding, transfer_id=str(binding)))
    rig = Rig(pending=2, memories=2)
    for binding in range(10):
        rig(delivered(binding=binding))
        assert len(rig.completed) == 1
    assert len(rig.state.ended) == 2


def test_listening_is_slow_while_bound_and_steady_while_started() -> None:
    rig = Rig()
    rig(bound())
    assert rig.listened == [rig.state.limits.glance_s]
    rig.now += 0.1
    rig(Tick())
    assert rig.listened == []
    rig.now += 0.15
    rig(Tick())
    assert rig.listened == [rig.state.limits.glance_s]
    rig(started())
    assert rig.listened == [rig.state.limits.stretch_s]
    heard = 0.0
    for _ in range(20):
        rig.now += 0.1
        rig(Tick())
        heard += sum(rig.listened)
        assert rig.state.listen_until > rig.now
    rig.now += 2
    rig(Tick())
    assert rig.listened == [rig.state.limits.glance_s], "nobody has repeated the start"


def test_i8_nothing_is_listened_for_when_nothing_is_pending() -> None:
    rig = Rig()
    rig(Tick())
    assert rig.effects == []
    rig(started())
    rig(delivered())
    rig.now += 1
    rig(Tick())
    assert rig.effects == []


def test_a_greeting_is_listened_for_as_long_as_it_asks_within_a_bound() -> None:
    rig = Rig()
    rig(Hello(2.0))
    assert rig.listened == [2.0]
    rig(Hello(1.0))
    assert rig.listened == []
    rig(Hello(1e9))
    assert rig.listened == [rig.state.limits.hello_max_s]
    rig(Hello(-5.0))
    assert rig.listened == []
    rig.assert_nothing_left()


def test_an_entry_that_only_a_source_spoke_of_is_dropped_soon_and_can_still_complete() -> None:
    rig = Rig()
    rig(started())
    rig.now += rig.state.limits.unbound_s + 1
    rig(Tick())
    assert not rig.state.pending
    rig(delivered())
    assert len(rig.completed) == 1


def test_i1_delivery_of_a_binding_that_a_newer_one_replaced_never_completes() -> None:
    # Its TransferBound was lost, so nothing but the newer binding tells that it is over.
    rig = Rig()
    rig(started(binding=1))
    rig(bound(binding=2))
    rig(delivered(binding=1))
    assert rig.completed == []
    assert rig.rejected
    rig(delivered(binding=2))
    assert [message.binding for message in rig.completed] == [2]
    rig.assert_nothing_left()


def test_i1_a_source_that_counted_as_lost_completes_nothing_when_it_wakes_up() -> None:
    rig = Rig()
    rig(bound())
    rig(SourceLost(SOURCE))
    rig(delivered())
    assert not rig.completed
    rig(SourceBack(SOURCE))
    rig(delivered())
    assert not rig.completed
    rig(bound(binding=2))
    rig(delivered(binding=2))
    assert len(rig.completed) == 1
    rig.assert_nothing_left()


def test_i1_a_lost_source_is_not_believed_about_a_binding_that_was_not_heard_of() -> None:
    rig = Rig()
    rig(SourceLost(SOURCE))
    rig(delivered())
    assert rig.rejected
    rig(SourceBack(SOURCE))
    rig(delivered())
    assert not rig.completed


def test_the_loss_of_one_source_leaves_the_bindings_of_others_alone() -> None:
    rig = Rig()
    rig(bound())
    rig(SourceLost(OTHER))
    rig(delivered())
    assert len(rig.completed) == 1
