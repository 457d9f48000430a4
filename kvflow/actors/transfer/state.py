"""The transfer actor's reducer: `step(state, event, now)` changes the state and returns the effects to perform.

Sources are kept by (transfer_id, attempt) and bindings by (transfer_id, binding). No order is assumed between messages
of different senders: a binding may come before its source and the other way round, a release or a revocation before
what it ends. What has ended is remembered for a while, so that late and repeated messages find an answer.
"""

from typing import assert_never

from kvflow.actors.transfer.bindings import (
    Effects,
    advance,
    cut_off,
    errored,
    fail,
    keep_awake,
    piece_done,
    piece_failed,
    quiesced,
    release,
    revoke,
    set_lanes,
)
from kvflow.actors.transfer.book import TransferState
from kvflow.actors.transfer.model import (
    Binding,
    CardLapsed,
    DeliveryFailed,
    DropPeer,
    Effect,
    Input,
    PeerLost,
    PeerReady,
    PeerUnknown,
    Report,
    SendNotification,
    Source,
    SourceKey,
    StartPeer,
    Tables,
    Tick,
)
from kvflow.actors.transfer.tables import MAX_ENTRIES, BlockTables
from kvflow.dataplane.port import PieceDone, PieceFailed
from kvflow.errors import TransferError, WireError
from kvflow.messages import (
    FailureReason,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    TransferBound,
    TransferDelivered,
    TransferRevoked,
    unpack_blocks,
)

NOTIFY_RETRIES = 2
# Far beyond any context, and small enough for all arithmetic on token positions.
MAX_TOKENS = 1 << 40


def step(state: TransferState, event: Input, now: float) -> list[Effect]:  # noqa: C901 -- one flat dispatch
    """Apply one fact at monotonic time `now` (seconds) and return what to do, in order."""
    out: Effects = []
    match event:
        case SourceProgress():
            _progress(state, event, now, out)
        case PieceDone():
            piece = state.pieces.pop(event.piece, None)
            if piece is not None:
                piece_done(state, piece, event, now, out)
        case PieceFailed():
            piece = state.pieces.pop(event.piece, None)
            if piece is not None:
                piece_failed(state, piece, event.detail, now, out)
        case TransferBound():
            _bound(state, event, now, out)
        case TransferRevoked():
            _revoked(state, event, now, out)
        case SourceOpened():
            _opened(state, event, now)
        case SourceClosed():
            _closed(state, event, now, out)
        case SourceReleased():
            _released(state, event, now, out)
        case PeerReady():
            _peer_ready(state, event, now, out)
        case PeerUnknown():
            _peer_unknown(state, event, now, out)
        case PeerLost():
            _peer_lost(state, event, now, out)
        case DeliveryFailed():
            _delivery_failed(state, event, now, out)
        case CardLapsed():
            _card_lapsed(state, now, out)
        case Tick():
            _tick(state, now, out)
        case _:
            assert_never(event)
    return out


# ---------------------------------------------------------------- the source


def _source(state: TransferState, key: SourceKey, now: float) -> Source | None:
    """Return the source of that key, made if need be; None when it has ended or the table is full."""
    source = state.sources.get(key)
    if source is None:
        if key in state.ended_sources or len(state.sources) >= state.limits.sources:
            state.ignored += 1
            return None
        source = Source(tables=BlockTables(state.block_tokens, state.num_blocks), touched=now)
        state.sources[key] = source
    source.touched = now
    return source


def _opened(state: TransferState, event: SourceOpened, now: float) -> None:
    if event.source != state.me:
        state.ignored += 1
        return
    _source(state, (event.transfer_id, event.attempt), now)


