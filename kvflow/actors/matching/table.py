"""Find, admit and expire entries of the transfer table, and keep its index by engine."""

from collections.abc import Sized

from kvflow.actors.matching.model import State, Suspect, Transfer
from kvflow.messages import EngineRef

MAX_ATTEMPT = 1 << 31
MAX_RANKS = 4096
MAX_TOKENS = 1 << 31
MAX_WAIT_S = 86_400.0
MAX_TEXT = 512


def admit(state: State, transfer_id: str, engine: EngineRef, now: float) -> Transfer | None:
    """Return the live entry of a transfer for this engine to join, or None when the table is full."""
    transfer = state.transfers.get(transfer_id)
    if transfer is None or not transfer.live:
        if state.live >= state.limits.max_live and not state.following:
            return None
        if transfer is None:
            transfer = Transfer(transfer_id)
            state.transfers[transfer_id] = transfer
        transfer.live = True
        state.live += 1
    state.by_engine.setdefault(engine, {})[transfer_id] = None
    if engine not in state.engines and engine not in state.suspects:
        unknown = state.suspects[engine] = Suspect(engine)
        state.timers.schedule(unknown, now + state.limits.engine_grace_s)
    return transfer


def is_full(state: State, entries: Sized, limit: int) -> bool:
    """Return whether a table takes no more. A follower refuses nothing: its leader may have let it in."""
    return len(entries) >= limit and not state.following


def bury(state: State, transfer: Transfer, now: float) -> None:
    """Keep a transfer that is not live for late messages, for a bounded time."""
    transfer.expires = now + state.limits.tombstone_s
    state.tombstones.append((transfer.expires, transfer))
    if len(state.tombstones) > state.limits.max_live:
        _dig_up(state)


def bury_engine(state: State, engine: EngineRef, now: float) -> None:
    """Remember for a bounded time that an engine is gone."""
    expires = now + state.limits.tombstone_s
    state.gone[engine] = expires
    state.tombstones.append((expires, engine))
    if len(state.tombstones) > state.limits.max_live:
        _dig_up(state)


def expire_tombstones(state: State, now: float) -> None:
    """Remove the tombstones whose time is over."""
    while state.tombstones and state.tombstones[0][0] <= now:
        _dig_up(state)


def _dig_up(state: State) -> None:
    expires, item = state.tombstones.popleft()
    if isinstance(item, Transfer):
        # It may live again, have been buried again, or have given way to another under its id.
        if not item.live and item.expires == expires and state.transfers.get(item.transfer_id) is item:
            del state.transfers[item.transfer_id]
    elif state.gone.get(item) == expires:
        del state.gone[item]
