"""What the matching reducer asks for. Every effect is idempotent at its receivers, so any may be performed again."""

from dataclasses import dataclass

from kvflow.actors.matching.model import Registration, Source
from kvflow.messages import SourceReleased, TransferBound, TransferEvent, TransferFailed, TransferRevoked
from kvflow.messages.events import TransferEventKind


@dataclass(frozen=True, slots=True)
class Bind:
    """Tell the target's completion actors, then the source's transfer actors, about a binding."""

    message: TransferBound


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take a binding back from the source's transfer actors."""

    message: TransferRevoked


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the target engine that its registration ended without its bytes."""

    message: TransferFailed


@dataclass(frozen=True, slots=True)
class Release:
    """Give the source engine its blocks back."""

    message: SourceReleased


@dataclass(frozen=True, slots=True)
class Emit:
    """Publish a lifecycle event; the actor stamps time and name."""

    event: TransferEvent


Decision = Bind | Revoke | Fail | Release
Effect = Decision | Emit


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
