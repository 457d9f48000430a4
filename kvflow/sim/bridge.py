"""Give a simulated engine the same connector halves that vLLM gets, and attach its memory to the node."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvflow import __version__
from kvflow.config import Settings
from kvflow.connector.bridge import Bridge
from kvflow.connector.link import SchedulerLink, WorkerLink
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.connector.worker import WorkerHalf
from kvflow.dataplane.memory import MemoryRange, SharedSegment
from kvflow.errors import PeerError
from kvflow.ids import new_incarnation
from kvflow.messages import EngineProfile, EngineRef, Placement
from kvflow.sim.engine import EngineConfig

POLL_S = 0.01


@dataclass(slots=True)
class SimConnector:
    """Hold the halves of one engine."""

    engine: EngineRef
    scheduler: SchedulerHalf
    workers: list[WorkerHalf]

    def shutdown(self) -> None:
        """Leave the node, as an engine that stops does."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def attach_connector(
    config: EngineConfig,
    settings: Settings,
    segments: Sequence[SharedSegment],
    timeout_s: float,
    stop: threading.Event | None = None,
) -> SimConnector:
    """Start the halves and wait until transfers work; raise PeerError when they do not in time, or `stop` is set."""
    # A simulation is there to move bytes and have them checked, however few.
    settings = msgspec.structs.replace(settings, min_load_tokens=1)
    engine = EngineRef(engine_id=config.engine_id, incarnation=new_incarnation())
    placement: Placement = "engine" if settings.placement == "engine" else "process"
    # A bridge per rank, as when each is a process; the scheduler shares the first rank's.
    bridges = [Bridge(settings, name=f"{config.engine_id}-{rank}") for rank in range(config.layout.ranks)]
    link = SchedulerLink(bridges[0])
    profiles = [_profile(config, engine, rank) for rank in range(config.layout.ranks)]
    groups = profiles[0].geometry.groups
    connector = SimConnector(
        engine,
        SchedulerHalf(settings, link, roles=config.roles, groups=groups),
        [WorkerHalf(settings, WorkerLink(bridge, placement)) for bridge in bridges],
    )
    connector.scheduler.start(engine, config.layout.ranks)
    for worker, profile, segment in zip(connector.workers, profiles, segments, strict=True):
        memory = segment.range if placement == "process" else MemoryRange.at(segment.address, segment.length)
        worker.start(profile, [memory])
    deadline, stop = time.monotonic() + timeout_s, stop or threading.Event()
    while not link.ready:
        if stop.wait(POLL_S) or time.monotonic() >= deadline:
            connector.shutdown()
            raise PeerError(
                f"engine {config.engine_id} is not attached "
                + ("and was told to stop" if stop.is_set() else f"after {timeout_s:g} s"),
                remedy=f"start `kvflow up` with runtime folder {settings.runtime_path()} and read its log",
            )
    return connector


def _profile(config: EngineConfig, engine: EngineRef, rank: int) -> EngineProfile:
    layout = config.layout
    share = layout.share(rank)
    return EngineProfile(
        engine=engine, rank=rank, ranks=layout.ranks, tp_rank=share.tp_rank, tp_size=layout.tp_size,
        pp_rank=share.pp_rank, pp_size=layout.pp_size, roles=config.roles, host=socket.gethostname(),
        model=layout.model, geometry=share.geometry(), fingerprint=layout.fingerprint(),
        software=(("kvflow", __version__), ("engine", "simulated")),
    )  # fmt: skip
