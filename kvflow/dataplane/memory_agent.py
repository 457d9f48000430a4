"""An agent that copies between agents of one process, for tests and simulations: as late and as strict as a real one.

Bytes move when a piece ends, not when it is posted, and notifications arrive only while their receiver polls.
"""

import asyncio
import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflow.config import Settings
from kvflow.dataplane.agent import DrivenAgent
from kvflow.dataplane.memory import MemoryRange
from kvflow.dataplane.owner import Batch, Peer
from kvflow.dataplane.port import AgentSink
from kvflow.errors import TransferError
from kvflow.messages import KvSegment


class MemoryFabric:
    """Connect the memory agents of one process, and inject faults into them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.delay_s = 0.0
        self._inboxes: dict[str, deque[tuple[str, bytes]]] = {}
        self._write_faults: deque[str] = deque()
        self._stalled: set[str] = set()

    def fail_next_write(self, detail: str = "injected fault") -> None:
        """Let the next piece that any agent posts fail after it was posted."""
        with self.lock:
            self._write_faults.append(detail)

    def stall(self, name: str) -> None:
        """Let nothing to or from this agent end any more, as if its host had vanished."""
        with self.lock:
            self._stalled.add(name)

    def join(self, name: str) -> None:
        """Let an agent in; called by the agent."""
        with self.lock:
            if name in self._inboxes:
                raise TransferError(f"an agent called {name} is already there")
            self._inboxes[name] = deque()

    def leave(self, name: str) -> None:
        """Let an agent out; called by the agent."""
        with self.lock:
            self._inboxes.pop(name, None)

    def take_fault(self) -> str:
        """Return the fault that the next piece shall have, or nothing."""
        with self.lock:
            return self._write_faults.popleft() if self._write_faults else ""

    def inbox(self, name: str) -> deque[tuple[str, bytes]] | None:
        """Return an agent's notifications, None when it is gone. The caller holds `lock`."""
        return self._inboxes.get(name)

    def stalled(self, *names: str) -> bool:
        """Return whether one of these agents is stalled. The caller holds `lock`."""
        return not self._stalled.isdisjoint(names)


class MemoryAgent(DrivenAgent):
    """Copy bytes between agents of one fabric."""

    def __init__(
        self,
        name: str,
        ranges: Sequence[MemoryRange],
        sink: AgentSink,
        *,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        fabric: MemoryFabric,
    ) -> None:
        """Join the fabric with these ranges."""
        super().__init__(name, ranges, sink, _MemoryDriver(name, fabric), engine="memory", loop=loop, settings=settings)


@dataclass(slots=True)
class _Write:
    peer: str
    batch: Batch
    notification: bytes
    ends_at: float = 0.0
    fault: str = field(default="")


class _MemoryDriver:
    """Copy with memmove under the fabric's lock, so that no memory is unmapped meanwhile."""

    def __init__(self, name: str, fabric: MemoryFabric) -> None:
        self._name = name
        self._fabric = fabric

    def open(self, segments: Sequence[KvSegment]) -> bytes:
        if any(segment.memory != "DRAM" for segment in segments):
            raise TransferError("a memory agent copies host memory only")
        self._fabric.join(self._name)
        return b"memory"

    def connect(self, peer: Peer) -> None:
        if peer.blob != b"memory":
            raise TransferError(f"{peer.name} is not a memory agent")

    def disconnect(self, peer: Peer) -> None:
        """Do nothing: pieces that are not polled never end."""

    def prepare(self, peer: Peer, batch: Batch, notification: bytes) -> _Write:
        return _Write(peer.name, batch, notification)

    def post(self, handle: _Write) -> bool:
        handle.fault = self._fabric.take_fault()
        handle.ends_at = time.monotonic() + self._fabric.delay_s
        return False

    def poll(self, handle: _Write) -> bool:
        if time.monotonic() < handle.ends_at:
            return False
        if handle.fault:
            raise TransferError(handle.fault)
        with self._fabric.lock:
            if self._fabric.stalled(self._name, handle.peer):
                return False
            inbox = self._fabric.inbox(handle.peer)
            if inbox is None:
                raise TransferError(f"{handle.peer} has left")
            runs = handle.batch.runs
            for local, remote, length in zip(
                runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True
            ):
                ctypes.memmove(remote, local, length)
            if handle.notification:
                inbox.append((self._name, handle.notification))
        return True

    def release(self, handle: _Write) -> None:
        """Do nothing: a handle holds nothing."""

    def notify(self, peer: Peer, payload: bytes) -> None:
        with self._fabric.lock:
            inbox = self._fabric.inbox(peer.name)
            if inbox is None:
                raise TransferError(f"{peer.name} has left")
            if not self._fabric.stalled(self._name, peer.name):
                inbox.append((self._name, payload))

    def receive(self) -> list[tuple[str, bytes]]:
        with self._fabric.lock:
            inbox = self._fabric.inbox(self._name)
            if inbox is None or self._fabric.stalled(self._name):
                return []
            received = list(inbox)
            inbox.clear()
        return received

    def close(self) -> None:
        self._fabric.leave(self._name)
