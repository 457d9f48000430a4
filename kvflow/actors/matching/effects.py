"""What the matching reducer asks for. Every effect is idempotent at its receivers, so any may be performed again."""

from dataclasses import dataclass

from kvflow.messages import (
    SourceReleased,
    TransferBound,
    TransferCompleted,
    TransferEvent,
    TransferFailed,
    TransferRevoked,
)


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
class Confirm:
    """Tell a rank of the target engine once more that it has every byte."""

    message: TransferCompleted


@dataclass(frozen=True, slots=True)
class Release:
    """Give the source engine its blocks back."""

    message: SourceReleased


@dataclass(frozen=True, slots=True)
class Emit:
    """Publish a lifecycle event; the actor stamps time and name."""

    event: TransferEvent


Decision = Bind | Revoke | Fail | Confirm | Release
Effect = Decision | Emit
