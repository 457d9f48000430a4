"""The transfer actor's reducer, one rule at a time."""

from typing import Any, TypeVar

import msgspec
import pytest

from kvflow.actors.transfer.book import TransferState
from kvflow.actors.transfer.model import (
    CardLapsed,
    DeliveryFailed,
    DropPeer,
    Effect,
    Emit,
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
    Wake,
)
from kvflow.actors.transfer.state import step
from kvflow.dataplane.port import PieceDone, PieceFailed
from kvflow.messages import (
    CloseReason,
    EngineRef,
    KvGeometry,
    KvGroup,
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

BLOCK = 16
PROMPT = 100
END = PROMPT - 1
ME = EngineRef(engine_id="p", incarnation="1")
TARGET = EngineRef(engine_id="d", incarnation="1")
GEOMETRY = KvGeometry(dtype="bfloat16", num_blocks=1000, groups=(KvGroup(block_tokens=BLOCK),), views=())
ONE_LANE = (Lane(rank=0, writers=1),)

E = TypeVar("E")


class Rig:
    """Drive one state with a clock that the test moves."""

    def __init__(self, lanes: tuple[Lane, ...] | None = ONE_LANE, **limits: Any) -> None:
        self.state = TransferState(ME, 0, GEOMETRY, Limits(**limits))
        self.now = 10.0
        self.effects: list[Effect] = []
        if lanes is not None:
            self(PeerReady(TARGET, lanes))

    def __call__(self, event: Input) -> list[Effect]:
        self.effects = step(self.state, event, self.now)
        return self.effects

    def of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def reports(self) -> list[object]:
        return [effect.message for effect in self.of(Report)]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(piece.start, piece.stop) for piece in self.of(PostPiece)]

    def done(self, *pieces: int, size: int = 10) -> None:
        gathered: list[Effect] = []
        for piece in pieces:
            gathered += self(PieceDone(piece, bytes_done=size, descriptors=1, planning_s=0.1, posting_s=0.2))
        self.effects = gathered

    def assert_nothing_left(self) -> None:
        self.now += self.state.limits.stale_s + 1
        self(Tick())
        self.now += self.state.limits.memory_s + 1
        self(Tick())
        assert not self.state.live
        assert not self.state.by_source
        assert not self.state.by_target
        assert not self.state.pieces


def opened(attempt: int = 0, source: EngineRef = ME) -> SourceOpened:
    return SourceOpened(
        transfer_id="t", attempt=attempt, source=source, request_id="r", tokens=PROMPT, ranks=1, prompt_digest=b"d"
    )


def closed(reason: CloseReason = "finished", attempt: int = 0) -> SourceClosed:
    return SourceClosed(transfer_id="t", attempt=attempt, source=ME, request_id="r", reason=reason)


def released(attempt: int = 0) -> SourceReleased:
    return SourceReleased(transfer_id="t", attempt=attempt, source=ME, request_id="r")


