"""What the two halves need of the world, as ports: `link.py` implements them, and tests fake them.

Nothing here waits: the methods are called on engine threads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvflow.dataplane.memory import MemoryRange
from kvflow.messages import EngineProfile, EngineRef, Message

# A message, or how to make it: what costs time (digests, packing) is left to the bridge thread.
# What it makes is None when nobody needs it any more: a letter may wait while the bus is away.
Letter = Message | Callable[[], Message | None]


class SchedulerPort(Protocol):
    """Post messages, and say whether transfers can work now."""

    @property
    def ready(self) -> bool:
        """Return whether the bus is there and the actors of every rank of this engine are up."""

    def start(self, engine: EngineRef, ranks: int) -> None:
        """Begin to watch this engine's presence, in the background."""

    def post(self, subject: str, letter: Letter) -> None:
        """Send a message soon, in order; it waits (bounded) while the bus is away."""

    def close(self) -> None:
        """Let go of the bridge within a bound; calling it again does nothing."""


class WorkerPort(Protocol):
    """Post messages, receive answers, and hold the link between a rank's memory and the actors that touch it."""

    def start(self, profile: EngineProfile, memory: Sequence[MemoryRange], inbox: deque[Message]) -> None:
        """Attach the memory and begin to append answers to `inbox`, in the background."""

    def post(self, subject: str, letter: Letter) -> None:
        """Send a message soon, in order; it waits (bounded) while the bus is away."""

    def bus_down_for(self) -> float:
        """Return for how many seconds the bus has been unreachable; 0 while it is there."""

    def detached_for(self) -> float:
        """Return for how many seconds no actor has had this rank's memory; 0 while one may have it."""

    def fence(self) -> None:
        """Take the memory away from its actors and keep it away until `resume`."""

    def resume(self) -> None:
        """Attach again after a fence."""

    def close(self) -> None:
        """Detach and let go of the bridge within a bound; calling it again does nothing."""