def _progress(state: TransferState, event: SourceProgress, now: float, out: Effects) -> None:
    if event.source != state.me or event.rank != state.rank:
        state.ignored += 1
        return
    key = (event.transfer_id, event.attempt)
    source = _source(state, key, now)
    if source is None or source.broken:
        return
    try:
        source.tables.extend(event.first_blocks, event.blocks)
    except TransferError as error:
        source.broken = f"source attempt {event.attempt}: {error}"
    else:
        if event.tokens_final > source.tables.covered_tokens:
            source.broken = (
                f"source attempt {event.attempt}: {event.tokens_final} tokens are said to be final, but the block "
                f"tables cover {source.tables.covered_tokens}"
            )
    if not source.broken:
        source.tokens_final = max(source.tokens_final, event.tokens_final)
        if event.last and source.last_at is None:
            source.last_at = now
    for binding in state.bindings_of(key):
        advance(state, binding, now, out)


def _closed(state: TransferState, event: SourceClosed, now: float, out: Effects) -> None:
    if event.source != state.me:
        state.ignored += 1
        return
    key = (event.transfer_id, event.attempt)
    if event.reason != "finished":
        # Bindings of the attempt stand still from here on; matching revokes them, and then they are quiesced.
        state.end_source(key, now)
        for binding in state.bindings_of(key):
            binding.touched = now
        return
    source = _source(state, key, now)
    if source is None or source.sealed:
        return
    source.sealed = True
    for binding in state.bindings_of(key):
        advance(state, binding, now, out)


def _released(state: TransferState, event: SourceReleased, now: float, out: Effects) -> None:
    if event.source != state.me:
        state.ignored += 1
        return
    key = (event.transfer_id, event.attempt)
    source = state.sources.get(key)
    last_at = None if source is None else source.last_at
    state.end_source(key, now)
    for binding in state.bindings_of(key):
        release(state, binding, last_at, now, out)


# ---------------------------------------------------------------- bindings


def _bound(state: TransferState, event: TransferBound, now: float, out: Effects) -> None:
    if event.source != state.me:
        state.ignored += 1
        return
    key = (event.transfer_id, event.binding)
    ended = state.ended_bindings.get(key)
    if ended is not None:
        # Matching asks again after a restart: the same end is the answer.
        if ended.report is not None:
            out.append(Report(ended.report))
        return
    if key in state.bindings:
        return
    tables, problem = _target_tables(state, event)
    if problem is not None:
        report = errored(state, *key, *problem)
        state.remember(key, report, now)
        out.append(Report(report))
        return
    binding = Binding(message=event, tables=tables, bound_at=now, touched=now, posted=event.start)
    state.add_binding(binding)
    _find_peer(state, binding, now, out)
    if key in state.bindings:
        advance(state, binding, now, out)


def _target_tables(state: TransferState, event: TransferBound) -> tuple[Tables, tuple[FailureReason, str] | None]:
    """Return the target's block tables, and what is wrong with the binding if anything is."""
    if len(state.bindings) >= state.limits.bindings:
        return (), ("overloaded", f"{len(state.bindings)} bindings are live on this rank")
    if event.direction != "write":
        return (), ("incompatible", f"direction {event.direction!r} is not served by source ranks")
    if not 0 <= event.start < event.end <= MAX_TOKENS:
        return (), ("bad_registration", f"token range [{event.start}, {event.end}) is empty or malformed")
    if len(event.first_blocks) != len(event.blocks) or not all(
        0 <= first <= MAX_ENTRIES for first in event.first_blocks
    ):
        return (), ("bad_registration", "block tables and their positions do not match")
    try:
        return tuple(unpack_blocks(packed) for packed in event.blocks), None
    except WireError as error:
        return (), ("bad_registration", str(error))


def _find_peer(state: TransferState, binding: Binding, now: float, out: Effects) -> None:
    target = binding.message.target
    refused = state.refused.get(target)
    if refused is not None:
        fail(state, binding, refused.reason, refused.detail, now, out)
    elif target not in state.peers:
        state.peers[target] = None
        out.append(StartPeer(target))
    else:
        lanes = state.peers[target]
        if lanes is not None:
            set_lanes(binding, lanes)