def progress(final: int, known: int = 0, attempt: int = 0, base: int = 500, **changes: Any) -> SourceProgress:
    blocks = -(-final // BLOCK)
    message = SourceProgress(
        transfer_id="t",
        attempt=attempt,
        source=ME,
        rank=0,
        tokens_final=final,
        first_blocks=(known,),
        blocks=(pack_blocks([base + i for i in range(known, blocks)]),),
        last=final >= PROMPT,
    )
    return msgspec.structs.replace(message, **changes)


def bound(binding: int = 1, start: int = 0, end: int = END, attempt: int = 0, **changes: Any) -> TransferBound:
    message = TransferBound(
        transfer_id="t",
        binding=binding,
        source=ME,
        source_attempt=attempt,
        target=TARGET,
        target_attempt=0,
        request_id="r",
        start=start,
        end=end,
        first_blocks=(start // BLOCK,),
        blocks=(pack_blocks(list(range(start // BLOCK, -(-end // BLOCK)))),),
    )
    return msgspec.structs.replace(message, **changes)


def revoked(binding: int = 1) -> TransferRevoked:
    return TransferRevoked(transfer_id="t", binding=binding, source=ME, reason="cancelled")


def quiesced(binding: int = 1) -> TransferQuiesced:
    return TransferQuiesced(transfer_id="t", binding=binding, source=ME, rank=0)


# ---------------------------------------------------------------- posting


def test_chunks_are_posted_as_they_become_final_and_only_whole_blocks_before_the_last() -> None:
    rig = Rig()
    rig(opened())
    rig(bound())
    rig(progress(40))
    assert rig.ranges == [(0, 32)]
    rig(progress(44, known=3))
    assert rig.ranges == []
    rig(progress(100, known=3))
    assert rig.ranges == [(32, 99)]


def test_a_cached_prefix_goes_first_at_once() -> None:
    rig = Rig()
    rig(progress(64))
    rig(bound())
    assert rig.ranges == [(0, 64)]


def test_a_partial_range_starts_where_the_target_asks() -> None:
    rig = Rig()
    rig(progress(PROMPT))
    rig(bound(start=20))
    (piece,) = rig.of(PostPiece)
    assert (piece.start, piece.stop, piece.end) == (20, 99, 99)
    assert piece.target_first == (1,)
    assert list(piece.target_tables[0]) == [1, 2, 3, 4, 5, 6]
    assert list(piece.source_tables[0]) == [500, 501, 502, 503, 504, 505, 506]


def test_late_binding_posts_everything_and_the_notification_rides_on_the_only_piece() -> None:
    rig = Rig()
    for event in (opened(), progress(PROMPT), closed()):
        rig(event)
    rig(bound())
    (piece,) = rig.of(PostPiece)
    assert piece.notification is not None
    assert piece.notification.writers == 1
    assert piece.notification.request_id == "r"
    rig.done(piece.piece)
    assert not rig.of(SendNotification)
    (report,) = rig.reports
    assert isinstance(report, TransferDelivered)


def test_a_long_range_is_split_and_only_a_lone_last_piece_carries_the_notification() -> None:
    rig = Rig(piece_tokens=48)
    rig(progress(PROMPT))
    rig(closed())
    rig(bound())
    assert rig.ranges == [(0, 48), (48, 96), (96, 99)]
    pieces = rig.of(PostPiece)
    assert all(piece.notification is None for piece in pieces)
    rig.done(*(piece.piece for piece in pieces))
    assert len(rig.of(SendNotification)) == 1


def test_the_notification_waits_for_the_seal() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(PROMPT))
    (piece,) = rig.of(PostPiece)
    assert piece.notification is None
    rig.done(piece.piece)
    assert not rig.of(SendNotification)
    assert not rig.reports
    rig(closed())
    assert len(rig.of(SendNotification)) == 1
    assert isinstance(rig.reports[0], TransferDelivered)


def test_the_seal_alone_does_not_notify_while_a_piece_is_in_flight() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(PROMPT))
    (piece,) = rig.of(PostPiece)
    rig(closed())
    assert not rig.effects
    rig.done(piece.piece)
    assert len(rig.of(SendNotification)) == 1


def test_every_target_rank_is_written_and_told() -> None:
    rig = Rig(lanes=(Lane(2, 1), Lane(3, 2)))
    rig(bound())
    rig(progress(PROMPT))
    first, second = rig.of(PostPiece)
    assert (first.target_rank, second.target_rank) == (2, 3)
    rig(closed())
    rig.done(second.piece)
    (sent,) = rig.of(SendNotification)
    assert (sent.delivered.target_rank, sent.delivered.writers) == (3, 2)
    assert not rig.reports
    rig.done(first.piece)
    (sent,) = rig.of(SendNotification)
    assert sent.delivered.target_rank == 2
    assert isinstance(rig.reports[0], TransferDelivered)


def test_a_rank_with_nothing_to_write_reports_zero_bytes_once_sealed() -> None:
    rig = Rig(lanes=())
    rig(bound())
    rig(progress(PROMPT))
    assert not rig.effects
    rig(closed())
    (report,) = rig.reports
    assert isinstance(report, TransferDelivered)
    assert (report.bytes_total, report.pieces) == (0, 0)


def test_two_registrations_of_one_transfer_are_served_apart() -> None:
    rig = Rig()
    rig(progress(PROMPT))
    rig(closed())
    rig(bound(1))
    (first,) = rig.of(PostPiece)
    rig(bound(2, request_id="r2"))
    (second,) = rig.of(PostPiece)
    rig.done(second.piece, first.piece)
    assert [report.binding for report in rig.reports if isinstance(report, TransferDelivered)] == [2, 1]


def test_delivered_tells_what_was_early_and_how_long_it_took() -> None:
    rig = Rig()
    rig(bound())
    rig.now += 1
    rig(progress(64))
    (early,) = rig.of(PostPiece)
    rig.done(early.piece, size=640)
    rig.now += 2
    rig(progress(PROMPT, known=4))
    (late,) = rig.of(PostPiece)
    rig.now += 0.5
    rig(closed())
    rig.done(late.piece, size=350)
    report = rig.reports[0]
    assert isinstance(report, TransferDelivered)
    assert (report.bytes_total, report.bytes_early, report.descriptors, report.pieces) == (990, 640, 2, 2)
    assert report.bound_to_first_post_s == pytest.approx(1)
    assert report.last_progress_to_done_s == pytest.approx(0.5)
    assert report.planning_s == pytest.approx(0.2)
    assert report.posting_s == pytest.approx(0.4)


def test_events_tell_the_start_every_piece_and_the_end() -> None:
    rig = Rig()
    rig(bound())
    seen = []
    for event in (progress(64), PieceDone(1, 640, 4, 0.0, 0.0), progress(PROMPT, known=4), closed(),
                  PieceDone(2, 350, 3, 0.0, 0.0)):  # fmt: skip
        rig(event)
        seen += [(emit.event.kind, emit.event.tokens, emit.event.bytes_done) for emit in rig.of(Emit)]
    assert seen == [("started", 0, 0), ("progress", 64, 640), ("progress", 99, 990), ("delivered", 99, 990)]


def test_targets_are_asked_to_go_on_polling_while_pieces_are_under_way() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(32))
    assert len(rig.of(Wake)) == 1
    rig.now += 0.1
    rig(progress(64, known=2))
    assert not rig.of(Wake)
    rig.now += 1.1
    rig(Tick())
    assert len(rig.of(Wake)) == 1
    rig.done(1, 2)
    rig.now += 5
    rig(Tick())
    assert not rig.of(Wake)
    rig(progress(PROMPT, known=4))
    assert isinstance(rig.effects[0], Wake)


# ---------------------------------------------------------------- order and repetition


def test_repeated_messages_change_nothing() -> None:
    rig = Rig()
    for event in (opened(), bound(), progress(64)):
        rig(event)
    for event in (opened(), bound(), progress(64)):
        rig(event)
        assert not rig.effects
    rig(progress(PROMPT, known=4))
    rig(closed())
    rig.done(1, 2)
    assert len(rig.of(SendNotification)) == 1
    for again in (closed(), progress(PROMPT, known=4), PieceDone(1, 1, 1, 0.0, 0.0), PieceFailed(2, "again")):
        rig(again)
        assert not rig.effects


def test_a_binding_repeated_after_its_end_gets_the_same_answer_and_no_write() -> None:
    rig = Rig()
    for event in (progress(PROMPT), closed(), bound()):
        rig(event)
    rig.done(1)
    first = rig.reports
    rig(bound())
    assert rig.reports == first
    assert not rig.of(PostPiece)


def test_an_earlier_progress_never_takes_tokens_back() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(64))
    rig(progress(32))
    assert not rig.effects
    rig(progress(PROMPT, known=4))
    assert rig.ranges == [(64, 99)]


def test_progress_of_another_attempt_is_not_used() -> None:
    rig = Rig()
    rig(bound(attempt=1))
    rig(progress(PROMPT, attempt=0))
    assert not rig.effects
    rig(progress(PROMPT, attempt=1, base=700))
    (piece,) = rig.of(PostPiece)
    assert piece.source_tables[0][0] == 700


def test_messages_for_other_engines_or_ranks_are_ignored() -> None:
    rig = Rig()
    rig(opened(source=TARGET))
    rig(progress(PROMPT, rank=1))
    rig(progress(PROMPT, source=TARGET))
    rig(bound(source=TARGET))
    assert not rig.effects
    assert not rig.state.live
    assert rig.state.ignored == 4


# ---------------------------------------------------------------- block tables


@pytest.mark.parametrize(
    "bad",
    [
        progress(PROMPT, known=5),
        progress(64, base=600),
        progress(PROMPT, known=4, first_blocks=(-1,)),
        progress(PROMPT, known=4, first_blocks=(), blocks=()),
        progress(PROMPT, known=4, blocks=(b"abc",)),
        progress(PROMPT, known=4, blocks=(pack_blocks([1000, 1001, 1002]),)),
        progress(PROMPT, known=4, blocks=(pack_blocks([504]),)),
    ],
    ids=["gap", "differs", "negative", "groups", "length", "out-of-range", "uncovered"],
)
def test_i6_a_block_table_that_does_not_fit_ends_the_binding(bad: SourceProgress) -> None:
    rig = Rig()
    rig(bound())
    rig(progress(64))
    rig(bad)
    assert not rig.reports, "the piece in flight has to land first"
    rig.done(1)
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert report.reason == "transfer_error"
    assert "attempt 0" in report.detail
    rig(bound(2))
    assert isinstance(rig.reports[0], TransferErrored)


# ---------------------------------------------------------------- revoke, preempt, release


def test_a_revocation_before_anything_was_posted_is_answered_at_once() -> None:
    rig = Rig()
    rig(bound())
    rig(revoked())
    assert rig.reports == [quiesced()]
    rig(progress(PROMPT))
    assert not rig.of(PostPiece)


def test_i2_quiesced_only_when_nothing_is_in_flight() -> None:
    rig = Rig(piece_tokens=48)
    rig(bound())
    rig(progress(PROMPT))
    assert len(rig.of(PostPiece)) == 3
    rig(revoked())
    assert not rig.reports
    rig.done(1)
    rig(PieceFailed(2, "peer gone"))
    assert not rig.reports
    rig.done(3)
    assert rig.reports == [quiesced()]
    rig.assert_nothing_left()


def test_a_revocation_overtaking_its_binding_keeps_it_from_starting() -> None:
    rig = Rig()
    rig(progress(PROMPT))
    rig(revoked())
    assert rig.reports == [quiesced()]
    rig(bound())
    assert rig.reports == [quiesced()]
    assert not rig.of(PostPiece)


def test_a_repeated_revocation_is_answered_again() -> None:
    rig = Rig()
    rig(bound())
    rig(revoked())
    rig(revoked())
    assert rig.reports == [quiesced()]


def test_a_revocation_of_a_failing_binding_is_answered_quiesced() -> None:
    rig = Rig(piece_tokens=48)
    rig(bound())
    rig(progress(PROMPT))
    rig(PieceFailed(1, "boom"))
    rig(revoked())
    assert not rig.reports
    rig.done(2, 3)
    assert rig.reports == [quiesced()]


def test_i1_a_preempted_attempt_posts_nothing_more_and_its_binding_waits_for_the_revocation() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(64))
    rig(closed("preempted"))
    assert not rig.effects
    rig(progress(PROMPT, known=4))
    assert not rig.effects, "a late progress of the attempt"
    rig(revoked())
    assert not rig.reports
    rig.done(1)
    assert rig.reports == [quiesced()]
    rig(opened(attempt=1))
    rig(bound(2, attempt=1))
    rig(progress(PROMPT, attempt=1, base=700))
    assert rig.ranges == [(0, 99)]
    assert rig.of(PostPiece)[0].source_tables[0][0] == 700


def test_i5_a_preempted_attempt_is_never_notified() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(PROMPT))
    rig(closed("aborted"))
    rig.done(1)
    assert not rig.of(SendNotification)
    assert not rig.reports


