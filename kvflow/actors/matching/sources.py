"""What a source engine's scheduler says: a source opens, and a source closes."""

from kvflow.actors.matching.decide import Effects, arm, released, settle
from kvflow.actors.matching.describe import source_event
from kvflow.actors.matching.effects import Emit, Release
from kvflow.actors.matching.model import Source, State, Transfer
from kvflow.actors.matching.table import MAX_ATTEMPT, MAX_RANKS, MAX_TEXT, MAX_TOKENS, admit, bury, is_full
from kvflow.messages import SourceClosed, SourceOpened, SourceReleased, TransferEvent


def source_opened(state: State, now: float, message: SourceOpened, out: Effects) -> None:
    """Add a source, or replace an older attempt of the same engine."""
    if not _plausible(message):
        return
    if message.source in state.gone and not state.following:
        out.append(_rejected(message, "unknown_engine", "the engine has no card in the directory"))
        return
    transfer = state.transfers.get(message.transfer_id)
    older = transfer.sources.get(message.source) if transfer is not None else None
    if older is not None and message.attempt <= older.attempt:
        return
    if transfer is not None and older is None and is_full(state, transfer.sources, state.limits.max_sources):
        out.append(_rejected(message, "overloaded", "too many sources for one transfer"))
        return
    transfer = admit(state, message.transfer_id, message.source, now)
    if transfer is None:
        out.append(_rejected(message, "overloaded", "too many live transfers"))
        return
    if older is not None:
        supersede(state, older)
    source = Source(transfer, message.source, message.attempt, message.request_id, message)
    transfer.sources[message.source] = source
    state.timers.schedule(source, now + state.limits.compute_wait_s)
    out.append(Emit(source_event("opened", source)))
    settle(state, transfer, now, out)


def source_closed(state: State, now: float, message: SourceClosed, out: Effects) -> None:
    """Seal a source, or end it; answer again when it was released already."""
    if not 0 <= message.attempt <= MAX_ATTEMPT or not message.transfer_id:
        return
    transfer = state.transfers.get(message.transfer_id)
    source = transfer.sources.get(message.source) if transfer is not None else None
    if transfer is None or source is None or message.attempt > source.attempt:
        _closed_unknown(state, now, message, out)
        return
    if message.attempt < source.attempt:
        _closed_older(state, now, transfer, message, out)
        return
    if source.released:
        if message.reason != "preempted":
            out.append(released(source))  # the engine may have missed it
        return
    if source.ended or (source.sealed and message.reason == "finished"):
        return
    if message.reason == "finished":
        _seal(state, now, source, out)
    else:
        source.ended = message.reason
        out.append(Emit(source_event("closed", source, reason=message.reason, detail=message.detail[:MAX_TEXT])))
    settle(state, transfer, now, out)


def supersede(state: State, older: Source) -> None:
    """Put an attempt aside that a newer one replaces; it stays until nothing reads it any more."""
    state.timers.cancel(older)
    if not older.released:
        older.ended = older.ended or "superseded"
        older.transfer.retiring.append(older)


def _seal(state: State, now: float, source: Source, out: Effects) -> None:
    source.sealed = True
    state.timers.schedule(source, now + state.limits.source_lease_s)
    for binding in source.transfer.bindings.values():
        if binding.source is source:
            arm(state, binding.registration, now)
    out.append(Emit(source_event("sealed", source)))


def _closed_unknown(state: State, now: float, message: SourceClosed, out: Effects) -> None:
    # Its opening was lost, refused, or forgotten: nothing was ever bound to this attempt, so its blocks are free. The
    # entry stays as a tombstone, so that an opening that comes late opens nothing.
    if message.reason == "finished" and now < state.forgot_until:
        return  # or its opening was forgotten, and WRITEs may read its blocks: the engine gives it up in time
    transfer = state.transfers.get(message.transfer_id)
    if transfer is None:
        transfer = state.transfers[message.transfer_id] = Transfer(message.transfer_id)
    if not transfer.live:
        bury(state, transfer, now)
    older = transfer.sources.get(message.source)
    if older is None and is_full(state, transfer.sources, state.limits.max_sources):
        _free(message, out)
        return
    if older is not None:
        supersede(state, older)
    source = Source(transfer, message.source, message.attempt, message.request_id, None)
    source.ended = message.reason
    source.released = "preempted" if message.reason == "preempted" else "unknown"
    transfer.sources[message.source] = source
    if message.reason != "preempted":
        out.append(released(source))
    settle(state, transfer, now, out)


def _closed_older(state: State, now: float, transfer: Transfer, message: SourceClosed, out: Effects) -> None:
    """Answer for an attempt that a newer one replaced: its engine may hold its blocks, and has missed their release."""
    name = (message.source, message.attempt)
    older = next((source for source in transfer.retiring if (source.engine, source.attempt) == name), None)
    if older is None:
        _free(message, out)
    elif older.ended == "superseded" and message.reason != "preempted":
        # Not taken for preempted any more: it is released as soon as nothing reads it.
        older.sealed = True
        settle(state, transfer, now, out)


def _free(message: SourceClosed, out: Effects) -> None:
    """Give the blocks of an attempt back that nothing reads and that is not kept here."""
    if message.reason != "preempted":
        out.append(
            Release(
                SourceReleased(
                    transfer_id=message.transfer_id, attempt=message.attempt, source=message.source,
                    request_id=message.request_id, outcome="unknown",
                )
            )
        )  # fmt: skip


def _plausible(message: SourceOpened) -> bool:
    return (
        bool(message.transfer_id)
        and 0 <= message.attempt <= MAX_ATTEMPT
        and 1 <= message.ranks <= MAX_RANKS
        and 0 <= message.tokens <= MAX_TOKENS
        and message.expected_targets >= 1
    )


def _rejected(message: SourceOpened, reason: str, detail: str) -> Emit:
    return Emit(
        TransferEvent(
            kind="rejected", transfer_id=message.transfer_id, at=0.0, actor="matching", attempt=message.attempt,
            request_id=message.request_id, source=message.source, reason=reason, detail=detail,
        )
    )  # fmt: skip
