"""How one binding moves on: post what is final, notify when sealed, settle when fenced. Pure, like `state.py`."""

from kvflow.actors.transfer.book import TransferState
from kvflow.actors.transfer.model import (
    Binding,
    DropPeer,
    Effect,
    Emit,
    Fence,
    Lane,
    LaneState,
    Piece,
    PostPiece,
    Report,
    SendNotification,
    Source,
    Wake,
)
from kvflow.dataplane.port import PieceDone
from kvflow.messages import (
    FailureReason,
    RankDelivered,
    TransferDelivered,
    TransferErrored,
    TransferEvent,
    TransferQuiesced,
    TransferStarted,
)
from kvflow.messages.events import TransferEventKind

Effects = list[Effect]


def set_lanes(binding: Binding, lanes: tuple[Lane, ...]) -> None:
    """Give a binding the target ranks that it writes to."""
    binding.lanes = tuple(LaneState(lane.rank, lane.writers) for lane in lanes)


def advance(state: TransferState, binding: Binding, now: float, out: Effects) -> None:
    """Do everything that a binding allows now; call it after anything that concerns it has changed."""
    if binding.fence is not None:
        _settle(state, binding, binding.fence, now, out)
        return
    source = state.sources.get(binding.source_key)
    if source is None or binding.lanes is None:
        return
    if source.broken:
        fail(state, binding, "transfer_error", source.broken, now, out)
        return
    _post_final(state, binding, binding.lanes, source, now, out)
    if source.sealed:
        _notify_and_end(state, binding, binding.lanes, source.last_at, now, out)


def fail(state: TransferState, binding: Binding, reason: FailureReason, detail: str, now: float, out: Effects) -> None:
    """Post nothing more of a binding, and report its error once nothing of it is in flight."""
    if binding.fence is None:
        binding.fence = Fence(reason, now, detail)
    binding.fence.failed = True
    _settle(state, binding, binding.fence, now, out)


def revoke(state: TransferState, binding: Binding, reason: FailureReason, now: float, out: Effects) -> None:
    """Post nothing more of a binding, and answer Quiesced once nothing of it is in flight."""
    if binding.fence is None:
        binding.fence = Fence(reason, now)
    binding.fence.revoked = True
    _settle(state, binding, binding.fence, now, out)


def release(state: TransferState, binding: Binding, last_at: float | None, now: float, out: Effects) -> None:
    """Post nothing more of a binding whose source was released, and forget it once nothing of it is in flight."""
    if binding.fence is None:
        binding.fence = Fence(None, now)
    binding.fence.last_at = last_at
    _settle(state, binding, binding.fence, now, out)


def piece_done(state: TransferState, piece: Piece, done: PieceDone, now: float, out: Effects) -> None:
    """Count a piece that has been written, and move its binding on."""
    binding = _land(state, piece, now)
    piece.lane.tokens_done += piece.tokens
    totals = binding.totals
    totals.bytes_total += done.bytes_done
    totals.descriptors += done.descriptors
    totals.planning_s += done.planning_s
    totals.posting_s += done.posting_s
    source = state.sources.get(binding.source_key)
    if source is not None and source.last_at is None:
        totals.bytes_early += done.bytes_done
    out.append(Emit(_event(state, binding, "progress", rank=piece.lane.rank)))
    advance(state, binding, now, out)


def piece_failed(state: TransferState, piece: Piece, detail: str, now: float, out: Effects) -> None:
    """Stop the binding of a piece that could not be written."""
    binding = _land(state, piece, now)
    fail(state, binding, "transfer_error", f"to target rank {piece.lane.rank}: {detail}", now, out)


def keep_awake(state: TransferState, binding: Binding, now: float, out: Effects) -> None:
    """Ask the target ranks that pieces are under way to for more polling, when the last time was a while ago."""
    for lane in binding.lanes or ():
        if lane.in_flight:
            _wake(state, binding, lane, now, out)


def cut_off(state: TransferState, binding: Binding, now: float, out: Effects) -> None:
    """Cut the target off when the pieces of a fenced binding take too long: somebody waits for their end."""
    fence = binding.fence
    if fence is not None and binding.in_flight and now - fence.since > state.limits.settle_s:
        fence.since = now
        target = binding.message.target
        out.append(DropPeer(target, f"WRITEs to {target} did not end within {state.limits.settle_s:g} s"))


def _land(state: TransferState, piece: Piece, now: float) -> Binding:
    # A binding lives while pieces of it are in flight, so the lookup cannot miss.
    binding = state.bindings[piece.binding]
    binding.in_flight -= 1
    piece.lane.in_flight -= 1
    binding.touched = now
    return binding


def _post_final(
    state: TransferState, binding: Binding, lanes: tuple[LaneState, ...], source: Source, now: float, out: Effects
) -> None:
    end = binding.message.end
    stop = min(source.tokens_final, end)
    granule = source.tables.granule
    if stop < end:
        stop -= stop % granule
    if not lanes or stop <= binding.posted:
        return
    step = max(state.limits.piece_tokens, granule)
    tables = source.tables.snapshot()
    if binding.first_post_at is None:
        binding.first_post_at = now
        out.append(Emit(_event(state, binding, "started")))
    while binding.posted < stop:
        upto = stop if stop - binding.posted <= step else _floor(binding.posted + step, granule)
        for lane in lanes:
            _wake(state, binding, lane, now, out)
            # Alone in flight, the last piece can carry the notification, if the source is sealed already.
            rides = source.sealed and upto == end and not lane.in_flight
            piece = state.new_piece(Piece(binding.key, lane, upto - binding.posted))
            out.append(
                PostPiece(
                    piece=piece,
                    target=binding.message.target,
                    target_rank=lane.rank,
                    start=binding.posted,
                    stop=upto,
                    end=end,
                    source_tables=tables,
                    target_first=binding.message.first_blocks,
                    target_tables=binding.tables,
                    notification=_rank_delivered(state, binding, lane) if rides else None,
                )
            )
            lane.in_flight += 1
            lane.notified = rides
            binding.in_flight += 1
            binding.totals.pieces += 1
        binding.posted = upto
    binding.touched = now