def test_i8_a_release_leaves_nothing_behind() -> None:
    rig = Rig()
    for event in (opened(), progress(PROMPT), closed(), bound()):
        rig(event)
    rig.done(1)
    rig(released())
    assert not rig.state.sources
    rig(progress(PROMPT))
    rig(opened())
    assert not rig.state.sources, "late messages must not bring it back"
    rig.assert_nothing_left()


def test_a_release_that_overtakes_the_last_piece_loses_no_delivery() -> None:
    rig = Rig()
    rig(opened())
    rig(closed())
    rig(bound())
    rig(progress(PROMPT))
    assert rig.of(PostPiece)[0].notification is not None, "the notification rides, so the target may answer first"
    rig.now += 1.0
    rig(released())
    assert rig.state.bindings
    rig.done(1)
    (report,) = rig.reports
    assert isinstance(report, TransferDelivered)
    assert report.last_progress_to_done_s == 1.0
    assert [event.event.kind for event in rig.of(Emit)][-1] == "delivered"
    rig.assert_nothing_left()


def test_i3_a_release_under_a_posted_piece_waits_for_it_in_silence() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(64))
    rig(released())
    assert rig.state.bindings
    rig.done(1)
    assert not rig.reports
    assert not rig.state.bindings
    rig(revoked())
    assert rig.reports == [quiesced()]