def _revoked(state: TransferState, event: TransferRevoked, now: float, out: Effects) -> None:
    if event.source != state.me:
        state.ignored += 1
        return
    key = (event.transfer_id, event.binding)
    binding = state.bindings.get(key)
    if binding is not None:
        revoke(state, binding, event.reason, now, out)
        return
    # Never bound here, or ended: nothing is in flight, and remembering it keeps a late TransferBound from starting.
    report = quiesced(state, *key)
    state.remember(key, report, now)
    out.append(Report(report))


def _delivery_failed(state: TransferState, event: DeliveryFailed, now: float, out: Effects) -> None:
    delivered = event.delivered
    key = (delivered.transfer_id, delivered.binding)
    binding = state.bindings.get(key)
    detail = f"notification to target rank {delivered.target_rank}: {event.detail}"
    if binding is not None:
        fail(state, binding, "transfer_error", detail, now, out)
        return
    ended = state.ended_bindings.get(key)
    if ended is None or not isinstance(ended.report, TransferDelivered):
        return
    ended.notify_failures += 1
    if ended.notify_failures <= NOTIFY_RETRIES:
        out.append(SendNotification(delivered))
        return
    ended.report = errored(state, *key, "transfer_error", detail)
    out.append(Report(ended.report))


# ---------------------------------------------------------------- peers and time


def _peer_ready(state: TransferState, event: PeerReady, now: float, out: Effects) -> None:
    state.refused.pop(event.target, None)
    state.peers[event.target] = event.lanes
    for binding in state.bindings_to(event.target):
        # A binding that the last loss of this engine has fenced keeps its lanes until its pieces have landed.
        if binding.lanes is None:
            set_lanes(binding, event.lanes)
            advance(state, binding, now, out)


def _peer_unknown(state: TransferState, event: PeerUnknown, now: float, out: Effects) -> None:
    state.peers.pop(event.target, None)
    if event.final:
        state.refused[event.target] = event
    for binding in state.bindings_to(event.target):
        if binding.lanes is None:
            fail(state, binding, event.reason, event.detail, now, out)


def _peer_lost(state: TransferState, event: PeerLost, now: float, out: Effects) -> None:
    state.peers.pop(event.target, None)
    state.refused.pop(event.target, None)
    for binding in state.bindings_to(event.target):
        fail(state, binding, "target_lost", event.detail or f"{event.target} has left", now, out)


def _card_lapsed(state: TransferState, now: float, out: Effects) -> None:
    detail = "this rank's card was not refreshed in time, so that its WRITEs may count as over"
    bindings = list(state.bindings.values())
    for binding in bindings:
        fail(state, binding, "source_lost", detail, now, out)
    for target in dict.fromkeys(binding.message.target for binding in bindings if binding.in_flight):
        out.append(DropPeer(target, detail))


def _tick(state: TransferState, now: float, out: Effects) -> None:
    state.expire_memories(now)
    limits = state.limits
    for binding in list(state.bindings.values()):
        if binding.in_flight:
            keep_awake(state, binding, now, out)
            cut_off(state, binding, now, out)
        elif now - binding.touched > limits.orphan_s:
            _expire_binding(state, binding, now, out)
    for key, source in list(state.sources.items()):
        if now - source.touched > limits.stale_s and key not in state.by_source:
            state.end_source(key, now)


def _expire_binding(state: TransferState, binding: Binding, now: float, out: Effects) -> None:
    source = state.sources.get(binding.source_key)
    attempt = binding.message.source_attempt
    if source is None:
        fail(state, binding, "source_lost", f"source attempt {attempt} is not known on this rank", now, out)
    elif source.sealed and now - source.touched > state.limits.orphan_s and binding.lanes is not None:
        detail = f"source attempt {attempt} ended with {source.tokens_final} of {binding.message.end} tokens final here"
        fail(state, binding, "source_lost", detail, now, out)
    elif now - max(binding.touched, source.touched) > state.limits.stale_s:
        fail(state, binding, "compute_timeout", "the source stood still", now, out)