def _notify_and_end(
    state: TransferState, binding: Binding, lanes: tuple[LaneState, ...], last_at: float | None, now: float,
    out: Effects,
) -> None:  # fmt: skip
    if lanes and binding.posted < binding.message.end:
        return
    for lane in lanes:
        if not lane.in_flight and not lane.notified:
            _wake(state, binding, lane, now, out)
            out.append(SendNotification(_rank_delivered(state, binding, lane)))
            lane.notified = True
    if binding.in_flight:
        return
    # Bound after the last progress, the transfer could only begin then.
    ready_at = max(binding.bound_at, last_at or binding.bound_at)
    first_post_at = now if binding.first_post_at is None else binding.first_post_at
    totals = binding.totals
    report = TransferDelivered(
        transfer_id=binding.message.transfer_id,
        binding=binding.message.binding,
        source=state.me,
        rank=state.rank,
        bytes_total=totals.bytes_total,
        bytes_early=totals.bytes_early,
        descriptors=totals.descriptors,
        pieces=totals.pieces,
        bound_to_first_post_s=first_post_at - binding.bound_at,
        last_progress_to_done_s=now - ready_at,
        posting_s=totals.posting_s,
        planning_s=totals.planning_s,
    )
    out.append(Report(report))
    out.append(Emit(_event(state, binding, "delivered", report=report)))
    state.end_binding(binding, report, now)


def _settle(state: TransferState, binding: Binding, fence: Fence, now: float, out: Effects) -> None:
    if binding.in_flight:
        return
    lanes = binding.lanes or ()
    if not fence.failed and _counts_as_delivered(fence, [lane.notified for lane in lanes]):
        # Notified means sealed, posted to the end and, by now, written. A target rank may count itself complete, so to
        # say that this binding is off would let another source write there: it is delivered instead. A release may
        # overtake the report of the piece that carried the notification: that is a delivery as well.
        source = state.sources.get(binding.source_key)
        _notify_and_end(state, binding, lanes, source.last_at if source is not None else fence.last_at, now, out)
        return
    report: TransferQuiesced | TransferErrored | None = None
    if fence.revoked:
        report = quiesced(state, *binding.key)
    elif fence.reason is not None:
        report = errored(state, *binding.key, fence.reason, fence.detail)
    if report is not None:
        out.append(Report(report))
    state.end_binding(binding, report, now)


def _counts_as_delivered(fence: Fence, notified: list[bool]) -> bool:
    return any(notified) and (fence.revoked or (fence.reason is None and all(notified)))


def quiesced(state: TransferState, transfer_id: str, binding: int) -> TransferQuiesced:
    """Build the answer to a revocation."""
    return TransferQuiesced(transfer_id=transfer_id, binding=binding, source=state.me, rank=state.rank)


def errored(
    state: TransferState, transfer_id: str, binding: int, reason: FailureReason, detail: str
) -> TransferErrored:
    """Build the report of an error."""
    return TransferErrored(
        transfer_id=transfer_id, binding=binding, source=state.me, rank=state.rank, reason=reason, detail=detail
    )


def _wake(state: TransferState, binding: Binding, lane: LaneState, now: float, out: Effects) -> None:
    if lane.woken_at is not None and now - lane.woken_at < state.limits.wake_s:
        return
    lane.woken_at = now
    message = binding.message
    out.append(
        Wake(
            TransferStarted(
                transfer_id=message.transfer_id,
                binding=message.binding,
                source=state.me,
                rank=state.rank,
                target=message.target,
                target_rank=lane.rank,
            )
        )
    )


def _rank_delivered(state: TransferState, binding: Binding, lane: LaneState) -> RankDelivered:
    message = binding.message
    return RankDelivered(
        transfer_id=message.transfer_id,
        binding=message.binding,
        source=state.me,
        source_attempt=message.source_attempt,
        source_rank=state.rank,
        writers=lane.writers,
        target=message.target,
        target_attempt=message.target_attempt,
        target_rank=lane.rank,
        request_id=message.request_id,
    )


def _event(
    state: TransferState,
    binding: Binding,
    kind: TransferEventKind,
    *,
    rank: int | None = None,
    report: TransferDelivered | None = None,
) -> TransferEvent:
    message = binding.message
    totals = binding.totals
    return TransferEvent(
        kind=kind,
        transfer_id=message.transfer_id,
        at=0.0,
        actor="transfer",
        binding=message.binding,
        attempt=message.source_attempt,
        request_id=message.request_id,
        source=state.me,
        target=message.target,
        rank=state.rank,
        tokens=min((lane.tokens_done for lane in binding.lanes or ()), default=0),
        tokens_total=message.end - message.start,
        bytes_done=totals.bytes_total,
        bytes_early=totals.bytes_early,
        descriptors=totals.descriptors,
        pieces=totals.pieces,
        detail="" if rank is None else f"target rank {rank}",
        bound_to_first_post_s=report.bound_to_first_post_s if report else 0.0,
        last_progress_to_done_s=report.last_progress_to_done_s if report else 0.0,
        posting_s=totals.posting_s,
        planning_s=totals.planning_s,
    )


def _floor(tokens: int, granule: int) -> int:
    return tokens - tokens % granule