# ---------------------------------------------------------------- errors


def test_a_failed_piece_stops_the_binding_and_is_reported_when_the_others_have_landed() -> None:
    rig = Rig(piece_tokens=48)
    rig(bound())
    rig(progress(PROMPT))
    rig(PieceFailed(2, "remote access error"))
    assert not rig.reports
    rig(closed())
    assert not rig.effects
    rig.done(1, 3)
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert "remote access error" in report.detail
    rig(revoked())
    assert rig.reports == [quiesced()]


def test_a_failed_notification_is_tried_again_and_then_reported() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(PROMPT))
    rig.done(1)
    rig(closed())
    (sent,) = rig.of(SendNotification)
    for _ in range(2):
        rig(DeliveryFailed(sent.delivered, "no endpoint"))
        assert rig.of(SendNotification) == [sent]
    rig(DeliveryFailed(sent.delivered, "no endpoint"))
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    rig(DeliveryFailed(sent.delivered, "no endpoint"))
    assert not rig.effects


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start": 50, "end": 50}, "bad_registration"),
        ({"start": -1}, "bad_registration"),
        ({"end": 1 << 60}, "bad_registration"),
        ({"first_blocks": ()}, "bad_registration"),
        ({"first_blocks": (-1,)}, "bad_registration"),
        ({"first_blocks": (1 << 62,)}, "bad_registration"),
        ({"blocks": (b"abc",)}, "bad_registration"),
        ({"direction": "read"}, "incompatible"),
    ],
)
def test_i7_a_binding_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    rig = Rig()
    rig(progress(PROMPT))
    rig(msgspec.structs.replace(bound(), **changes))
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert report.reason == reason
    assert not rig.state.bindings


