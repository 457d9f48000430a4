"""Choose engines for a request: pure functions of what is known about the engines and their load."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvflow.messages import EngineProfile

Mode = Literal["push", "deferred", "local"]
Compatible = Callable[["Engine", "Engine"], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """Locate the handshake side channel of an engine that runs upstream's connector."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Describe an engine as far as placement cares.

    `source` and `target` say which legs it may take, `alone` whether it may answer a request without a transfer.
    `profiles` hold one profile per rank for engines of the directory, and nothing for engines named by hand.
    """

    key: str
    url: str
    models: frozenset[str]
    source: bool
    target: bool
    alone: bool
    up: bool = True
    profiles: tuple[EngineProfile, ...] = ()
    side: SideChannel | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Name the engines of a request's two legs."""

    prefill: Engine
    decode: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Hold everything that a choice depends on, at one moment.

    `in_flight` and `last_chosen` map engine keys to requests under way and to a counter that grows with each choice.
    `compatible` tells whether the first engine's cache can be written into the second's.
    """

    engines: Sequence[Engine]
    compatible: Compatible
    in_flight: Mapping[str, int] = field(default_factory=dict)
    last_chosen: Mapping[str, int] = field(default_factory=dict)

    def pair(self, model: str, exclude: Collection[str] = ()) -> Pair | None:
        """Return the least loaded compatible pair, or None; the two legs never share an engine."""
        for decode in self._ranked(model, exclude, lambda one: one.target):
            prefill = self.prefill_for(decode, model, exclude)
            if prefill is not None:
                return Pair(prefill, decode)
        return None

    def prefill_for(self, decode: Engine, model: str, exclude: Collection[str] = ()) -> Engine | None:
        """Return the least loaded source whose cache fits the decode engine, or None."""
        for prefill in self._ranked(model, exclude, lambda one: one.source):
            if prefill.key != decode.key and self.compatible(prefill, decode):
                return prefill
        return None

    def decode_for(self, prefill: Engine, model: str, exclude: Collection[str] = ()) -> Engine | None:
        """Return the least loaded target that fits an engine which has the prompt or is at it, or None."""
        for decode in self._ranked(model, exclude, lambda one: one.target):
            if prefill.key != decode.key and self.compatible(prefill, decode):
                return decode
        return None

    def alone(self, model: str, exclude: Collection[str] = ()) -> Engine | None:
        """Return the least loaded engine that may answer by itself, or None."""
        return next(iter(self._ranked(model, exclude, lambda one: one.alone)), None)

    def _ranked(self, model: str, exclude: Collection[str], may: Callable[[Engine], bool]) -> list[Engine]:
        """Return the engines that may serve, least loaded first; among equals, the one that has waited longest."""
        serving = (
            one for one in self.engines if one.up and model in one.models and one.key not in exclude and may(one)
        )
        return sorted(
            serving, key=lambda one: (self.in_flight.get(one.key, 0), self.last_chosen.get(one.key, -1), one.key)
        )
