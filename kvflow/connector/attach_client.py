"""Hand a rank's KV memory to the node of this host, and stay attached: placement `process`.

The socket carries frames of a u32 little-endian length and a message; the file descriptors of the memory travel with
the first bytes. The open connection says that the worker lives; its end says that no actor has the memory any more.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from kvflow.dataplane.memory import MemoryRange
from kvflow.errors import KvflowError, PeerError, WireError
from kvflow.messages import AttachEngine, AttachRefused, EngineProfile, decode, encode
from kvflow.messages.codec import MAX_MESSAGE_BYTES, AnyMessage

log = structlog.get_logger()

HEADER = struct.Struct("<I")
SEND_TIMEOUT_S = 10.0
# The node maps and registers the memory and starts processes before it answers; registering much memory takes long.
ANSWER_TIMEOUT_S = 300.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0
# A node that was asked to let go stops a data process, for which its `stop_grace_s` is enough.
LET_GO_S = 30.0


class AttachClient:
    """Attach one rank to the node, and again whenever the node comes back."""

    def __init__(
        self, path: Path, profile: EngineProfile, memory: Sequence[MemoryRange], may_attach: asyncio.Event
    ) -> None:
        """Prepare; `memory` is shared memory, whose descriptors must stay open while the client runs.

        Nothing is attached before `may_attach` is set.
        """
        self._may_attach = may_attach
        self._path = path
        self._request = AttachEngine(profile=profile, segment_lengths=tuple(item.length for item in memory))
        self._descriptors = [item.fd for item in memory]
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._socket: socket.socket | None = None
        self._detached_since: float | None = time.monotonic()
        self.attached = False

    def detached_for(self) -> float:
        """Return for how many seconds no actor has had the memory (any thread)."""
        since = self._detached_since
        return 0.0 if since is None else time.monotonic() - since

    def fence(self) -> None:
        """Ask the node to let go of the memory, and stay away until `resume` (event loop).

        It counts as attached until the node has closed its end, since until then a data process may write.
        """
        self._allowed.clear()
        if self._socket is not None:
            _half_close(self._socket)

    def resume(self) -> None:
        """Attach again (event loop)."""
        self._allowed.set()

    async def run(self) -> None:
        """Attach for ever, until cancelled."""
        await self._may_attach.wait()
        delay, told = FIRST_RETRY_S, ""
        while True:
            await self._allowed.wait()
            try:
                await self._attach_once()
            except (OSError, KvflowError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
                if problem != told:  # once per kind of trouble, not once per attempt
                    told = problem
                    log.warning(
                        "attach_waits", socket=str(self._path), problem=problem,
                        remedy=getattr(error, "remedy", "") or "start `kvflow up` on this host as the same user",
                    )  # fmt: skip
            else:
                delay, told = FIRST_RETRY_S, ""
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_S)

    async def _attach_once(self) -> None:
        """Attach, and return when the attachment has ended."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await loop.sock_connect(connection, str(self._path))
                if not self._allowed.is_set():
                    return  # fenced meanwhile
                # From the first byte on the node may map the memory.
                self._socket, self._detached_since = connection, None
                await self._send_request(connection)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await _receive(connection)
            if isinstance(answer, AttachRefused):
                raise PeerError(f"the node refused this engine: {answer.reason}", remedy=answer.remedy)
            self.attached = True
            log.info("attached", engine=str(self._request.profile.engine), rank=self._request.profile.rank)
            await self._wait_for_end(connection)
            log.warning("detached", engine=str(self._request.profile.engine), rank=self._request.profile.rank)
        except (OSError, KvflowError, TimeoutError):
            if self._detached_since is None:  # the node may have the memory all the same
                _half_close(connection)
                await self._wait_for_end(connection, leaving=True)
            raise
        finally:
            connection.close()
            self._socket, self.attached = None, False
            if self._detached_since is None:
                self._detached_since = time.monotonic()

    async def _send_request(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        content = encode(self._request)
        if len(content) > MAX_MESSAGE_BYTES:
            raise WireError(
                f"the description of this engine's cache takes {len(content)} bytes, too many for one frame"
            )
        frame = HEADER.pack(len(content)) + content
        # A fresh socket's buffer always takes a few bytes, so this cannot block.
        sent = socket.send_fds(connection, [frame[: HEADER.size]], self._descriptors)
        await loop.sock_sendall(connection, frame[sent:])

    async def _wait_for_end(self, connection: socket.socket, *, leaving: bool = False) -> None:
        """Return when node and data process have gone, which hold the other end; what they still say is not needed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(LET_GO_S):
                    if not await loop.sock_recv(connection, 4096):
                        return
            except TimeoutError:
                if leaving or not self._allowed.is_set():
                    log.error(
                        "node_does_not_let_go", engine=str(self._request.profile.engine),
                        rank=self._request.profile.rank, remedy="stop `kvflow up` on this host",
                    )  # fmt: skip
            except ConnectionError as error:
                log.info("attachment_reset", error=str(error))
                return


def _half_close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the node has gone: reading tells so
        connection.shutdown(socket.SHUT_WR)


async def _receive(connection: socket.socket) -> AnyMessage:
    (length,) = HEADER.unpack(await _receive_exactly(connection, HEADER.size))
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise WireError(f"an answer of {length} bytes is not between 1 and {MAX_MESSAGE_BYTES}")
    return decode(await _receive_exactly(connection, length))


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    content = b""
    while len(content) < size:
        piece = await loop.sock_recv(connection, size - len(content))
        if not piece:
            raise PeerError("the node closed the connection before it answered", remedy="see the node's log")
        content += piece
    return content
