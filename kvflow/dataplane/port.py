"""The transfer engine port: what actors may ask of an RDMA agent. `nixl_agent.py` and `memory_agent.py` implement it.

An agent belongs to one process. It is driven by one owner thread; all methods here are called on the event loop and
never block it. Results come back through the sink, on the event loop, in any order between pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.messages import KvSegment


@dataclass(frozen=True, slots=True)
class Runs:
    """Hold N byte runs to copy: local address, remote address and length of each (u64 arrays of equal length)."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    length: NDArray[np.uint64]

    @property
    def total_bytes(self) -> int:
        """Return the number of bytes that all runs cover."""
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)


@dataclass(frozen=True, slots=True)
class PieceDone:
    """Report that a piece has been written: its bytes are at the peer. Durations are seconds."""

    piece: int
    bytes_done: int
    descriptors: int
    planning_s: float
    posting_s: float


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """Report that a piece was not (fully) written, and that nothing of it is in flight any more."""

    piece: int
    detail: str


@dataclass(frozen=True, slots=True)
class Notified:
    """Report a notification from a peer."""

    peer: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class NotifyFailed:
    """Report that a notification could not be sent."""

    peer: str
    payload: bytes
    detail: str


AgentEvent = PieceDone | PieceFailed | Notified | NotifyFailed
AgentSink = Callable[[AgentEvent], None]
# Runs on the owner thread; may raise TransferError, which becomes PieceFailed.
Plan = Callable[[], Runs]


class TransferAgent(Protocol):
    """Move bytes into a peer's registered memory, and tell the peer."""

    @property
    def name(self) -> str:
        """Return the agent's unique name."""

    @property
    def segments(self) -> tuple[KvSegment, ...]:
        """Return the registered segments with their addresses in this process."""

    def metadata(self) -> bytes:
        """Return what a peer needs to reach this agent."""

    async def add_peer(self, metadata: bytes) -> str:
        """Make a peer known and return its name; adding it again does nothing. Raises PeerError."""

    async def remove_peer(self, peer: str) -> None:
        """Forget a peer; an unknown one does nothing."""

    def write(self, piece: int, peer: str, plan: Plan, *, notification: bytes = b"") -> None:
        """Plan and post one piece on the owner thread; `notification` reaches the peer after its bytes."""

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification that is ordered after all pieces that were reported done."""

    def listen(self, seconds: float) -> None:
        """Poll for notifications and peers' connections for at least this long from now on."""

    async def close(self) -> None:
        """Wait (bounded) for posted pieces, deregister and stop the owner thread; calling it again does nothing."""
