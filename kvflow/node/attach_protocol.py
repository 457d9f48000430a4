"""Frames and file descriptors on the attach socket, the node's side. Everything a client sends is checked and bounded.

A frame is a u32 little-endian length and one message. The descriptors come with the first bytes of the first frame.
"""

import array
import os
import socket
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import anyio

from kvflow.errors import ConfigError, KvflowError, PeerError, WireError
from kvflow.ids import check_id
from kvflow.messages import AttachEngine, AttachRefused, EngineProfile, Message, decode, encode
from kvflow.messages.codec import MAX_MESSAGE_BYTES

MAX_SEGMENTS = 128
MAX_RANKS = 65_536
HEADER = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(slots=True)
class AttachRequest:
    """Hold what a worker sent: its message and the descriptors of its memory, which the holder has to close."""

    message: AttachEngine
    fds: list[int] = field(default_factory=list)

    @property
    def profile(self) -> EngineProfile:
        """Return the profile of the engine rank."""
        return self.message.profile

    def close(self) -> None:
        """Close the descriptors."""
        close_fds(self.fds)


def check_peer(client: socket.socket) -> int:
    """Return the client's process id; raise PeerError unless it runs as our user."""
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _gid = CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise PeerError(
            f"user {uid} may not attach to a node of user {os.getuid()}",
            remedy="run the engine and the node as the same user",
        )
    return int(pid)


async def receive_request(client: socket.socket, timeout_s: float) -> AttachRequest:
    """Read and check an attach request; raise WireError or PeerError, having closed every descriptor received."""
    fds: list[int] = []
    try:
        with anyio.fail_after(timeout_s):
            content = await _receive_frame(client, fds)
        message = decode(content)
        if not isinstance(message, AttachEngine):
            raise WireError(f"expected AttachEngine, got {type(message).__name__}")
        _check_profile(message.profile)
        _check_memory(message, fds)
    except TimeoutError:
        close_fds(fds)
        raise WireError(f"no complete attach request within {timeout_s:g} s") from None
    except BaseException:
        close_fds(fds)
        raise
    return AttachRequest(message, fds)


async def send_message(client: socket.socket, message: Message, timeout_s: float) -> None:
    """Send one frame; raise WireError when the client does not take it in time or has gone."""
    content = encode(message)
    view = memoryview(HEADER.pack(len(content)) + content)
    try:
        with anyio.fail_after(timeout_s):
            while view:
                await anyio.wait_writable(client)
                try:
                    view = view[client.send(view, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    continue
    except TimeoutError:
        raise WireError(f"the client did not read an answer within {timeout_s:g} s") from None
    except OSError as error:
        raise WireError(f"the client has gone: {error.strerror}") from error


async def wait_for_end(client: socket.socket) -> str:
    """Wait until the client goes, and say how. Nothing may be sent after the request: that ends the attachment too."""
    while True:
        await anyio.wait_readable(client)
        try:
            return "unexpected data" if client.recv(1) else "closed"
        except BlockingIOError:
            continue
        except OSError as error:
            return error.strerror or "error"


def refusal(error: KvflowError) -> AttachRefused:
    """Return the message that tells a client why it cannot attach."""
    return AttachRefused(reason=error.message, remedy=error.remedy)


def close_fds(fds: list[int]) -> None:
    """Close descriptors and forget them."""
    while fds:
        os.close(fds.pop())


async def _receive_frame(client: socket.socket, fds: list[int]) -> bytes:
    buffer = bytearray()
    needed = HEADER.size
    while len(buffer) < needed:
        chunk = await _receive_some(client, needed - len(buffer), fds)
        if not chunk:
            raise WireError("the client closed the connection within its request")
        buffer += chunk
        if len(buffer) == HEADER.size == needed:
            (length,) = HEADER.unpack(buffer)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise WireError(f"a request of {length} bytes is not between 1 and {MAX_MESSAGE_BYTES}")
            needed += length
    return bytes(buffer[HEADER.size :])


async def _receive_some(client: socket.socket, size: int, fds: list[int]) -> bytes:
    room = socket.CMSG_SPACE((MAX_SEGMENTS + 1) * 4)
    while True:
        await anyio.wait_readable(client)
        try:
            # Close-on-exec, so that no other child inherits an engine's memory.
            data, ancillary, flags, _ = client.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        except OSError as error:
            raise WireError(f"the client has gone: {error.strerror}") from error
        fds.extend(_descriptors(ancillary))
        if flags & socket.MSG_CTRUNC or len(fds) > MAX_SEGMENTS:
            raise WireError(f"more than {MAX_SEGMENTS} file descriptors came along")
        return data


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _check_profile(profile: EngineProfile) -> None:
    try:
        check_id(profile.engine.engine_id, "engine_id")
        check_id(profile.engine.incarnation, "incarnation")
    except ConfigError as error:
        raise WireError(error.message) from error
    if not 0 <= profile.rank < profile.ranks <= MAX_RANKS:
        raise WireError(f"rank {profile.rank} of {profile.ranks} is out of range")
    if not profile.roles or len(set(profile.roles)) != len(profile.roles):
        raise WireError(
            f"roles {list(profile.roles)} name no work",
            remedy="give the engine the role source, target or both",
        )


def _check_memory(message: AttachEngine, fds: list[int]) -> None:
    lengths = message.segment_lengths
    if not lengths or len(lengths) != len(fds):
        raise WireError(f"{len(lengths)} segments were announced and {len(fds)} file descriptors came along")
    for number, (length, descriptor) in enumerate(zip(lengths, fds, strict=True)):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise WireError(
                f"the descriptor of segment {number} is not memory that can be mapped",
                remedy="share KV memory as a memfd or a /dev/shm file",
            )
        if not 0 < length <= found.st_size:
            raise WireError(f"segment {number} should have {length} bytes, its file has {found.st_size}")
    for view in message.profile.geometry.views:
        if not 0 <= view.segment < len(fds):
            raise WireError(f"layer {view.layer!r} lies in segment {view.segment}, but only {len(fds)} came along")
