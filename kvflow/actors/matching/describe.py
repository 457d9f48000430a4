"""Describe steps of a transfer as lifecycle events; the actor stamps time and its name."""

from kvflow.actors.matching.model import Registration, Source
from kvflow.messages import TransferEvent
from kvflow.messages.events import TransferEventKind


def registration_event(
    kind: TransferEventKind,
    registration: Registration,
    *,
    source: Source | None = None,
    binding: int = 0,
    reason: str = "",
    detail: str = "",
) -> TransferEvent:
    """Describe a step of a registration."""
    offer = registration.offer
    return TransferEvent(
        kind=kind,
        transfer_id=registration.transfer.transfer_id,
        at=0.0,
        actor="matching",
        binding=binding,
        attempt=registration.attempt,
        request_id=registration.request_id,
        source=source.engine if source is not None else None,
        target=registration.target,
        tokens=offer.end - offer.start if offer is not None else 0,
        tokens_total=offer.prompt_tokens if offer is not None else 0,
        reason=reason,
        detail=detail,
    )


def source_event(kind: TransferEventKind, source: Source, *, reason: str = "", detail: str = "") -> TransferEvent:
    """Describe a step of a source."""
    return TransferEvent(
        kind=kind,
        transfer_id=source.transfer.transfer_id,
        at=0.0,
        actor="matching",
        attempt=source.attempt,
        request_id=source.request_id,
        source=source.engine,
        tokens_total=source.opened.tokens if source.opened is not None else 0,
        reason=reason,
        detail=detail,
    )
