"""One source rank's reducer against a hostile world: reordered, repeated and lost messages, failing pieces, restarts.

The model plays engines, matching's duties (one binding at a time, revoke before the next) and the agent, and checks
after every step what must never happen.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.actors.completion.state import Complete, CompletionState
from kvflow.actors.completion.state import step as completion_step
from kvflow.actors.transfer.book import TransferState
from kvflow.actors.transfer.model import (
    DeliveryFailed,
    Effect,
    Input,
    Lane,
    Limits,
    PeerLost,
    PeerReady,
    PeerUnknown,
    PostPiece,
    Report,
    SendNotification,
    StartPeer,
    Tick,
)
from kvflow.actors.transfer.state import step
from kvflow.dataplane.port import PieceDone, PieceFailed
from kvflow.messages import (
    CloseReason,
    EngineRef,
    KvGeometry,
    KvGroup,
    RankDelivered,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    TransferBound,
    TransferDelivered,
    TransferErrored,
    TransferQuiesced,
    TransferRevoked,
    pack_blocks,
)

BLOCK = 4
PROMPT = 30
END = PROMPT - 1
ME = EngineRef(engine_id="p", incarnation="1")
TARGET = EngineRef(engine_id="d", incarnation="1")
GEOMETRY = KvGeometry(dtype="u8", num_blocks=1000, groups=(KvGroup(block_tokens=BLOCK),), views=())
LANES = (Lane(0, 1), Lane(1, 1))
ATTEMPT_BASE = 100  # the block ids of an attempt tell which one they belong to


@dataclass
class World:
    """Run the reducers, and keep what the outside can observe."""

    now: float = 0.0
    state: TransferState = field(
        default_factory=lambda: TransferState(ME, 0, GEOMETRY, Limits(piece_tokens=8, orphan_s=50, stale_s=500))
    )
    completions: list[CompletionState] = field(
        default_factory=lambda: [CompletionState(TARGET, lane.rank) for lane in LANES]
    )
    flying: dict[int, PostPiece] = field(default_factory=dict)
    written: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)  # token → attempt by lane
    binding_of: dict[int, int] = field(default_factory=dict)
    quiet: set[int] = field(default_factory=set)  # bindings that were answered for good
    sealed: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)  # attempts whose end the actor has heard
    completed: list[tuple[int, int]] = field(default_factory=list)  # (lane, binding)
    bindings: dict[int, TransferBound] = field(default_factory=dict)
    reports: list[object] = field(default_factory=list)

    def feed(self, event: Input) -> None:
        self.now += 0.01
        if isinstance(event, SourceClosed):
            (self.sealed if event.reason == "finished" else self.dead).add(event.attempt)
        for effect in step(self.state, event, self.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, PostPiece):
            binding = self.state.pieces[effect.piece].binding[1]
            bound = self.bindings[binding]
            assert binding not in self.quiet, "I2: posted after the last word"
            assert bound.source_attempt not in self.dead, "I1: posted for an attempt that is over"
            assert bound.start <= effect.start < effect.stop <= bound.end
            blocks = effect.source_tables[0]
            assert len(blocks) * BLOCK >= effect.stop
            assert all(int(block) // ATTEMPT_BASE == bound.source_attempt + 1 for block in blocks), "another's table"
            self.flying[effect.piece] = effect
            self.binding_of[effect.piece] = binding
        elif isinstance(effect, SendNotification):
            self._arrive(effect.delivered)
        elif isinstance(effect, Report):
            message = effect.message
            assert not [p for p in self.flying if self.binding_of[p] == message.binding], "I2: a WRITE can still land"
            self.quiet.add(message.binding)
            self.reports.append(message)
        elif isinstance(effect, StartPeer):
            assert effect.target == TARGET

    def land(self, piece: int, *, ok: bool) -> None:
        effect = self.flying.pop(piece)
        binding = self.binding_of[piece]
        if ok:
            for token in range(effect.start, effect.stop):
                attempt = self.bindings[binding].source_attempt
                self.written.setdefault((effect.target_rank, token), set()).add((binding, attempt))
            if effect.notification is not None:
                self._arrive(effect.notification)
            self.feed(PieceDone(piece, effect.stop - effect.start, 1, 0.0, 0.0))
        else:
            self.feed(PieceFailed(piece, "failed"))

    def _arrive(self, delivered: RankDelivered) -> None:
        bound = self.bindings[delivered.binding]
        assert bound.source_attempt in self.sealed, "notified before the seal"
        for token in range(bound.start, bound.end):
            assert (delivered.binding, bound.source_attempt) in self.written[delivered.target_rank, token], "I5"
        for effect in completion_step(self.completions[delivered.target_rank], delivered, self.now):
            if isinstance(effect, Complete):
                self.completed.append((delivered.target_rank, delivered.binding))


def progress_messages(attempt: int, cuts: list[int]) -> list[Input]:
    messages: list[Input] = []
    known = 0
    for final in [*cuts, PROMPT]:
        blocks = -(-final // BLOCK)
        ids = [ATTEMPT_BASE * (attempt + 1) + index for index in range(known, blocks)]
        messages.append(
            SourceProgress(
                transfer_id="t",
                attempt=attempt,
                source=ME,
                rank=0,
                tokens_final=final,
                first_blocks=(known,),
                blocks=(pack_blocks(ids),),
                last=final == PROMPT,
            )
        )
        known = blocks
    return messages


def bound(binding: int, attempt: int, start: int) -> TransferBound:
    return TransferBound(
        transfer_id="t", binding=binding, source=ME, source_attempt=attempt, target=TARGET, target_attempt=0,
        request_id=f"r{binding}", start=start, end=END, first_blocks=(0,), blocks=(pack_blocks(list(range(8))),),
    )  # fmt: skip


def closed(attempt: int, reason: CloseReason) -> SourceClosed:
    return SourceClosed(transfer_id="t", attempt=attempt, source=ME, request_id="p", reason=reason)


@st.composite
def streams(draw: st.DrawFn) -> list[list[Input]]:
    """Draw what each sender sends, in its own order; repeats included."""
    attempts = draw(st.integers(1, 3))
    worker: list[Input] = []
    scheduler: list[Input] = []
    matching: list[Input] = []
    number = 0
    for attempt in range(attempts):
        cuts = sorted(draw(st.sets(st.integers(1, PROMPT - 1), max_size=4)))
        worker += progress_messages(attempt, cuts)
        scheduler.append(
            SourceOpened(
                transfer_id="t", attempt=attempt, source=ME, request_id="p", tokens=PROMPT, ranks=1, prompt_digest=b""
            )
        )
        reason: CloseReason = "finished" if attempt == attempts - 1 else draw(
            st.sampled_from(["preempted", "aborted", "finished"])
        )  # fmt: skip
        scheduler.append(closed(attempt, reason))
        for _ in range(draw(st.integers(1, 2))):
            number += 1
            matching.append(bound(number, attempt, draw(st.integers(0, END - 1))))
            if draw(st.booleans()) or reason != "finished":
                matching.append(TransferRevoked(transfer_id="t", binding=number, source=ME, reason="cancelled"))
    facts: list[Input] = [PeerReady(TARGET, LANES)]
    if draw(st.booleans()):
        facts = [PeerUnknown(TARGET, "unknown_engine", ""), *facts]
    if draw(st.booleans()):
        facts += [PeerLost(TARGET), PeerReady(TARGET, LANES)]
    ticks: list[Input] = [Tick(), Tick(), Tick()]
    found = [worker, scheduler, matching, facts, ticks]
    for stream in found:
        for index in sorted(draw(st.sets(st.integers(0, len(stream) - 1), max_size=3)), reverse=True):
            stream.insert(draw(st.integers(index, len(stream))), stream[index])
    return found


@given(streams(), st.data())
@settings(max_examples=400, deadline=None)
def test_nothing_that_must_not_happen_happens_in_any_order(found: list[list[Input]], data: st.DataObject) -> None:
    world = World()
    for message in found[2]:
        if isinstance(message, TransferBound):
            world.bindings[message.binding] = message
    while any(found) or world.flying:
        choices = [("send", index) for index, stream in enumerate(found) if stream]
        choices += [("land", piece) for piece in list(world.flying)[:3]]
        action, which = data.draw(st.sampled_from(choices))
        if action == "send":
            world.feed(found[which].pop(0))
        else:
            world.land(which, ok=data.draw(st.integers(0, 9)) > 0)
    _check_end(world)


def _check_end(world: World) -> None:
    """Check that everything has an answer, and that nothing is left once time has passed."""
    assert len(set(world.completed)) == len(world.completed)
    delivered = [message for message in world.reports if isinstance(message, TransferDelivered)]
    for report in delivered:
        assert {(lane.rank, report.binding) for lane in LANES} <= set(world.completed)
    for attempt in {bound.source_attempt for bound in world.bindings.values()}:
        world.feed(SourceReleased(transfer_id="t", attempt=attempt, source=ME, request_id="p"))
    assert not world.state.bindings
    assert not world.state.sources
    assert not world.state.pieces
    answered = {
        message.binding
        for message in world.reports
        if isinstance(message, TransferDelivered | TransferQuiesced | TransferErrored)
    }
    assert answered <= set(world.bindings)
    world.now += 10_000
    world.feed(Tick())
    assert not world.state.live
    assert not world.state.by_source
    assert not world.state.by_target


@given(cuts=st.sets(st.integers(1, PROMPT - 1), max_size=6), start=st.integers(0, END - 1), data=st.data())
@settings(max_examples=150, deadline=None)
def test_i4_without_faults_every_order_of_senders_ends_in_one_delivery(
    cuts: set[int], start: int, data: st.DataObject
) -> None:
    world = World()
    message = bound(1, 0, start)
    world.bindings[1] = message
    found: list[list[Input]] = [
        progress_messages(0, sorted(cuts)),
        [closed(0, "finished")],
        [message, message],
        [PeerReady(TARGET, LANES)],
    ]
    while any(found) or world.flying:
        choices = [("send", index) for index, stream in enumerate(found) if stream]
        choices += [("land", piece) for piece in world.flying]
        action, which = data.draw(st.sampled_from(choices))
        if action == "send":
            world.feed(found[which].pop(0))
        else:
            world.land(which, ok=True)
    assert sorted(world.completed) == [(0, 1), (1, 1)]
    reports = [report for report in world.reports if isinstance(report, TransferDelivered)]
    assert {report.bytes_total for report in reports} == {2 * (END - start)}


def test_a_failed_notification_is_never_taken_for_a_delivery() -> None:
    world = World()
    world.bindings[1] = bound(1, 0, 0)
    for event in (PeerReady(TARGET, LANES), world.bindings[1], *progress_messages(0, []), closed(0, "finished")):
        world.feed(event)
    while world.flying:
        world.land(next(iter(world.flying)), ok=True)
    delivered = RankDelivered(
        transfer_id="t", binding=1, source=ME, source_attempt=0, source_rank=0, writers=1, target=TARGET,
        target_attempt=0, target_rank=0, request_id="r1",
    )  # fmt: skip
    for _ in range(3):
        world.feed(DeliveryFailed(delivered, "gone"))
    assert isinstance(world.reports[-1], TransferErrored)
