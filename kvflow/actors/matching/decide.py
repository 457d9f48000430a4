"""Derive decisions from facts: whom to bind, revoke, fail and release, given what a transfer knows right now.

`settle` is level-triggered: it looks at the present facts of one transfer, not at how they came about, so that every
order of arrival leads to the same decisions. It costs as much as the transfer has parts, however many are live.
"""

from kvflow.actors.matching.describe import registration_event, source_event
from kvflow.actors.matching.effects import (
    Bind,
    Effect,
    Emit,
    Fail,
    Release,
    Revoke,
)
from kvflow.actors.matching.model import Binding, Registration, Source, State, Transfer
from kvflow.actors.matching.table import bury
from kvflow.messages import (
    EngineRef,
    FailureReason,
    SourceReleased,
    TransferBound,
    TransferFailed,
    TransferRevoked,
)
from kvflow.messages.events import TransferEventKind

Effects = list[Effect]

# How a source ended, as the reason for which its bindings are revoked or its registration runs out of time.
_SOURCE_END: dict[str, FailureReason] = {
    "lost": "source_lost",
    "aborted": "source_aborted",
    "error": "source_aborted",
    "preempted": "source_aborted",
    "superseded": "source_aborted",
}
# After these outcomes no other source of the same transfer is to be expected.
_SPENT = frozenset({"delivered", "unused", "expired"})


def settle(state: State, transfer: Transfer, now: float, out: Effects) -> None:
    """Take every decision that the facts of this transfer allow, then retire it when nothing of it is live."""
    if not state.following:
        if transfer.superseded:
            for registration in tuple(transfer.superseded):
                _settle_registration(state, transfer, registration, now, out)
        for registration in transfer.registrations.values():
            if not registration.ended:
                _settle_registration(state, transfer, registration, now, out)
        if transfer.retiring:
            for source in tuple(transfer.retiring):
                _settle_source(state, transfer, source, out)
        for source in transfer.sources.values():
            if not source.released:
                _settle_source(state, transfer, source, out)
    _retire(state, transfer, now)


def _settle_registration(
    state: State, transfer: Transfer, registration: Registration, now: float, out: Effects
) -> None:
    binding = registration.binding
    if binding is not None:
        if _still_bound(state, binding, now, out):
            return
        unbind(state, binding)
        if not registration.verdict:
            arm(state, registration, now)
    if registration.verdict:
        fail(state, registration, registration.verdict, registration.detail, out)
        return
    offer = registration.offer
    if offer is None or offer.start == offer.end:
        out.append(Emit(registration_event("completed", registration, detail="nothing to transfer")))
        end(state, registration, "empty")
        return
    if any(older.name == registration.name for older in transfer.superseded):
        return
    _choose(state, transfer, registration, now, out)


def _still_bound(state: State, binding: Binding, now: float, out: Effects) -> bool:
    """Revoke when there is reason to; return whether the binding still stands in the way of its registration."""
    registration, source = binding.registration, binding.source
    if not registration.verdict:
        if binding.is_delivered:
            return True  # every byte is there: only the target's word, or the deadline, ends it
        if source.ended and (binding.delivered or registration.completed):
            # Some target rank may already count itself complete: another source must not write there any more.
            registration.verdict = _SOURCE_END[source.ended]
            registration.detail = "the source ended after a part had been delivered"
    if not binding.is_quiet:
        if binding.revoked is None:
            reason = registration.verdict or (_SOURCE_END[source.ended] if source.ended else None)
            if reason is not None:
                revoke(state, binding, reason, now, out)
        return True
    return not (registration.verdict or binding.revoked or source.ended)


def _choose(state: State, transfer: Transfer, registration: Registration, now: float, out: Effects) -> None:
    misfit: tuple[FailureReason, str] | None = None
    spent = False
    for source in transfer.sources.values():
        if source.usable:
            found = _misfit(state, source, registration)
            if found is None:
                bind(state, source, registration, now, out)
                return
            misfit = misfit or found
        elif source.released in _SPENT:
            spent = True
    if misfit is not None:
        fail(state, registration, *misfit, out)
    elif spent:
        fail(state, registration, "source_timeout", "the source has already given its blocks back", out)