def test_a_full_table_refuses_bindings_and_ignores_sources() -> None:
    rig = Rig(bindings=1, sources=1)
    rig(bound(1))
    rig(bound(2))
    report = rig.reports[0]
    assert isinstance(report, TransferErrored)
    assert report.reason == "overloaded"
    rig(progress(16, transfer_id="a"))
    rig(progress(16, transfer_id="b"))
    assert list(rig.state.sources) == [("a", 0)]


def test_memories_are_bounded() -> None:
    rig = Rig(tombstones=3)
    for binding in range(10):
        rig(revoked(binding))
        rig(released(binding))
    assert len(rig.state.ended_bindings) == len(rig.state.ended_sources) == 3


# ---------------------------------------------------------------- peers


def test_an_unknown_target_is_looked_for_once_and_posting_starts_when_it_is_found() -> None:
    rig = Rig(lanes=None)
    rig(progress(PROMPT))
    rig(bound(1))
    assert rig.effects == [StartPeer(TARGET)]
    rig(bound(2))
    assert not rig.effects
    rig(PeerReady(TARGET, ONE_LANE))
    assert rig.ranges == [(0, 99), (0, 99)]


def test_a_target_that_cannot_be_reached_fails_its_bindings_and_is_tried_again_for_the_next() -> None:
    rig = Rig(lanes=None)
    rig(bound(1))
    rig(PeerUnknown(TARGET, "unknown_engine", "no card"))
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert (report.reason, report.detail) == ("unknown_engine", "no card")
    rig(bound(2))
    assert rig.effects == [StartPeer(TARGET)]


def test_an_incompatible_target_is_refused_at_once_until_it_leaves() -> None:
    rig = Rig(lanes=None)
    rig(PeerUnknown(TARGET, "incompatible", "head sizes differ", final=True))
    rig(bound(1))
    report = rig.reports[0]
    assert isinstance(report, TransferErrored)
    assert report.detail == "head sizes differ"
    rig(PeerLost(TARGET))
    assert not rig.state.refused


def test_a_lost_target_fails_its_bindings_when_their_pieces_have_landed() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(PROMPT))
    rig(PeerLost(TARGET, "gone"))
    assert not rig.effects
    rig(PieceFailed(1, "endpoint timeout"))
    report = rig.reports[0]
    assert isinstance(report, TransferErrored)
    assert report.reason == "target_lost"
    assert TARGET not in rig.state.peers


# ---------------------------------------------------------------- time


def test_i4_a_binding_whose_source_is_not_known_here_is_reported_lost() -> None:
    rig = Rig()
    rig(bound())
    rig.now += rig.state.limits.orphan_s + 1
    rig(Tick())
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert report.reason == "source_lost"
    rig.assert_nothing_left()


