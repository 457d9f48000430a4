"""The attach client against a node that answers, refuses, goes away, or says nonsense."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

from kvflow.connector import attach_client
from kvflow.connector.attach_client import AttachClient
from kvflow.dataplane.memory import SharedSegment, create_shared, map_shared
from kvflow.messages import (
    Attached,
    AttachEngine,
    AttachRefused,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    Message,
    ModelFingerprint,
    decode,
    encode,
)

pytestmark = pytest.mark.anyio

HEADER = struct.Struct("<I")
PROFILE = EngineProfile(
    engine=EngineRef(engine_id="engine", incarnation="one"), rank=0, ranks=1, tp_rank=0, tp_size=1, pp_rank=0,
    pp_size=1, roles=("source",), host="host", model="model",
    geometry=KvGeometry(dtype="bfloat16", num_blocks=1, groups=(KvGroup(block_tokens=16),), views=()),
    fingerprint=ModelFingerprint(fields=()),
)  # fmt: skip
WELCOME = Attached(nats_url="nats://there", cluster="default")


class Node:
    """Take attachments on a socket, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener: socket.socket | None = None

    def open(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self.path))
        self._listener.listen()

    async def take(self, answer: bytes) -> tuple[socket.socket, AttachEngine, list[int]]:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            client, _ = await loop.sock_accept(self._listener)
            while True:
                try:
                    head, fds, _, _ = socket.recv_fds(client, HEADER.size, 8)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
            (length,) = HEADER.unpack(head)
            content = b""
            while len(content) < length:
                content += await loop.sock_recv(client, length - len(content))
            message = decode(content)
            assert isinstance(message, AttachEngine)
            await loop.sock_sendall(client, answer)
        return client, message, fds

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def frame(message: Message) -> bytes:
    content = encode(message)
    return HEADER.pack(len(content)) + content


async def eventually(condition: Callable[[], bool]) -> None:

    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing sets an event for us
            await asyncio.sleep(0.01)


@pytest.fixture
async def segment() -> AsyncIterator[SharedSegment]:
    with create_shared(8192) as made:
        yield made


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "node.sock")
    yield made
    made.close()


@pytest.fixture
async def client(node: Node, segment: SharedSegment) -> AsyncIterator[AttachClient]:
    may_attach = asyncio.Event()
    may_attach.set()
    made = AttachClient(node.path, PROFILE, [segment.range], may_attach)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.wait([task])


async def test_memory_arrives_with_the_request(node: Node, client: AttachClient, segment: SharedSegment) -> None:
    assert client.detached_for() > 0
    node.open()
    connection, request, fds = await node.take(frame(WELCOME))
    assert request == AttachEngine(profile=PROFILE, segment_lengths=(8192,))
    (descriptor,) = fds
    with map_shared(descriptor, 8192) as mapped:
        segment.view[100] = 42
        assert mapped.view[100] == 42
    os.close(descriptor)
    await eventually(lambda: client.attached)
    assert client.detached_for() == 0
    connection.close()


async def test_i4_client_attaches_again_after_the_node_went_away(node: Node, client: AttachClient) -> None:
    node.open()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    connection.close()
    node.close()
    await eventually(lambda: not client.attached)
    assert client.detached_for() > 0
    node.open()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        frame(AttachRefused(reason="no room", remedy="make some")), b"", HEADER.pack(1 << 31), HEADER.pack(0),
        HEADER.pack(4) + b"\xc1\xc1\xc1\xc1",
    ],
    ids=["refused", "closed", "huge", "empty", "nonsense"],
)  # fmt: skip
async def test_i7_bad_answers_are_survived(node: Node, client: AttachClient, answer: bytes) -> None:
    node.open()
    connection, _, fds = await node.take(answer)
    os.close(fds[0])
    connection.close()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    connection.close()


async def test_i2_fenced_client_lets_go_and_stays_away_until_resumed(node: Node, client: AttachClient) -> None:
    node.open()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    client.fence()
    assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    await asyncio.sleep(0.1)
    assert client.detached_for() == 0  # the data process may still write
    connection.close()
    await eventually(lambda: client.detached_for() > 0)
    await asyncio.sleep(0.6)
    assert not client.attached
    client.resume()
    again, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    again.close()


async def test_i2_node_that_keeps_the_memory_is_told_of_and_waited_for(
    node: Node, client: AttachClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_client, "LET_GO_S", 0.05)
    node.open()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    with structlog.testing.capture_logs() as logs:
        client.fence()
        await eventually(lambda: any(entry["event"] == "node_does_not_let_go" for entry in logs))
    assert client.detached_for() == 0
    connection.close()
    await eventually(lambda: client.detached_for() > 0)


@pytest.mark.parametrize("answer", [HEADER.pack(1 << 31), b""], ids=["nonsense", "silence"])
async def test_i2_node_that_failed_to_answer_may_have_the_memory_until_it_closes(
    node: Node, client: AttachClient, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(attach_client, "ANSWER_TIMEOUT_S", 0.05)
    node.open()
    connection, _, fds = await node.take(answer)
    os.close(fds[0])
    assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    await asyncio.sleep(0.1)
    assert client.detached_for() == 0
    connection.close()
    await eventually(lambda: client.detached_for() > 0)


async def test_i2_fence_while_it_connects_keeps_the_memory_here(
    node: Node, client: AttachClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    connect, connecting, go_on = loop.sock_connect, asyncio.Event(), asyncio.Event()

    async def slowly(connection: socket.socket, address: str) -> None:
        await connect(connection, address)
        connecting.set()
        await go_on.wait()

    monkeypatch.setattr(loop, "sock_connect", slowly)
    node.open()
    await asyncio.wait_for(connecting.wait(), 10)
    client.fence()
    go_on.set()
    with pytest.raises((TimeoutError, struct.error)):
        await asyncio.wait_for(node.take(frame(WELCOME)), 0.6)
    assert client.detached_for() > 0
    client.resume()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    connection.close()


async def test_i2_fence_of_a_connection_that_has_ended_does_not_raise(node: Node, client: AttachClient) -> None:
    node.open()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    await eventually(lambda: client.attached)
    connection.close()
    client.fence()
    client.fence()
    await eventually(lambda: client.detached_for() > 0)


async def test_nothing_is_attached_before_it_may_be(node: Node, segment: SharedSegment) -> None:
    may_attach = asyncio.Event()
    client = AttachClient(node.path, PROFILE, [segment.range], may_attach)
    node.open()
    task = asyncio.create_task(client.run())
    await asyncio.sleep(0.2)
    assert client.detached_for() > 0
    may_attach.set()
    connection, _, fds = await node.take(frame(WELCOME))
    os.close(fds[0])
    connection.close()
    task.cancel()
    await asyncio.wait([task])
