"""Engines that all end-to-end tests share: starting one takes longer than most tests."""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from vllm_support import CHUNK_TOKENS, Pair, Stage

from kvflow.config import PlacementChoice, Settings
from kvflow.demo.engines import EngineRole, EngineSpec, VllmEngine
from kvflow.demo.events import collecting, wait_for_engines
from kvflow.demo.model import ensure_model
from kvflow.demo.node import Node

START_TIMEOUT_S = 240.0
MODEL_LENGTH = 8192
CACHE_TOKENS = 5 * MODEL_LENGTH


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    return ensure_model(cache_dir=tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Settings]:
    """Run a node; bounds are short, so that what must end by them does so within a test."""
    settings = Settings(
        cluster="e2e",
        runtime_dir=str(tmp_path_factory.mktemp("node") / "run"),
        source_wait_s=6.0,
        source_lease_s=6.0,
        log_level="debug",
        log_format="json",
    )
    node = Node(settings, log_dir)
    node.start()
    try:
        yield node.wait_ready()
    finally:
        node.stop()


@pytest.fixture(scope="session")
def alone(model: Path, log_dir: Path) -> Iterator[VllmEngine]:
    """Run the engine whose tokens are the right ones."""
    with ExitStack() as stack:
        engine = _start(stack, _spec("alone", "none", model, None, block=32, core=0), log_dir)
        engine.wait_ready(START_TIMEOUT_S)
        yield engine


@pytest.fixture(scope="session")
def process_pair(model: Path, log_dir: Path, cluster: Settings, alone: VllmEngine) -> Iterator[Pair]:
    """Run a pair whose agents live in node processes, with small blocks and prefix caching."""
    yield from _pair(model, log_dir, cluster, placement="process", block=32, prefix_caching=True, min_load_tokens=32)


@pytest.fixture(scope="session")
def engine_pair(model: Path, log_dir: Path, cluster: Settings, alone: VllmEngine) -> Iterator[Pair]:
    """Run a pair whose agents live in the engines, with large blocks; even a single token is transferred."""
    yield from _pair(model, log_dir, cluster, placement="engine", block=128, prefix_caching=False, min_load_tokens=1)


@pytest.fixture(scope="module")
def uneven_pair(model: Path, log_dir: Path, cluster: Settings, alone: VllmEngine) -> Iterator[Pair]:
    """Run a pair of block sizes neither of which is a multiple of the other."""
    yield from _pair(
        model, log_dir, cluster, placement="process", block=96, decode_block=64, prefix_caching=True, min_load_tokens=1,
        label="uneven",
    )  # fmt: skip


@pytest.fixture
async def stage(cluster: Settings, alone: VllmEngine) -> AsyncIterator[Stage]:
    async with collecting(cluster) as events, aiohttp.ClientSession() as session:
        yield Stage(session, alone, events, cluster)


def _pair(
    model: Path, log_dir: Path, cluster: Settings, *, placement: PlacementChoice, block: int, prefix_caching: bool,
    min_load_tokens: int, decode_block: int | None = None, label: str = "",
) -> Iterator[Pair]:  # fmt: skip
    with ExitStack() as stack:
        roles: tuple[tuple[str, EngineRole, int], ...] = (
            ("prefill", "producer", block), ("decode", "consumer", decode_block or block),
        )  # fmt: skip
        engines = [
            _start(
                stack,
                _spec(f"{name}-{label or placement}", role, model, cluster, block=tokens, core=core,
                      placement=placement, prefix_caching=prefix_caching, min_load_tokens=min_load_tokens),
                log_dir,
            )
            for core, (name, role, tokens) in enumerate(roles)
        ]  # fmt: skip
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S)
        asyncio.run(wait_for_engines(cluster, [engine.name for engine in engines], within_s=60))
        yield Pair(*engines)


def _spec(
    name: str,
    role: EngineRole,
    model: Path,
    cluster: Settings | None,
    *,
    block: int,
    core: int,
    placement: PlacementChoice = "auto",
    prefix_caching: bool = False,
    min_load_tokens: int = 1,
) -> EngineSpec:
    cores = sorted(os.sched_getaffinity(0))
    return EngineSpec(
        name=name,
        model=model,
        role=role,
        block_size=block,
        max_model_len=MODEL_LENGTH,
        max_num_batched_tokens=CHUNK_TOKENS,
        num_blocks=CACHE_TOKENS // block,
        prefix_caching=prefix_caching,
        min_load_tokens=min_load_tokens,
        cores=str(cores[core % len(cores)]),
        placement=placement,
        cluster=cluster.cluster if cluster else "default",
        runtime_dir=Path(cluster.runtime_dir) if cluster else None,
        extra_env={"KVFLOW_SOURCE_WAIT_S": "6", "KVFLOW_SOURCE_LEASE_S": "6", "KVFLOW_LOG_LEVEL": "debug"},
    )


def _start(stack: ExitStack, spec: EngineSpec, log_dir: Path) -> VllmEngine:
    engine = VllmEngine(spec, log_dir)
    stack.callback(engine.stop)
    engine.start()
    return engine
