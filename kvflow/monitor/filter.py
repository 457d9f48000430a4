"""Choose lifecycle events: by transfer, engine, kind, or whether something went wrong."""

from dataclasses import dataclass
from typing import get_args

from kvflow.errors import ConfigError
from kvflow.messages import EngineEvent, EngineRef, TransferEvent
from kvflow.messages.events import EngineEventKind, TransferEventKind

Event = TransferEvent | EngineEvent

KINDS: tuple[str, ...] = (*get_args(TransferEventKind), *get_args(EngineEventKind))
FAILURES = frozenset({"failed", "rejected", "expired", "lost"})


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Accept events that fit every condition that is set; within a condition any value will do."""

    transfers: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    failed: bool = False

    @classmethod
    def parse(cls, *, transfers: list[str], engines: list[str], kinds: list[str], failed: bool) -> "EventFilter":
        """Make a filter from command-line values; raise ConfigError for a kind that does not exist."""
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ConfigError(f"unknown kind of event {unknown[0]!r}", remedy=f"choose from {', '.join(KINDS)}")
        return cls(transfers=tuple(transfers), engines=tuple(engines), kinds=frozenset(kinds), failed=failed)

    def accepts(self, event: Event) -> bool:
        """Return whether the event is one to show."""
        return (
            (not self.kinds or event.kind in self.kinds)
            and (not self.failed or went_wrong(event))
            and (not self.transfers or _is_of_transfer(event, self.transfers))
            and (not self.engines or any(_is_named(ref, self.engines) for ref in _engines(event)))
        )


def went_wrong(event: Event) -> bool:
    """Return whether an event tells of a failure; a source that closed without finishing counts."""
    closed_early = event.kind == "closed" and event.reason not in {"", "finished"}
    return event.kind in FAILURES or closed_early


def _is_of_transfer(event: Event, prefixes: tuple[str, ...]) -> bool:
    return isinstance(event, TransferEvent) and event.transfer_id.startswith(prefixes)


def _engines(event: Event) -> tuple[EngineRef, ...]:
    if isinstance(event, EngineEvent):
        return (event.engine,)
    return tuple(ref for ref in (event.source, event.target) if ref is not None)


def _is_named(ref: EngineRef, names: tuple[str, ...]) -> bool:
    return ref.engine_id in names or str(ref) in names
