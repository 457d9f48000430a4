"""A node with its real actors: NATS, control, and data processes on real NIXL agents over a worker's shared memory."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from node_support import Nodes, NodeUnderTest, all_end, eventually, make_profile, shared_files

from kvflow.bus.connect import connect_bus
from kvflow.config import Settings
from kvflow.directory import Directory
from kvflow.messages import Attached, AttachRefused, EngineCard, EngineRef

pytestmark = [pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(180)]

CONTROL_RSS_LIMIT = 120 * 1024 * 1024
WAIT_S = 30.0


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    started = Nodes(tmp_path)
    yield started
    started.close()


@asynccontextmanager
async def _directory(node: NodeUnderTest) -> AsyncIterator[Directory]:
    settings = Settings(nats_url=node.ready["nats_url"], cluster=node.ready["cluster"], card_ttl_s=3.0)
    bus = await connect_bus(settings, name="test")
    directory = Directory(bus, settings)
    try:
        await directory.watch(lambda _change: None)
        yield directory
    finally:
        await directory.close()
        await bus.close()


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the directory is looked at from outside
            await anyio.sleep(0.02)


async def _card(directory: Directory, engine: EngineRef, *, other_than: str = "") -> EngineCard:
    key = (engine, 0)
    await _until(lambda: key in directory.cards and directory.cards[key].agent != other_than)
    return directory.cards[key]


@pytest.mark.anyio
async def test_attached_means_that_the_card_is_in_the_directory_and_it_goes_with_the_worker(nodes: Nodes) -> None:
    node = await anyio.to_thread.run_sync(lambda: nodes.up("--card-ttl-s", "3", fake=False))
    worker = nodes.worker(node)
    engine = worker.profile.engine
    assert isinstance(await anyio.to_thread.run_sync(worker.attach), Attached)
    async with _directory(node) as directory:
        card = await _card(directory, engine)
        assert card.placement == "process"
        assert card.profile == worker.profile
        assert card.segments[0].length == os.fstat(worker.memory).st_size
        (data,) = [child for child in node.family() if "transfer" in child.cmdline()]
        data.send_signal(signal.SIGKILL)
        again = await _card(directory, engine, other_than=card.agent)
        assert again.profile == worker.profile
        worker.socket.close()
        await _until(lambda: (engine, 0) not in directory.cards)
    assert await anyio.to_thread.run_sync(node.stop) == 0
    assert not node.runtime.exists()


def test_a_backend_that_is_not_there_is_told_to_the_worker(nodes: Nodes) -> None:
    node = nodes.up("--nixl-backend", "NOSUCH", fake=False)
    worker = nodes.worker(node)
    worker.send()
    answer = worker.receive()
    assert isinstance(answer, AttachRefused)
    assert "NOSUCH" in answer.reason
    assert node.process.poll() is None
    assert node.stop() == 0


def test_a_card_that_makes_no_sense_is_told_to_the_worker(nodes: Nodes) -> None:
    node = nodes.up(fake=False)
    profile = make_profile()
    view = profile.geometry.views[0]
    wide = type(view)(**{name: getattr(view, name) for name in view.__struct_fields__} | {"blocks": 1 << 40})
    geometry = type(profile.geometry)(
        dtype=profile.geometry.dtype, num_blocks=1 << 40, groups=profile.geometry.groups, views=(wide,)
    )
    hostile = type(profile)(
        **{name: getattr(profile, name) for name in profile.__struct_fields__} | {"geometry": geometry}
    )
    worker = nodes.worker(node, hostile)
    worker.send()
    assert isinstance(worker.receive(), AttachRefused)
    assert isinstance(nodes.worker(node).attach(), Attached)
    assert node.stop() == 0


def test_control_is_small(nodes: Nodes) -> None:
    pytest.importorskip("kvflow.actors.control")
    node = nodes.up(fake=False)
    rss = psutil.Process(node.pids["control"]).memory_info().rss
    assert rss < CONTROL_RSS_LIMIT, f"{rss / 2**20:.0f} MiB"
    assert node.stop() == 0


def test_a_killed_node_leaves_nothing_with_real_agents(nodes: Nodes) -> None:
    node = nodes.up(fake=False)
    assert isinstance(nodes.worker(node).attach(), Attached)
    family = node.family()
    shared = shared_files(family)
    node.process.kill()
    all_end(family)
    eventually(lambda: not node.runtime.exists())
    assert not [file for file in shared if file.exists()]
