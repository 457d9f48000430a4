"""NIXL agents in two processes: bytes before notifications, and peers that die."""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvflow.config import Settings
from kvflow.dataplane.memory import SharedSegment, create_shared
from kvflow.dataplane.nixl_agent import NixlAgent
from kvflow.dataplane.port import AgentEvent, PieceDone, PieceFailed, Runs

pytestmark = pytest.mark.nixl

SIZE = 4 << 20
RUN = 2048


@dataclass
class Target:
    """The other process."""

    process: "subprocess.Popen[str]"
    address: int
    peer: str

    async def line(self, timeout_s: float = 30.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), timeout_s)
        assert text, "the target process ended"
        found = json.loads(text)
        assert isinstance(found, dict)
        return found


@dataclass
class Source:
    """This process's agent."""

    agent: NixlAgent
    memory: SharedSegment
    events: "asyncio.Queue[AgentEvent]"

    def scattered(self, target: Target, seed: int) -> Runs:
        """Return runs of RUN bytes that cover everything, in another order on each side."""
        random = np.random.default_rng(seed)
        local, remote = (random.permutation(SIZE // RUN).astype(np.uint64) * np.uint64(RUN) for _ in range(2))
        return Runs(
            local=local + np.uint64(self.agent.segments[0].address),
            remote=remote + np.uint64(target.address),
            length=np.full(len(local), RUN, dtype=np.uint64),
        )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", os.environ.get("UCX_TLS", "tcp,self"))
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")


def start_target(settings: Settings) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("nixl_target.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(SIZE), str(settings.poll_interval_s), uuid.uuid4().hex],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@asynccontextmanager
async def two_processes(settings: Settings) -> AsyncIterator[tuple[Source, Target]]:
    process = start_target(settings)
    memory = create_shared(SIZE)
    events: asyncio.Queue[AgentEvent] = asyncio.Queue()
    name = f"source-{uuid.uuid4().hex}"
    agent = NixlAgent(name, [memory.range], events.put_nowait, loop=asyncio.get_running_loop(), settings=settings)
    try:
        target = Target(process, 0, "")
        hello = await target.line()
        target.address = int(hello["address"])
        target.peer = await agent.add_peer(bytes.fromhex(hello["metadata"]))
        yield Source(agent, memory, events), target
    finally:
        await agent.close()
        memory.close()
        if process.poll() is None:
            process.communicate("", timeout=60)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def test_i5_every_byte_is_there_when_the_notification_arrives() -> None:
    async def scenario() -> None:
        async with two_processes(Settings()) as (source, target):
            for number in range(1, 21):
                source.memory.view[:] = number
                plan = source.scattered(target, number)
                source.agent.write(number, target.peer, lambda plan=plan: plan, notification=f"fill:{number}".encode())  # type: ignore[misc]
                heard = await target.line()
                assert heard["payload"] == f"fill:{number}"
                assert heard["arrived"]
                done = await asyncio.wait_for(source.events.get(), 30)
                assert isinstance(done, PieceDone)
                assert done.bytes_done == SIZE

    asyncio.run(scenario())


def test_i5_a_separate_notification_follows_the_pieces_that_were_reported_done() -> None:
    async def scenario() -> None:
        async with two_processes(Settings()) as (source, target):
            for number in range(1, 11):
                source.memory.view[:] = number
                plan = source.scattered(target, number)
                half = len(plan) // 2
                for piece, part in enumerate((slice(0, half), slice(half, None))):
                    runs = Runs(local=plan.local[part], remote=plan.remote[part], length=plan.length[part])
                    source.agent.write(piece, target.peer, lambda runs=runs: runs)  # type: ignore[misc]
                for _ in range(2):
                    assert isinstance(await asyncio.wait_for(source.events.get(), 30), PieceDone)
                source.agent.notify(target.peer, f"fill:{number}".encode())
                assert (await target.line())["arrived"]

    asyncio.run(scenario())


def test_i4_a_killed_peer_fails_its_pieces_in_bounded_time() -> None:
    async def scenario() -> None:
        settings = Settings(transfer_wait_s=2.0, quarantine_s=0.2, stop_grace_s=1.0)
        async with two_processes(settings) as (source, target):
            plan = source.scattered(target, 1)
            source.agent.write(1, target.peer, lambda: plan, notification=b"fill:0")
            assert isinstance(await asyncio.wait_for(source.events.get(), 30), PieceDone)
            target.process.kill()
            target.process.wait(30)
            began = time.monotonic()
            for piece in range(2, 5):
                source.agent.write(piece, target.peer, lambda: plan, notification=b"fill:0")
            for _ in range(3):
                failed = await asyncio.wait_for(source.events.get(), 30)
                assert isinstance(failed, PieceFailed), failed
            assert time.monotonic() - began < 8

    asyncio.run(scenario())


def test_i4_a_frozen_peer_fails_its_pieces_in_bounded_time_and_close_is_bounded() -> None:
    async def scenario() -> None:
        settings = Settings(transfer_wait_s=1.0, quarantine_s=0.2, stop_grace_s=1.0)
        async with two_processes(settings) as (source, target):
            os.kill(target.process.pid, 19)  # SIGSTOP
            plan = source.scattered(target, 1)
            source.agent.write(1, target.peer, lambda: plan, notification=b"fill:0")
            failed = await asyncio.wait_for(source.events.get(), 30)
            assert isinstance(failed, PieceFailed)
            assert "within 1 s" in failed.detail
            source.agent.write(2, target.peer, lambda: plan)
            await asyncio.wait_for(source.agent.close(), 10)
            assert isinstance(await asyncio.wait_for(source.events.get(), 30), PieceFailed)
            target.process.kill()
            target.process.wait(30)

    asyncio.run(scenario())
