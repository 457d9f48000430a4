"""A successor that replays the control stream must not decide again what was decided, nor act on what is over."""

from dataclasses import replace

import pytest

from kvflow.actors.matching.effects import Bind, Decision, Effect, Emit, Fail, Release, Revoke
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, Received, Tick
from kvflow.actors.matching.model import State
from kvflow.actors.matching.state import resync, step
from kvflow.messages import Message
from matching_world import LIMITS, WAITS, cancelled, closed, completed, delivered, engine, opened, registered

P, Q, D = engine("p"), engine("q"), engine("d")


class Stream:
    """Keep what the control stream would: inputs, and the decisions that follow."""

    def __init__(self) -> None:
        self.state = State(limits=LIMITS)
        self.log: list[Message] = []
        self.now = 10.0
        for who in (P, Q, D):
            step(self.state, EngineJoined(self.now, who, 1))

    def take(self, *messages: Message) -> None:
        for message in messages:
            self.log.append(message)
            self._record(step(self.state, Received(self.now, message)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._record(step(self.state, Tick(self.now)))

    def gone(self) -> None:
        self._record(step(self.state, EngineGone(self.now, P, "lost")))

    def _record(self, effects: list[Effect]) -> None:
        self.log += [effect.message for effect in effects if not isinstance(effect, Emit)]

    def successor(self) -> tuple[State, list[Decision]]:
        state = State(limits=LIMITS, next_binding=1000, following=True)
        for message in self.log:
            assert step(state, Received(self.now, message)) == []
        for who in (P, Q, D):
            step(state, EngineJoined(self.now, who, 1))
        return state, [effect for effect in resync(state, self.now) if not isinstance(effect, Emit)]


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_a_live_binding_keeps_its_number_and_is_told_again(stream: Stream) -> None:
    stream.take(opened("t", P), registered("t", D))
    state, effects = stream.successor()
    assert [type(effect) for effect in effects] == [Bind]
    assert effects[0].message == stream.log[-1]
    assert state.live == 1


def test_i2_a_failed_registration_is_not_bound_again(stream: Stream) -> None:
    stream.take(registered("t", D))
    stream.wait(WAITS[0])
    stream.take(opened("t", P))
    _, effects = stream.successor()
    assert [type(effect) for effect in effects] == [Fail]


def test_i3_a_released_source_is_not_bound_again(stream: Stream) -> None:
    stream.take(opened("t", P), closed("t", P))
    stream.wait(LIMITS.source_lease_s)
    state, _ = stream.successor()
    effects = step(state, Received(stream.now, registered("t", D)))
    assert not any(isinstance(effect, Bind) for effect in effects)


def test_i1_failover_is_not_undone(stream: Stream) -> None:
    stream.take(opened("t", P), opened("t", Q), registered("t", D))
    stream.gone()
    stream.wait(LIMITS.quarantine_s)
    _, effects = stream.successor()
    bound = [effect.message for effect in effects if isinstance(effect, Bind)]
    assert [(message.binding, message.source) for message in bound] == [(2, Q)]


def test_a_revocation_goes_on(stream: Stream) -> None:
    stream.take(opened("t", P), registered("t", D), cancelled("t", D))
    state, effects = stream.successor()
    assert [type(effect) for effect in effects] == [Revoke]
    step(state, Tick(stream.now + LIMITS.quiesce_wait_s))
    late = step(state, Tick(stream.now + LIMITS.quiesce_wait_s + LIMITS.quarantine_s))
    assert any(isinstance(effect, Fail) for effect in late)


def test_the_last_endings_are_told_again(stream: Stream) -> None:
    stream.take(opened("t", P), registered("t", D), closed("t", P), delivered("t", 1, P))
    stream.take(completed(next(m for m in stream.log if type(m).__name__ == "TransferBound")))  # type: ignore[arg-type]
    state, effects = stream.successor()
    assert [type(effect) for effect in effects] == [Release]
    assert state.live == 0


def test_a_decision_that_was_never_recorded_is_taken_now(stream: Stream) -> None:
    stream.take(opened("t", P), registered("t", D))
    stream.log = stream.log[:-1]
    _, effects = stream.successor()
    assert [effect.message.binding for effect in effects if isinstance(effect, Bind)] == [1000]


def test_following_takes_no_decision_and_keeps_bounded_tombstones() -> None:
    state = State(limits=replace(LIMITS, max_live=4), following=True)
    for number in range(50):
        assert step(state, Received(1.0, cancelled(f"t{number}", D))) == []
    assert len(state.transfers) <= 5
    assert step(state, Tick(1.0 + LIMITS.tombstone_s)) == []
    assert state.transfers == {}
