"""What a target says: it registers blocks, gives them up, or has received every byte."""

from kvflow.actors.matching.decide import Effects, arm, end, failure, settle, unbind
from kvflow.actors.matching.describe import registration_event
from kvflow.actors.matching.effects import Confirm, Emit, Fail
from kvflow.actors.matching.model import Registration, State, Transfer
from kvflow.actors.matching.table import MAX_ATTEMPT, MAX_RANKS, MAX_TEXT, MAX_TOKENS, MAX_WAIT_S, admit, bury, is_full
from kvflow.messages import (
    FailureReason,
    TargetCancelled,
    TargetRegistered,
    TransferCompleted,
    TransferEvent,
    TransferFailed,
)


def target_registered(state: State, now: float, message: TargetRegistered, out: Effects) -> None:
    """Add a registration, or replace an older attempt of the same request."""
    if not message.transfer_id or not 0 <= message.attempt <= MAX_ATTEMPT:
        return
    transfer = state.transfers.get(message.transfer_id)
    name = (message.target, message.request_id)
    older = transfer.registrations.get(name) if transfer is not None else None
    if transfer is not None and older is not None and message.attempt <= older.attempt:
        if message.attempt < older.attempt and not _pending(transfer, message):
            _refuse(message, "cancelled", "a newer attempt came before", out)
        elif message.attempt == older.attempt and older.ended:
            _ended_already(older, message, out)
        return
    if not _plausible(message):
        _refuse(message, "bad_registration", "its range, ranks or waits make no sense", out)
        return
    if message.target in state.gone and not state.following:
        _refuse(message, "target_lost", "the engine has no card in the directory", out)
        return
    full = (
        transfer is not None
        and older is None
        and is_full(state, transfer.registrations, state.limits.max_registrations)
    )
    transfer = None if full else admit(state, message.transfer_id, message.target, now)
    if transfer is None:
        _refuse(message, "overloaded", "too many live transfers or registrations", out)
        return
    if older is not None:
        supersede(older, message.attempt)
    registration = Registration(transfer, message.target, message.request_id, message.attempt, message)
    registration.final = now + message.source_wait_s + message.compute_wait_s + message.transfer_wait_s
    transfer.registrations[name] = registration
    arm(state, registration, now)
    out.append(Emit(registration_event("registered", registration)))
    settle(state, transfer, now, out)


def target_cancelled(state: State, now: float, message: TargetCancelled, out: Effects) -> None:
    """End a registration as soon as nothing can land in it; a cancel that overtakes its registration waits for it."""
    if not message.transfer_id or not 0 <= message.attempt <= MAX_ATTEMPT:
        return
    transfer = state.transfers.get(message.transfer_id)
    name = (message.target, message.request_id)
    registration = transfer.registrations.get(name) if transfer is not None else None
    if transfer is None or registration is None or message.attempt > registration.attempt:
        _cancelled_unknown(state, now, message, out)
        return
    if message.attempt < registration.attempt:
        # That attempt is ending already, because a newer one replaced it, or has ended and the engine missed it.
        if not _pending(transfer, message):
            _refuse(message, "cancelled", "a newer attempt came before", out)
        return
    if registration.ended:
        # The engine may have missed its end, completion included; every WRITE into it has landed by then.
        if registration.ended != "empty":
            out.append(failure(registration))
        return
    if registration.verdict is None:
        registration.verdict = "cancelled"
        registration.detail = message.detail[:MAX_TEXT]
    settle(state, transfer, now, out)


def transfer_completed(state: State, now: float, message: TransferCompleted, out: Effects) -> None:
    """Count a target rank that has every byte; the registration ends when all ranks have."""
    transfer = state.transfers.get(message.transfer_id)
    if transfer is None or not transfer.live:
        return
    binding = transfer.bindings.get(message.binding)
    if binding is None:
        _completed_late(state, now, transfer, message, out)
        return
    registration = binding.registration
    ranks = registration.offer.ranks if registration.offer is not None else 0
    if not _same(registration, message) or not 0 <= message.rank < ranks:
        return
    registration.completed |= 1 << message.rank
    if registration.completed != (1 << ranks) - 1:
        return
    # Every rank has every byte, so every WRITE has landed: the source is not read any more either.
    out.append(Emit(registration_event("completed", registration, source=binding.source, binding=binding.number)))
    binding.source.used = True
    unbind(state, binding)
    end(state, registration, "completed")
    settle(state, transfer, now, out)