def test_i4_a_sealed_source_whose_last_progress_never_came_is_reported_lost() -> None:
    rig = Rig()
    rig(bound())
    rig(progress(64))
    rig.done(1)
    rig(closed())
    rig.now += rig.state.limits.orphan_s + 1
    rig(Tick())
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert "64 of 99" in report.detail


def test_a_source_that_still_computes_is_waited_for_until_it_is_stale() -> None:
    rig = Rig()
    rig(opened())
    rig(bound())
    rig.now += rig.state.limits.stale_s - 1
    rig(Tick())
    assert not rig.effects
    rig.now += 2
    rig(Tick())
    report = rig.reports[0]
    assert isinstance(report, TransferErrored)
    assert report.reason == "compute_timeout"
    rig.assert_nothing_left()


def test_a_source_that_nobody_closes_is_forgotten_in_the_end() -> None:
    rig = Rig()
    rig(progress(64))
    rig.assert_nothing_left()


def sealed_with_all_posted(lanes: tuple[Lane, ...], *, seal_first: bool) -> tuple[Rig, list[int]]:
    """Return a rig with everything posted and the source sealed, and its pieces."""
    rig = Rig(lanes)
    rig(opened())
    rig(bound())
    if seal_first:
        rig(closed())
    rig(progress(PROMPT, last=True))
    pieces = [piece.piece for piece in rig.of(PostPiece)]
    if not seal_first:
        rig(closed())
    return rig, pieces


def test_i1_revoked_while_the_notification_rides_is_delivered_not_quiesced() -> None:
    # The target counts itself complete when the WRITE lands: matching must not let another source write there.
    rig, (piece,) = sealed_with_all_posted(ONE_LANE, seal_first=True)
    rig(revoked())
    assert rig.reports == []
    rig.done(piece)
    assert [type(report) for report in rig.reports] == [TransferDelivered]
    assert rig.of(SendNotification) == []
    rig.assert_nothing_left()


def test_i5_revoked_after_one_target_rank_was_notified_notifies_the_others() -> None:
    rig, pieces = sealed_with_all_posted((Lane(0, 1), Lane(1, 1)), seal_first=False)
    rig.done(pieces[0])
    assert [note.delivered.target_rank for note in rig.of(SendNotification)] == [0]
    rig(revoked())
    assert rig.reports == []
    rig.done(pieces[1])
    assert [note.delivered.target_rank for note in rig.of(SendNotification)] == [1]
    assert [type(report) for report in rig.reports] == [TransferDelivered]
    rig.assert_nothing_left()


def test_revoked_before_any_notification_is_quiesced_without_one() -> None:
    rig, (piece,) = sealed_with_all_posted(ONE_LANE, seal_first=False)
    rig(revoked())
    rig.done(piece)
    assert rig.of(SendNotification) == []
    assert [type(report) for report in rig.reports] == [TransferQuiesced]


def test_revoked_with_a_failed_piece_is_quiesced() -> None:
    rig, pieces = sealed_with_all_posted((Lane(0, 1), Lane(1, 1)), seal_first=True)
    rig(revoked())
    rig.done(pieces[0])
    rig(PieceFailed(pieces[1], "broken"))
    assert [type(report) for report in rig.reports] == [TransferQuiesced]


def test_i2_lapsed_card_stops_posting_and_cuts_off_what_is_in_flight() -> None:
    # Matching may have declared this rank lost, and its WRITEs over: nothing more may be posted into those blocks.
    rig = Rig()
    rig(opened())
    rig(bound())
    rig(progress(48))
    (piece,) = [post.piece for post in rig.of(PostPiece)]
    rig(CardLapsed())
    assert [drop.target for drop in rig.of(DropPeer)] == [TARGET]
    assert rig.reports == []
    rig(progress(PROMPT, known=3, last=True))
    assert rig.of(PostPiece) == []
    rig(PieceFailed(piece, "cut off"))
    (report,) = rig.reports
    assert isinstance(report, TransferErrored)
    assert report.reason == "source_lost"
    rig.assert_nothing_left()


def test_i4_revocation_is_answered_in_bounded_time_whatever_the_wire_does() -> None:
    rig = Rig(settle_s=30.0)
    rig(opened())
    rig(bound())
    rig(progress(48))
    rig(revoked())
    rig.now += 29.0
    rig(Tick())
    assert rig.of(DropPeer) == []
    rig.now += 2.0
    rig(Tick())
    assert [drop.target for drop in rig.of(DropPeer)] == [TARGET]
    rig(Tick())
    assert rig.of(DropPeer) == []
