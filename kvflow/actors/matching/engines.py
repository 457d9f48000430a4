"""What the directory says: engines join and go, and some pairs cannot be mapped."""

from kvflow.actors.matching.decide import Effects, settle
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, PairIncompatible
from kvflow.actors.matching.model import State, Transfer
from kvflow.actors.matching.table import bury_engine
from kvflow.messages import EngineRef


def engine_joined(state: State, event: EngineJoined, out: Effects) -> None:  # noqa: ARG001 - one shape for all handlers
    """Note an engine; it may come back after it was taken for lost."""
    state.engines[event.engine] = event.ranks
    state.gone.pop(event.engine, None)
    suspect = state.suspects.pop(event.engine, None)
    if suspect is not None:
        state.timers.cancel(suspect)


def engine_gone(state: State, event: EngineGone, out: Effects) -> None:
    """End the engine's sources, and the registrations that it made."""
    state.engines.pop(event.engine, None)
    suspect = state.suspects.pop(event.engine, None)
    if suspect is not None:
        state.timers.cancel(suspect)
    state.incompatible.pop(event.engine, None)
    for targets in state.incompatible.values():
        targets.pop(event.engine, None)
    bury_engine(state, event.engine, event.now)
    for transfer_id in tuple(state.by_engine.get(event.engine, ())):
        transfer = state.transfers[transfer_id]
        _lose_source(state, transfer, event.engine, event.now)
        _lose_target(transfer, event.engine, event.reason)
        settle(state, transfer, event.now, out)


def pair_incompatible(state: State, event: PairIncompatible, out: Effects) -> None:
    """Remember that a pair cannot be bound, and revoke what was bound before that was known."""
    if event.source in state.gone or event.target in state.gone:
        return
    state.incompatible.setdefault(event.source, {})[event.target] = event.reason
    for transfer_id in tuple(state.by_engine.get(event.source, ())):
        transfer = state.transfers[transfer_id]
        for binding in tuple(transfer.bindings.values()):
            registration = binding.registration
            if binding.source.engine == event.source and registration.target == event.target:
                registration.verdict = registration.verdict or "incompatible"
                registration.detail = registration.detail or event.reason
        settle(state, transfer, event.now, out)


def _lose_source(state: State, transfer: Transfer, engine: EngineRef, now: float) -> None:
    source = transfer.sources.get(engine)
    if source is not None and not source.released:
        source.ended = source.ended or "lost"
        source.lost = True
    for binding in transfer.bindings.values():
        if binding.source.engine == engine:
            binding.source.lost = True
            if binding.revoked is not None:
                state.timers.schedule(binding, now + state.limits.quarantine_s)


def _lose_target(transfer: Transfer, engine: EngineRef, reason: str) -> None:
    for registration in transfer.registrations.values():
        if registration.target == engine and not registration.ended and registration.verdict is None:
            registration.verdict = "target_lost"
            registration.detail = reason