def supersede(older: Registration, attempt: int) -> None:
    """Let an attempt end that a newer one replaces."""
    if not older.ended:
        older.verdict = older.verdict or "cancelled"
        older.detail = older.detail or f"replaced by attempt {attempt}"
        older.transfer.superseded.append(older)


def _ended_already(registration: Registration, message: TargetRegistered, out: Effects) -> None:
    """Say again how a registration ended, as its engine has missed it."""
    if registration.ended != "completed":
        if registration.verdict is not None and (registration.verdict != "cancelled" or message.repeated):
            out.append(failure(registration))
    elif message.repeated:
        for rank in range(registration.completed.bit_length()):
            confirmed = TransferCompleted(
                transfer_id=message.transfer_id, binding=registration.past_bindings[-1], target=registration.target,
                target_attempt=registration.attempt, request_id=registration.request_id, rank=rank,
            )  # fmt: skip
            out.append(Confirm(confirmed))


def _completed_late(state: State, now: float, transfer: Transfer, message: TransferCompleted, out: Effects) -> None:
    # A rank counts itself complete by a binding that was taken to be dead: nothing may be written there any more.
    registration = transfer.registrations.get((message.target, message.request_id))
    if registration is None or registration.ended or not _same(registration, message):
        return
    if message.binding in registration.past_bindings and registration.verdict is None:
        registration.verdict = "transfer_error"
        registration.detail = "a rank completed by a binding that had been given up"
        settle(state, transfer, now, out)


def _cancelled_unknown(state: State, now: float, message: TargetCancelled, out: Effects) -> None:
    # Nothing was ever bound for this attempt. The tombstone ends its registration, should that come late.
    transfer = state.transfers.get(message.transfer_id)
    if transfer is None:
        transfer = state.transfers[message.transfer_id] = Transfer(message.transfer_id)
    if not transfer.live:
        bury(state, transfer, now)
    name = (message.target, message.request_id)
    older = transfer.registrations.get(name)
    if older is None and is_full(state, transfer.registrations, state.limits.max_registrations):
        _refuse(message, "cancelled", "no such registration", out)
        return
    if older is not None:
        supersede(older, message.attempt)
    registration = Registration(transfer, message.target, message.request_id, message.attempt, None)
    registration.verdict = "cancelled"
    registration.detail = message.detail[:MAX_TEXT]
    registration.ended = "cancelled"
    transfer.registrations[name] = registration
    out.append(failure(registration))
    out.append(Emit(registration_event("cancelled", registration, reason="cancelled", detail=registration.detail)))
    settle(state, transfer, now, out)


def _pending(transfer: Transfer, message: TargetRegistered | TargetCancelled) -> bool:
    return any(
        (older.target, older.request_id, older.attempt) == (message.target, message.request_id, message.attempt)
        for older in transfer.superseded
    )


def _same(registration: Registration, message: TransferCompleted) -> bool:
    return (
        registration.target == message.target
        and registration.request_id == message.request_id
        and registration.attempt == message.target_attempt
    )


def _plausible(message: TargetRegistered) -> bool:
    return (
        1 <= message.ranks <= MAX_RANKS
        and 0 <= message.start <= message.end <= message.prompt_tokens <= MAX_TOKENS
        and len(message.blocks) == len(message.first_blocks)
        and 0.0 < message.source_wait_s <= MAX_WAIT_S  # false for NaN, which must not reach the timers
        and 0.0 < message.compute_wait_s <= MAX_WAIT_S
        and 0.0 < message.transfer_wait_s <= MAX_WAIT_S
    )


def _refuse(message: TargetRegistered | TargetCancelled, reason: FailureReason, detail: str, out: Effects) -> None:
    failed = TransferFailed(
        transfer_id=message.transfer_id, target=message.target, target_attempt=message.attempt,
        request_id=message.request_id, reason=reason, detail=detail,
    )  # fmt: skip
    rejected = TransferEvent(
        kind="rejected", transfer_id=message.transfer_id, at=0.0, actor="matching", attempt=message.attempt,
        request_id=message.request_id, target=message.target, reason=reason, detail=detail,
    )  # fmt: skip
    out += (Fail(failed), Emit(rejected))
