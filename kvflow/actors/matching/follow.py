"""Learn from decisions that were taken before: what a following state does, and how it takes over.

Decisions that hang on time or on the directory cannot be derived again from a replay. So the actor writes each decision
to the control stream before it acts on it, and a following state takes decisions from there only.
"""

from kvflow.actors.matching.decide import (
    Effects,
    attach,
    await_quiet,
    end,
    failure,
    forget_source,
    released,
    revocation,
    settle,
    unbind,
)
from kvflow.actors.matching.effects import Bind, Fail, Release
from kvflow.actors.matching.model import Answer, Registration, Source, State, Transfer
from kvflow.messages import EngineRef, SourceReleased, TransferBound, TransferFailed, TransferRevoked

# Told again at a take-over: a crash may have come between the record of a decision and its sending.
RESENT_ENDINGS = 256
MAX_OWED = 4096


def keep_answers(state: State, out: Effects) -> None:
    """Keep what a following state would answer at once, until the leader's record shows that it has."""
    for effect in out:
        if isinstance(effect, Fail | Release):
            state.owed[_answer(effect.message)] = effect
            if len(state.owed) > MAX_OWED:
                del state.owed[next(iter(state.owed))]


def _answer(message: TransferFailed | SourceReleased) -> Answer:
    if isinstance(message, TransferFailed):
        return message.transfer_id, message.target, message.request_id, message.target_attempt
    return message.transfer_id, message.source, message.request_id, message.attempt


def decided_bind(state: State, now: float, message: TransferBound, out: Effects) -> None:  # noqa: ARG001
    """Take over a binding that was decided before."""
    state.next_binding = max(state.next_binding, message.binding + 1)
    transfer = state.transfers.get(message.transfer_id)
    if not state.following or transfer is None or message.binding in transfer.bindings:
        return
    source = _source(transfer, message.source, message.source_attempt)
    registration = _registration(transfer, message.target, message.request_id, message.target_attempt)
    if source is None or source.released or registration is None or registration.ended:
        return
    if registration.binding is not None:
        unbind(state, registration.binding)
    offer = registration.offer
    if offer is None:
        return
    bound = TransferBound(
        transfer_id=message.transfer_id, binding=message.binding, source=message.source,
        source_attempt=message.source_attempt, target=message.target, target_attempt=message.target_attempt,
        request_id=message.request_id, start=offer.start, end=offer.end, first_blocks=offer.first_blocks,
        blocks=offer.blocks, direction=message.direction,
    )  # fmt: skip
    attach(state, source, registration, bound, now)


def decided_revoke(state: State, now: float, message: TransferRevoked, out: Effects) -> None:  # noqa: ARG001
    """Take over a revocation that was decided before."""
    transfer = state.transfers.get(message.transfer_id)
    binding = transfer.bindings.get(message.binding) if transfer is not None else None
    if not state.following or binding is None or binding.revoked is not None:
        return
    await_quiet(state, binding, message.reason, now)


def decided_fail(state: State, now: float, message: TransferFailed, out: Effects) -> None:
    """Take over the failure of a registration that was decided before."""
    state.owed.pop(_answer(message), None)
    transfer = state.transfers.get(message.transfer_id)
    if not state.following or transfer is None:
        return
    registration = _registration(transfer, message.target, message.request_id, message.target_attempt)
    if registration is not None and not registration.ended:
        if registration.binding is not None:
            unbind(state, registration.binding)
        registration.verdict = message.reason
        registration.detail = message.detail
        end(state, registration, message.reason)
    settle(state, transfer, now, out)


def decided_release(state: State, now: float, message: SourceReleased, out: Effects) -> None:
    """Take over the release of a source that was decided before."""
    state.owed.pop(_answer(message), None)
    transfer = state.transfers.get(message.transfer_id)
    if not state.following or transfer is None:
        return
    source = _source(transfer, message.source, message.attempt)
    if source is not None and not source.released:
        forget_source(state, source, message.outcome or "released")
    settle(state, transfer, now, out)


def resync(state: State, now: float) -> Effects:
    """Take over: decide what the facts ask for, and tell again what live transfers and late endings stand for."""
    state.following = False
    out: Effects = []
    for transfer in list(state.transfers.values()):
        if transfer.live:
            _tell_again(transfer, out)
            settle(state, transfer, now, out)
    for _, item in list(state.tombstones)[-RESENT_ENDINGS:]:
        if isinstance(item, Transfer) and not item.live:
            _tell_again(item, out)
    out += state.owed.values()
    state.owed.clear()
    return out


def _source(transfer: Transfer, engine: EngineRef, attempt: int) -> Source | None:
    """Find one attempt, replaced or not: the inputs read before a decision may be newer than those it was based on."""
    current = transfer.sources.get(engine)
    candidates = transfer.retiring if current is None else [current, *transfer.retiring]
    return next((source for source in candidates if (source.engine, source.attempt) == (engine, attempt)), None)


def _registration(transfer: Transfer, target: EngineRef, request_id: str, attempt: int) -> Registration | None:
    current = transfer.registrations.get((target, request_id))
    candidates = transfer.superseded if current is None else [current, *transfer.superseded]
    wanted = ((target, request_id), attempt)
    return next((found for found in candidates if (found.name, found.attempt) == wanted), None)


def _tell_again(transfer: Transfer, out: Effects) -> None:
    for binding in transfer.bindings.values():
        if binding.revoked is None:
            out.append(Bind(binding.message))
        elif not binding.is_quiet:
            out.append(revocation(binding, binding.revoked))
    for registration in transfer.registrations.values():
        if registration.ended and registration.verdict is not None:
            out.append(failure(registration))
    for source in transfer.sources.values():
        if source.released and source.released != "preempted":
            out.append(released(source))
