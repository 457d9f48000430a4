"""The matching reducer: joins sources and registrations into bindings, and decides everything that ends them.

`step(state, event)` learns a fact and lets `decide.settle` derive decisions from it. Only `step` and `resync` change a
state. No clock, no random, no I/O; duplicates are no-ops; nothing in a message is trusted to be sane.
"""

from collections.abc import Callable
from typing import Any, assert_never

from kvflow.actors.matching import engines, follow, reports, sources, targets
from kvflow.actors.matching.decide import Effects, revocation, settle
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, Input, PairIncompatible, Received, Tick
from kvflow.actors.matching.model import Binding, Registration, Source, State, Suspect
from kvflow.actors.matching.table import expire_tombstones
from kvflow.messages import (
    FailureReason,
    Message,
    SourceClosed,
    SourceOpened,
    SourceReleased,
    TargetCancelled,
    TargetRegistered,
    TransferBound,
    TransferCompleted,
    TransferDelivered,
    TransferErrored,
    TransferFailed,
    TransferQuiesced,
    TransferRevoked,
)

__all__ = ["HANDLERS", "resync", "step"]

resync = follow.resync

# Any: each handler takes the one message type that it is filed under.
HANDLERS: dict[type[Message], Callable[[State, float, Any, Effects], None]] = {
    SourceOpened: sources.source_opened,
    SourceClosed: sources.source_closed,
    TargetRegistered: targets.target_registered,
    TargetCancelled: targets.target_cancelled,
    TransferCompleted: targets.transfer_completed,
    TransferDelivered: reports.transfer_delivered,
    TransferQuiesced: reports.transfer_quiesced,
    TransferErrored: reports.transfer_errored,
    TransferBound: follow.decided_bind,
    TransferRevoked: follow.decided_revoke,
    TransferFailed: follow.decided_fail,
    SourceReleased: follow.decided_release,
}


def step(state: State, event: Input) -> Effects:
    """Apply one event to the state, in place, and return what is to be done; a message of no concern does nothing."""
    out: Effects = []
    if isinstance(event, Received):
        handler = HANDLERS.get(type(event.message))
        if handler is not None:
            handler(state, event.now, event.message, out)
    elif isinstance(event, Tick):
        _tick(state, event.now, out)
    elif isinstance(event, EngineJoined):
        engines.engine_joined(state, event, out)
    elif isinstance(event, EngineGone):
        engines.engine_gone(state, event, out)
    elif isinstance(event, PairIncompatible):
        engines.pair_incompatible(state, event, out)
    else:
        assert_never(event)
    if state.following:
        follow.keep_answers(state, out)
        return []  # whoever leads has told everybody
    return out


def _tick(state: State, now: float, out: Effects) -> None:
    if not state.following:
        for item in state.timers.due(now):
            if isinstance(item, Registration):
                _registration_due(state, item, now, out)
            elif isinstance(item, Binding):
                _binding_due(state, item, now, out)
            elif isinstance(item, Source):
                item.lease_over = True
                settle(state, item.transfer, now, out)
            elif isinstance(item, Suspect):
                engines.engine_gone(state, EngineGone(now, item.engine, "no card in the directory"), out)
            else:
                assert_never(item)
    expire_tombstones(state, now)


def _registration_due(state: State, registration: Registration, now: float, out: Effects) -> None:
    binding = registration.binding
    reason: FailureReason
    if binding is None:
        ends: dict[str, FailureReason] = {"lost": "source_lost", "aborted": "source_aborted", "error": "source_aborted"}
        reason = ends.get(registration.last_source_end, "source_timeout")
        detail = "no source in time"
    elif binding.source.sealed:
        reason, detail = "transfer_timeout", "the source was ready, but the bytes did not arrive in time"
    else:
        reason, detail = "compute_timeout", "the source did not finish computing in time"
    registration.verdict = registration.verdict or reason
    registration.detail = registration.detail or detail
    settle(state, registration.transfer, now, out)


def _binding_due(state: State, binding: Binding, now: float, out: Effects) -> None:
    """Ask a silent source once more; take its WRITEs for over when it is lost, or should have answered long ago."""
    if binding.source.lost or now >= binding.fence_at:
        binding.fenced = True
        settle(state, binding.source.transfer, now, out)
    elif binding.revoked is not None:
        state.timers.schedule(binding, min(now + state.limits.quarantine_s, binding.fence_at))
        out.append(revocation(binding, binding.revoked))
