"""What can happen to the matching state: everything that `step` takes. `now` is monotonic seconds of the caller."""

from dataclasses import dataclass

from kvflow.messages import EngineRef, Message


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the shard's control stream."""

    now: float
    message: Message


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """An engine has all its cards in the directory; `ranks` is how many it has."""

    now: float
    engine: EngineRef
    ranks: int


@dataclass(frozen=True, slots=True)
class EngineGone:
    """An engine has left the directory, was lost, or restarted its actors."""

    now: float
    engine: EngineRef
    reason: str


@dataclass(frozen=True, slots=True)
class PairIncompatible:
    """The caches of two engines cannot be mapped; known until one of them goes."""

    now: float
    source: EngineRef
    target: EngineRef
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: act on the deadlines that are due."""

    now: float


Input = Received | EngineJoined | EngineGone | PairIncompatible | Tick
