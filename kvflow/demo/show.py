"""The demo: a node, a prefill and a decode engine behind the router, and one engine alone to compare with."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from rich.console import Console

from kvflow.config import Settings
from kvflow.demo.client import complete
from kvflow.demo.engines import READY_TIMEOUT_S, EngineSpec, VllmEngine
from kvflow.demo.events import EventLog, EventsMissing, collecting
from kvflow.demo.model import TinyModel, ensure_model
from kvflow.demo.node import Node
from kvflow.demo.processes import GuardedProcess
from kvflow.demo.progress import Steps
from kvflow.demo.report import Report, Row, print_report, row_of
from kvflow.errors import ConfigError
from kvflow.router.app import serving

PROMPT_LENGTHS = (48, 200, 1000, 4000)
BLOCK_TOKENS = 32
CHUNK_TOKENS = 1024
MODEL_LENGTH = 8192
# Two prompts of full length: small, since moving a CPU cache into shared memory copies it once.
CACHE_BLOCKS = 2 * MODEL_LENGTH // BLOCK_TOKENS
PAIR_TIMEOUT_S = 60.0
EVENTS_TIMEOUT_S = 5.0
SPECIAL_TOKENS = 5
WARM_UP_TOKENS = 64
INTERRUPTED = 130  # as shells report SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Hold what the user may choose. `keep` leaves the folder with the model and the logs."""

    lengths: tuple[int, ...] = PROMPT_LENGTHS
    max_tokens: int = 24
    as_json: bool = False
    keep: bool = False
    seed: int = 1


async def show(settings: Settings, options: DemoOptions) -> int:
    """Run the demo and print its report on stdout; return 0 only when everything went right.

    Raises KvflowError when something does not start.
    """
    began = time.monotonic()
    with _folder(keep=options.keep) as folder, Steps() as steps:
        with steps.step("making a tiny model"):
            model = await anyio.to_thread.run_sync(ensure_model, TinyModel(), folder)
        async with _running(settings, folder, model, steps) as (ours, alone, events, session):
            with steps.step("sending requests"):
                rows = await _compare(session, ours, alone, events, options)
    report = Report(
        ok=all(row.good for row in rows),
        total_s=round(time.monotonic() - began, 1),
        cores=len(os.sched_getaffinity(0)),
        model=TinyModel().key(),
        requests=tuple(rows),
    )
    _print(report, as_json=options.as_json)
    return 0 if report.ok else 1


async def until_interrupted(settings: Settings, options: DemoOptions) -> int:
    """Run the demo so that SIGINT and SIGTERM end it with everything stopped and removed."""
    task = asyncio.create_task(show(settings, options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return INTERRUPTED


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, folder: Path, model: Path, steps: Steps
) -> AsyncIterator[tuple[str, str, EventLog, aiohttp.ClientSession]]:
    """Run node, engines and router; give the router's URL, the lone engine's, the events and a client."""
    own = Settings(
        cluster="demo",
        runtime_dir=str(folder / "run"),
        placement=settings.placement,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    node = Node(own, folder)
    engines = [VllmEngine(spec, folder) for spec in engine_specs(own, model)]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_stop_all, [*engines, node.process])
        with steps.step("starting a node with its own NATS"):
            node.start()
            own = await anyio.to_thread.run_sync(node.wait_ready, abandon_on_cancel=True)
        await _start_engines(engines, steps)
        events = await stack.enter_async_context(collecting(own))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        router = await stack.enter_async_context(serving(own))
        with steps.step("waiting for the engines to meet"):
            await _wait_for_pair(session, router, engines)
        yield router, engines[-1].url, events, session


def engine_specs(settings: Settings, model: Path) -> list[EngineSpec]:
    """Return the demo's engines: prefill, decode, and the lone one last; each on its own core as far as they go."""
    cores = sorted(os.sched_getaffinity(0))
    roles = (("prefill", "producer"), ("decode", "consumer"), ("alone", "none"))
    return [
        EngineSpec(
            name=name,
            model=model,
            role=role,  # type: ignore[arg-type]
            block_size=BLOCK_TOKENS,
            max_model_len=MODEL_LENGTH,
            max_num_batched_tokens=CHUNK_TOKENS,
            num_blocks=CACHE_BLOCKS,
            cores=str(cores[number % len(cores)]),
            placement=settings.placement,
            cluster=settings.cluster,
            runtime_dir=Path(settings.runtime_dir),
        )
        for number, (name, role) in enumerate(roles)
    ]


async def _start_engines(engines: Sequence[VllmEngine], steps: Steps) -> None:
    """Start all engines at once and wait for each."""

    async def wait(engine: VllmEngine) -> None:
        with steps.step(f"starting vLLM: {engine.name}"):
            await anyio.to_thread.run_sync(engine.wait_ready, READY_TIMEOUT_S, abandon_on_cancel=True)

    for engine in engines:
        engine.start()
    waits = [asyncio.create_task(wait(engine)) for engine in engines]
    try:
        await asyncio.gather(*waits)  # the first failure comes out as it is, not in a group
    finally:
        for waiting in waits:
            waiting.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _wait_for_pair(session: aiohttp.ClientSession, router: str, engines: Sequence[VllmEngine]) -> None:
    deadline = time.monotonic() + PAIR_TIMEOUT_S
    while True:
        async with session.get(f"{router}/health") as answer:
            health = await answer.json()
            if answer.status == 200 and health["prefill"] and health["decode"]:
                return
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {engine.name}:\n{engine.tail(10)}" for engine in engines[:2])
            raise ConfigError(f"the engines did not join the directory within {PAIR_TIMEOUT_S:.0f} s\n{logs}")
        await asyncio.sleep(0.2)


async def _compare(
    session: aiohttp.ClientSession,
    ours: str,
    alone: str,
    events: EventLog,
    options: DemoOptions,
) -> list[Row]:
    """Send each prompt through the router and to the lone engine; the first, which connects everybody, is not shown."""
    draw = random.Random(options.seed)  # noqa: S311 - reproducible prompts, no secrets
    rows = []
    for number, length in enumerate((WARM_UP_TOKENS, *options.lengths)):
        prompt = [draw.randrange(SPECIAL_TOKENS, TinyModel().vocab_size) for _ in range(length)]
        answer = await complete(session, ours, prompt, max_tokens=options.max_tokens)
        expected = await complete(session, alone, prompt, max_tokens=options.max_tokens)
        if number == 0:
            continue
        with contextlib.suppress(EventsMissing):  # the row says that there was no transfer
            await events.wait_ended(answer.transfer_id, within_s=EVENTS_TIMEOUT_S)
        rows.append(row_of(length, answer, expected, events.of(answer.transfer_id)))
    return rows


@contextlib.contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """Give the demo a folder of its own, and remove it at the end unless told to keep it."""
    folder = Path(tempfile.mkdtemp(prefix="kvflow-demo-"))
    try:
        yield folder
    finally:
        if keep:
            sys.stderr.write(f"model and logs are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


async def _stop_all(processes: Sequence[GuardedProcess]) -> None:
    """Stop engines first, then the node, whatever else is being cancelled."""
    with anyio.CancelScope(shield=True):
        *engines, node = processes
        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(anyio.to_thread.run_sync, engine.stop)
        await anyio.to_thread.run_sync(node.stop)


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
    else:
        print_report(report, Console())
