"""The NIXL adapter: the only module that imports nixl.

What NIXL guarantees, and what follows from it (1.5, UCX backend):
- A WRITE's notification is sent after its remote flush, so the bytes are visible when it arrives; `DONE` follows it.
- Nothing progresses by itself when the progress thread is off: `check_xfer_state` and `get_new_notifs` drive it, at the
  target as well.
- Releasing a handle in progress cancels what UCX has queued and succeeds, but is no fence: accepted writes may still
  land. A vanished peer ends in a disconnect error or in silence. `owner.py` therefore disconnects and waits.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from kvflow.config import Settings
from kvflow.dataplane.agent import DrivenAgent
from kvflow.dataplane.memory import MemoryRange
from kvflow.dataplane.owner import Batch, Peer
from kvflow.dataplane.port import AgentSink
from kvflow.errors import TransferError
from kvflow.messages import KvSegment

log = structlog.get_logger()


class NixlAgent(DrivenAgent):
    """Move bytes with NIXL."""

    def __init__(
        self,
        name: str,
        ranges: Sequence[MemoryRange],
        sink: AgentSink,
        *,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
    ) -> None:
        """Start a NIXL agent over the ranges; blocks while NIXL registers them. Raises TransferError."""
        super().__init__(
            name, ranges, sink, NixlDriver(name, settings), engine="nixl", loop=loop, settings=settings
        )  # fmt: skip


class NixlDriver:
    """Call NIXL; every method runs on the owner thread."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._backend = settings.nixl_backend
        self._progress_thread = settings.nixl_progress_thread
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = (RuntimeError,)
        self._registered: Any = None
        self._segments: tuple[KvSegment, ...] = ()

    def open(self, segments: Sequence[KvSegment]) -> bytes:
        """Start the agent, register memory and return NIXL's metadata."""
        # NIXL writes every agent and backend to stderr unless told otherwise before it is loaded.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl import _api as nixl
        except ImportError as error:
            raise TransferError(
                f"NIXL cannot be imported: {error}", remedy="install it: pip install 'kvflow[nixl]'"
            ) from error
        # NIXL's exceptions have no common base below Exception.
        self._errors = (
            RuntimeError,
            *(item for item in vars(nixl.nixlBind).values() if isinstance(item, type) and issubclass(item, Exception)),
        )
        self._segments = tuple(segments)
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=self._progress_thread, backends=[self._backend])
            agent = nixl.nixl_agent(self._name, config)
            if self._backend not in agent.backends:
                known = ", ".join(agent.plugin_list)
                raise TransferError(
                    f"NIXL has no backend {self._backend}", remedy=f"set nixl_backend to one of: {known}"
                )
            self._agent = agent
            regions = [(item.address, item.length, item.device, "") for item in segments]
            self._registered = self._agent.register_memory(regions, segments[0].memory, [self._backend])
            return cast("bytes", self._agent.get_agent_metadata())
        except self._errors as error:
            self.close()
            raise TransferError(
                f"NIXL backend {self._backend} cannot serve this memory: {error!r}",
                remedy="run `kvflow doctor`; check UCX_TLS, memory limits (ulimit -l) and the GPU driver",
            ) from error

    def connect(self, peer: Peer) -> None:
        """Load a peer's metadata and send an empty notification, which makes UCX establish the connection."""
        try:
            name = self._agent.add_remote_agent(peer.blob)
            found = name.decode() if isinstance(name, bytes) else str(name)
            if found != peer.name:
                self._agent.remove_remote_agent(found)
                raise TransferError(f"NIXL metadata of {peer.name} belongs to {found}")
            self._agent.send_notif(peer.name, b"")
        except self._errors as error:
            raise TransferError(
                f"NIXL refused the metadata of {peer.name}: {error!r}",
                remedy="both sides need the same NIXL version and a backend in common",
            ) from error

    def disconnect(self, peer: Peer) -> None:
        """Invalidate the peer, which closes its endpoint."""
        try:
            self._agent.remove_remote_agent(peer.name)
        except self._errors as error:
            # Usual after a remote disconnect: NIXL has dropped the peer by itself.
            log.debug("nixl_disconnect", peer=peer.name, error=repr(error))

    def prepare(self, peer: Peer, batch: Batch, notification: bytes) -> Any:
        """Create the transfer request of one piece."""
        runs = batch.runs
        local = _descriptors(runs.local, runs.length, batch.local_segment, self._segments)
        remote = _descriptors(runs.remote, runs.length, batch.remote_segment, peer.segments)
        try:
            return self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, self._segments[0].memory),
                self._agent.get_xfer_descs(remote, peer.segments[0].memory),
                peer.name,
                notification,
                [self._backend],
            )
        except self._errors as error:
            raise TransferError(f"NIXL cannot prepare a WRITE to {peer.name}: {error!r}") from error

    def post(self, handle: Any) -> bool:
        """Post a transfer request; return whether it is done already."""
        try:
            return _done(self._agent.transfer(handle))
        except self._errors as error:
            raise TransferError(f"NIXL failed to post a WRITE: {error!r}") from error

    def poll(self, handle: Any) -> bool:
        """Drive progress and return whether the request is done."""
        try:
            return _done(self._agent.check_xfer_state(handle))
        except self._errors as error:
            raise TransferError(f"NIXL failed a WRITE: {error!r}") from error

    def release(self, handle: Any) -> None:
        """Free a request, cancelling it when it is in progress."""
        try:
            handle.release()
        except self._errors as error:
            # NIXL keeps such a handle and frees it with the agent.
            log.warning("nixl_release", agent=self._name, error=repr(error))

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a notification."""
        try:
            self._agent.send_notif(peer.name, payload)
        except self._errors as error:
            raise TransferError(f"NIXL cannot notify {peer.name}: {error!r}") from error

    def receive(self) -> list[tuple[str, bytes]]:
        """Drive progress and return new notifications."""
        try:
            found = self._agent.get_new_notifs([self._backend])
        except self._errors as error:
            raise TransferError(f"NIXL cannot read notifications: {error!r}") from error
        return [(peer, payload) for peer, payloads in found.items() for payload in payloads]

    def close(self) -> None:
        """Deregister memory and destroy the agent."""
        if self._agent is not None and self._registered is not None:
            try:
                self._agent.deregister_memory(self._registered, [self._backend])
            except self._errors as error:
                log.warning("nixl_deregister", agent=self._name, error=repr(error))
        self._registered = None
        self._agent = None


def _done(state: str) -> bool:
    if state == "ERR":
        raise TransferError("NIXL reports a failed WRITE")
    return state == "DONE"


def _descriptors(
    addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], index: NDArray[np.intp], segments: Sequence[KvSegment]
) -> NDArray[np.uint64]:
    """Return NIXL's (address, length, device) rows."""
    table = np.empty((len(addresses), 3), dtype=np.uint64)
    table[:, 0] = addresses
    table[:, 1] = lengths
    table[:, 2] = np.array([segment.device for segment in segments], dtype=np.uint64)[index]
    return table
