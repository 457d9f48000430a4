"""Run a rank's actors inside the engine's worker, on the bridge thread: placement `engine`, for device memory."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.dataplane.memory import MemoryRange
from kvflow.messages import EngineProfile

log = structlog.get_logger()


class EngineRank:
    """Own the NIXL agent of one rank while a bus connection lasts."""

    def __init__(
        self, settings: Settings, profile: EngineProfile, memory: Sequence[MemoryRange], may_attach: asyncio.Event
    ) -> None:
        """Prepare; `memory` are addresses in this process, alive while the rank runs."""
        self._settings = settings
        self._profile = profile
        self._memory = tuple(memory)
        self._may_attach = may_attach
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._fencing = asyncio.Event()
        self._detached_since: float | None = time.monotonic()
        self._stuck = False

    def detached_for(self) -> float:
        """Return for how many seconds no agent has had the memory (any thread); 0 for good once one got stuck."""
        since = self._detached_since
        return 0.0 if since is None or self._stuck else time.monotonic() - since

    def fence(self) -> None:
        """Close the agent and keep it closed until `resume` (event loop)."""
        self._allowed.clear()
        self._fencing.set()

    def resume(self) -> None:
        """Start an agent again (event loop)."""
        self._fencing.clear()
        self._allowed.set()

    async def run(self, bus: Bus) -> None:
        """Run the actors on this bus connection until cancelled."""
        await self._may_attach.wait()
        while True:
            await self._allowed.wait()
            async with asyncio.TaskGroup() as group:
                rank = group.create_task(self._run_agent(bus))
                fence = group.create_task(self._fencing.wait())
                await asyncio.wait([rank, fence], return_when=asyncio.FIRST_COMPLETED)
                rank.cancel()
                fence.cancel()

    async def _run_agent(self, bus: Bus) -> None:
        from kvflow.actors.rank import run_rank_over

        def stuck() -> None:
            self._stuck = True
            log.error(
                "memory_stays_registered", engine=str(self._profile.engine), rank=self._profile.rank,
                remedy="restart the engine: requests that wait for this memory to be let go will not end",
            )  # fmt: skip

        self._detached_since = None
        try:
            await run_rank_over(
                bus=bus,
                settings=self._settings,
                profile=self._profile,
                ranges=self._memory,
                placement="engine",
                ready=lambda: log.info("attached", engine=str(self._profile.engine), rank=self._profile.rank),
                stuck=stuck,
            )
        finally:
            self._detached_since = time.monotonic()