def _misfit(state: State, source: Source, registration: Registration) -> tuple[FailureReason, str] | None:
    opened, offer = source.opened, registration.offer
    if opened is None or offer is None:
        return "source_lost", "the source's opening is not known"
    if opened.tokens != offer.prompt_tokens:
        return "token_mismatch", f"source has {opened.tokens} prompt tokens, target {offer.prompt_tokens}"
    if opened.prompt_digest != offer.prompt_digest:
        return "prompt_mismatch", "the two legs have different prompts under one transfer id"
    reasons = state.incompatible.get(source.engine)
    if reasons is not None and registration.target in reasons:
        return "incompatible", reasons[registration.target]
    for engine, ranks in ((source.engine, opened.ranks), (registration.target, offer.ranks)):
        if state.engines.get(engine, ranks) != ranks:
            return "incompatible", f"{engine} has {state.engines[engine]} ranks, but its message says {ranks}"
    return None


def _settle_source(state: State, transfer: Transfer, source: Source, out: Effects) -> None:
    if transfer.reading(source):
        return
    if source.ended == "preempted" or (source.ended == "superseded" and not source.sealed):
        forget_source(state, source, source.ended)  # the engine has these blocks already
    elif source.ended:
        release(state, source, source.ended, out)
    elif source.sealed and source.opened is not None and transfer.served(source) >= source.opened.expected_targets:
        release(state, source, "delivered" if source.used else "unused", out)
    elif source.lease_over:
        release(state, source, "expired", out)


def bind(state: State, source: Source, registration: Registration, now: float, out: Effects) -> None:
    """Bind a waiting registration to a usable source."""
    offer = registration.offer
    if offer is None:
        return
    message = TransferBound(
        transfer_id=source.transfer.transfer_id,
        binding=state.next_binding,
        source=source.engine,
        source_attempt=source.attempt,
        target=registration.target,
        target_attempt=registration.attempt,
        request_id=registration.request_id,
        start=offer.start,
        end=offer.end,
        first_blocks=offer.first_blocks,
        blocks=offer.blocks,
    )
    attach(state, source, registration, message, now)
    out.append(Bind(message))
    out.append(Emit(registration_event("bound", registration, source=source, binding=message.binding)))


def attach(state: State, source: Source, registration: Registration, message: TransferBound, now: float) -> None:
    """Record a binding; its number must not have been used before."""
    ranks = source.opened.ranks if source.opened is not None else 1
    state.next_binding = max(state.next_binding, message.binding + 1)
    binding = Binding(message.binding, source, registration, message, (1 << ranks) - 1)
    source.transfer.bindings[message.binding] = binding
    registration.binding = binding
    arm(state, registration, now)


def unbind(state: State, binding: Binding) -> None:
    """Forget a binding of which no WRITE can land any more."""
    registration = binding.registration
    state.timers.cancel(binding)
    del binding.source.transfer.bindings[binding.number]
    registration.binding = None
    registration.past_bindings += (binding.number,)
    registration.last_source_end = binding.source.ended or registration.last_source_end


def arm(state: State, registration: Registration, now: float) -> None:
    """Start the clock of the phase that a registration is in, within its overall bound."""
    offer, binding = registration.offer, registration.binding
    if offer is None or registration.verdict:
        return
    if binding is None:
        wait = offer.source_wait_s
    elif binding.source.sealed:
        wait = offer.transfer_wait_s
    else:
        wait = offer.compute_wait_s
    due = now + wait
    if binding is None and offer.repeated:
        due = max(due, state.forgot_until)  # a binding of its first registration may be live
    state.timers.schedule(registration, min(due, registration.final))


