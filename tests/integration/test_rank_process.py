"""Rank actors in processes of their own: shared memory by descriptor, real NATS, real NIXL; and one of them killed."""

import contextlib
import os
import secrets
import select
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from rank_support import Conductor, FakeEngine, content, eventually
from rank_support import test_settings as make_settings

from kvflow.bus.connect import connect_bus
from kvflow.config import Settings
from kvflow.messages import Subjects, TransferCompleted, TransferDelivered, TransferErrored

pytestmark = [pytest.mark.anyio, pytest.mark.nats, pytest.mark.nixl]

SCRIPT = Path(__file__).with_name("rank_process.py")


@contextlib.contextmanager
def rank_process(engine: FakeEngine, settings: Settings) -> Iterator[psutil.Popen]:
    """Start the engine's rank 0 in a process and wait until it is ready."""
    fd = engine.segments[0].fd
    told, tell = os.pipe()
    command = [
        sys.executable,
        str(SCRIPT),
        msgspec.json.encode(engine.profile(0)).decode(),
        msgspec.json.encode(settings).decode(),
        str(engine.segments[0].length),
        str(fd),
        str(tell),
    ]
    process = psutil.Popen(command, pass_fds=[fd, tell])
    os.close(tell)
    try:
        assert select.select([told], [], [], 60)[0], "not ready in time"
        assert os.read(told, 5) == b"ready", "the process ended"
        yield process
    finally:
        process.kill()
        process.wait(10)
        os.close(told)


@pytest.fixture
def settings(nats_url: str) -> Settings:
    pytest.importorskip("nixl._api")
    return make_settings(f"proc-{secrets.token_hex(4)}", nats_url=nats_url, card_ttl_s=1.5)


@pytest.fixture
def pair() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    source, target = FakeEngine("p", roles=("source",), seed=1), FakeEngine("d", roles=("target",), seed=2)
    yield source, target
    source.close()
    target.close()


async def test_bytes_cross_between_processes_and_idle_ones_cost_no_cpu(
    settings: Settings, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    source, target = pair
    bus = await connect_bus(settings, name="test")
    conductor = Conductor(bus, Subjects(settings.cluster))
    await conductor.listen(target)
    kv = content(1, 150)
    mine, theirs = source.allocate(150), target.allocate(149)
    source.write(0, kv, mine, 0, 150)
    with rank_process(target, settings) as writer, rank_process(source, settings) as reader:
        await anyio.sleep(1.0)
        waits = []
        for number in range(20):
            name = f"t{number}"
            target.caches[0][:] = 0
            await conductor.opened(source, name, 150)
            await conductor.bound(source, target, name, theirs, 0, 149, request_id=name)
            await conductor.progress(source, name, mine[:5], 80)
            await anyio.sleep(0.02)
            began = time.monotonic()
            await conductor.progress(source, name, mine, 150, known=5, last=True)
            await conductor.closed(source, name)
            await eventually(lambda name=name: len(conductor.of(TransferCompleted, name)) == 2)  # type: ignore[misc]
            waits.append(time.monotonic() - began)
            target.assert_holds(kv, theirs, 0, 149)
            await conductor.released(source, name)
        assert len(conductor.of(TransferDelivered)) == 20
        # A bound far above the milliseconds that it takes, for slow machines.
        assert statistics.median(waits) < 5.0
        await anyio.sleep(1.5)
        before = [sum(process.cpu_times()[:2]) for process in (writer, reader)]
        await anyio.sleep(2.0)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip((writer, reader), before, strict=True)]
        assert max(used) < 0.1, "I8: idle actors use no CPU"
    await bus.close()


async def test_i4_a_killed_target_process_fails_its_bindings(
    settings: Settings, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    source, target = pair
    bus = await connect_bus(settings, name="test")
    conductor = Conductor(bus, Subjects(settings.cluster))
    await conductor.listen(target)
    kv = content(2, 150)
    mine, theirs = source.allocate(150), target.allocate(149)
    source.write(0, kv, mine, 0, 150)
    with rank_process(source, settings):
        with rank_process(target, settings) as killed:
            await conductor.opened(source, "t", 150)
            await conductor.bound(source, target, "t", theirs, 0, 149)
            await conductor.progress(source, "t", mine[:5], 80)
            await anyio.sleep(0.5)
            killed.kill()
            await eventually(lambda: conductor.of(TransferErrored))
            assert conductor.of(TransferErrored)[0].reason == "target_lost"
        # Restarted by its supervisor, the same engine has a new agent and can be bound again.
        with rank_process(target, settings):
            target.caches[0][:] = 0
            await conductor.bound(source, target, "t", theirs, 0, 149, binding=2)
            await conductor.progress(source, "t", mine, 150, known=5, last=True)
            await conductor.closed(source, "t")
            await eventually(lambda: len(conductor.of(TransferCompleted)) == 2)
            target.assert_holds(kv, theirs, 0, 149)
    await bus.close()


async def test_i4_a_restarted_source_process_reports_what_it_no_longer_knows(
    settings: Settings, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    source, target = pair
    bus = await connect_bus(settings, name="test")
    conductor = Conductor(bus, Subjects(settings.cluster))
    await conductor.listen(target)
    mine, theirs = source.allocate(150), target.allocate(149)
    with rank_process(target, settings):
        with rank_process(source, settings):
            await conductor.progress(source, "t", mine[:5], 80)
            await bus.flush()
        with rank_process(source, settings):
            await conductor.bound(source, target, "t", theirs, 0, 149)
            await conductor.progress(source, "t", mine, 150, known=5, last=True)
            await eventually(lambda: conductor.of(TransferErrored))
            assert "5" in conductor.of(TransferErrored)[0].detail
            assert not target.caches[0].any()
    await bus.close()