def revoke(state: State, binding: Binding, reason: FailureReason, now: float, out: Effects) -> None:
    """Take a binding back, and bound the wait for its ranks to fall quiet."""
    await_quiet(state, binding, reason, now)
    out.append(revocation(binding, reason))
    out.append(
        Emit(
            registration_event(
                "revoked", binding.registration, source=binding.source, binding=binding.number, reason=reason
            )
        )
    )


def await_quiet(state: State, binding: Binding, reason: FailureReason, now: float) -> None:
    """Note that a binding was revoked, and start the clock of its ranks' answers.

    A lost engine cannot answer: its WRITEs are over after the quarantine. A live one is asked again and again: its
    WRITEs may be under way for as long as its transfer actor lets them.
    """
    binding.revoked = reason
    binding.fence_at = now + state.limits.quiesce_wait_s + state.limits.quarantine_s
    state.timers.schedule(binding, now + state.limits.quarantine_s)


def revocation(binding: Binding, reason: FailureReason) -> Revoke:
    """Build the effect that takes a binding back."""
    source = binding.source
    return Revoke(
        TransferRevoked(
            transfer_id=source.transfer.transfer_id, binding=binding.number, source=source.engine, reason=reason
        )
    )


def end(state: State, registration: Registration, how: str) -> None:
    """Mark a registration as ended and drop what only a live one needs."""
    registration.ended = how
    registration.offer = None
    state.timers.cancel(registration)
    superseded = registration.transfer.superseded
    if registration in superseded:
        superseded.remove(registration)


def fail(state: State, registration: Registration, reason: FailureReason, detail: str, out: Effects) -> None:
    """End an unbound registration with a reason, and tell its engine."""
    registration.verdict = reason
    registration.detail = detail
    end(state, registration, reason)
    out.append(failure(registration))
    kind: TransferEventKind = "cancelled" if reason == "cancelled" else "failed"
    out.append(Emit(registration_event(kind, registration, reason=reason, detail=detail)))


def failure(registration: Registration) -> Fail:
    """Build the effect that tells the target engine how its registration ended."""
    return Fail(
        TransferFailed(
            transfer_id=registration.transfer.transfer_id,
            target=registration.target,
            target_attempt=registration.attempt,
            request_id=registration.request_id,
            reason=registration.verdict or "cancelled",
            detail=registration.detail,
        )
    )


def release(state: State, source: Source, outcome: str, out: Effects) -> None:
    """Give a source its blocks back for good."""
    forget_source(state, source, outcome)
    out.append(released(source))
    kind: TransferEventKind = "expired" if outcome == "expired" else "released"
    out.append(Emit(source_event(kind, source, reason=outcome)))


def forget_source(state: State, source: Source, outcome: str) -> None:
    """Mark a source as holding nothing any more."""
    source.released = outcome
    state.timers.cancel(source)
    retiring = source.transfer.retiring
    if source in retiring:
        retiring.remove(source)


def released(source: Source) -> Release:
    """Build the effect that gives a source its blocks back."""
    return Release(
        SourceReleased(
            transfer_id=source.transfer.transfer_id,
            attempt=source.attempt,
            source=source.engine,
            request_id=source.request_id,
            outcome=source.released,
        )
    )


def _retire(state: State, transfer: Transfer, now: float) -> None:
    """Turn a transfer of which nothing is live into a tombstone."""
    if not transfer.live or transfer.bindings or transfer.superseded or transfer.retiring:
        return
    for registration in transfer.registrations.values():
        if not registration.ended:
            return
    for source in transfer.sources.values():
        if not source.released:
            return
    transfer.live = False
    state.live -= 1
    for engine in transfer.sources:
        _unlink(state, engine, transfer.transfer_id)
    for engine, _ in transfer.registrations:
        _unlink(state, engine, transfer.transfer_id)
    bury(state, transfer, now)


def _unlink(state: State, engine: EngineRef, transfer_id: str) -> None:
    transfers = state.by_engine.get(engine)
    if transfers is not None:
        transfers.pop(transfer_id, None)
        if not transfers:
            del state.by_engine[engine]
