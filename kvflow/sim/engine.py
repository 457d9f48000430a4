"""Run a simulated engine: a thread that steps the scheduler, computes fake KV and drives a connector as vLLM would."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
import structlog

from kvflow.connector.step import StepMeta, StepResults, StepView
from kvflow.dataplane.memory import SharedSegment, create_shared
from kvflow.errors import KvflowError
from kvflow.messages import Role
from kvflow.sim.blocks import BlockPool
from kvflow.sim.contract import SimContractError
from kvflow.sim.kv import FakeKv, KvCheck
from kvflow.sim.layout import SimLayout
from kvflow.sim.request import RequestResult, RequestSpec, SimRequest
from kvflow.sim.scheduler import LoadFailurePolicy, SchedulerHooks, SimScheduler, StepPlan

log = structlog.get_logger()

Duration = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
# How long an engine without work sleeps before it looks whether it should stop.
QUIET_WAIT_S = 0.5
STOP_WAIT_S = 30.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configure a simulated engine. A step takes `step_s` plus `token_s` for each token, at least; seconds.

    `guard` fills unused memory with a pattern and counts every byte of it that changes. `idle_step_s` is the pause
    between steps that only wait for transfers.
    """

    engine_id: str
    layout: SimLayout = SimLayout()
    roles: tuple[Role, ...] = ("source", "target")
    max_step_tokens: Count = 512
    max_running: Count = 32
    step_s: Duration = 0.001
    token_s: Duration = 0.0
    idle_step_s: Duration = 0.001
    prefix_caching: bool = True
    guard: bool = True
    load_failure: LoadFailurePolicy = "recompute"


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Say what an engine holds, and what its checks have counted since it started."""

    requests: int
    used_blocks: int
    steps: int
    preemptions: int
    checked_bytes: int
    mismatched_bytes: int
    stray_bytes: int


class SchedulerPort(SchedulerHooks, Protocol):
    """What the engine needs of a connector's scheduler half."""

    def build_step(self, step: StepView) -> StepMeta:
        """Return what the worker halves must know of a step."""


class WorkerPort(Protocol):
    """What the engine needs of one rank's worker half."""

    def begin_step(self, meta: StepMeta) -> None:
        """Hear of a step before its forward pass."""

    def after_forward(self, meta: StepMeta) -> None:
        """Hear that the step's KV is in the cache."""

    def results(self, finished_req_ids: AbstractSet[str]) -> StepResults:
        """Report what has ended."""


class Connector(Protocol):
    """What the engine needs of a connector: its scheduler half, and a worker half per rank."""

    @property
    def scheduler(self) -> SchedulerPort:
        """Return the scheduler half."""

    @property
    def workers(self) -> Sequence[WorkerPort]:
        """Return the worker halves, by rank."""

    def shutdown(self) -> None:
        """Leave, waiting no longer than a bound of its own."""


@dataclass(slots=True)
class _Tally:
    """Collect the reports of all ranks until every rank has made one."""

    ranks: int
    reports: dict[str, set[int]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def add(self, rank: int, ids: set[str], *, failed: bool = False) -> set[str]:
        """Add one rank's reports and return the ids that all ranks have now reported."""
        complete: set[str] = set()
        for request_id in ids:
            seen = self.reports.setdefault(request_id, set())
            if rank in seen:
                raise SimContractError(f"rank {rank} reports {request_id} twice")
            seen.add(rank)
            if failed:
                self.failed.add(request_id)
            if len(seen) == self.ranks:
                del self.reports[request_id]
                complete.add(request_id)
        return complete


class SimEngine:
    """Run requests on a thread. `on_result` and `on_fatal` are called on that thread.

    A fatal error is one that would have killed a real engine: the thread ends after it.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_result: Callable[[RequestResult], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """Allocate the cache; raise MemoryAccessError when there is no room for it."""
        self.config = config
        self._on_result = on_result
        self._on_fatal = on_fatal
        shares = [config.layout.share(rank) for rank in range(config.layout.ranks)]
        with contextlib.ExitStack() as undo:
            self.segments: list[SharedSegment] = [
                undo.enter_context(create_shared(share.total_bytes, name="kvflow-sim")) for share in shares
            ]
            self._caches = [FakeKv(share, segment.view) for share, segment in zip(shares, self.segments, strict=True)]
            if config.guard:
                for cache in self._caches:
                    cache.guard_all()
            self._memory = undo.pop_all()
        self._check = KvCheck()
        self._steps = self._preemptions = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._loads, self._sends = _Tally(config.layout.ranks), _Tally(config.layout.ranks)
        self._thread: threading.Thread | None = None
        self._connector: Connector
        self._scheduler: SimScheduler

    # Called from any thread.

    def start(self, connector: Connector) -> None:
        """Start stepping with a connector, which the engine shuts down at its end."""
        guard = self.config.guard
        self._connector = connector
        self._scheduler = SimScheduler(
            connector.scheduler,
            BlockPool(
                self.config.layout.blocks,
                caching=self.config.prefix_caching,
                on_empty=self._on_empty if guard else None,
                on_take=self._on_take if guard else None,
            ),
            block_tokens=self.config.layout.block_tokens,
            max_step_tokens=self.config.max_step_tokens,
            max_running=self.config.max_running,
            load_failure=self.config.load_failure,
            on_loaded=self._on_loaded,
            on_end=self._on_end,
        )
        self._thread = threading.Thread(target=self._run, name=f"sim-{self.config.engine_id}", daemon=True)
        self._thread.start()

    def submit(self, spec: RequestSpec) -> None:
        """Queue a request; one that can never run ends with outcome `rejected`."""
        self._commands.put(lambda: self._add(spec))

    def abort(self, request_id: str) -> None:
        """End a request early."""
        self._commands.put(lambda: self._scheduler.abort(request_id))

    def drop_cache(self) -> None:
        """Forget all cached prefixes that no request uses."""
        self._commands.put(self._scheduler.pool.drop_cached)

    def audit(self, answer: Callable[[EngineReport], None]) -> None:
        """Check all unused memory on the engine's thread, and call `answer` there with the counts."""
        self._commands.put(lambda: answer(self._audit()))

    def stop(self) -> None:
        """End the thread after the present step, shut the connector down and unmap the cache."""
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(self._stop)
            self._thread.join(STOP_WAIT_S)
        for cache in self._caches:
            cache.close()
        self._memory.close()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(0.0 if self._scheduler.busy else QUIET_WAIT_S)
                if self._scheduler.busy and not self._stopping:
                    self._step()
        except Exception as error:  # noqa: BLE001 - reported: as in a real engine, any error here is its end
            log.error("sim_engine_died", engine=self.config.engine_id, error=str(error))
            self._on_fatal(error)
        finally:
            self._connector.shutdown()

    def _take_commands(self, wait_s: float) -> None:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _step(self) -> None:
        began = time.monotonic()
        scheduler, workers = self._scheduler, self._connector.workers
        plan = scheduler.schedule()
        self._steps += 1
        self._preemptions += len(plan.preempted)
        meta = self._connector.scheduler.build_step(
            StepView(
                scheduled={chunk.request.request_id: chunk.end for chunk in plan.chunks},
                block_table=scheduler.block_table,
                preempted=plan.preempted,
            )
        )
        for worker in workers:
            worker.begin_step(meta)
        if plan.chunks:
            self._forward(plan, began)
            for worker in workers:
                worker.after_forward(meta)
        reports = [worker.results(plan.finished) for worker in workers]
        scheduler.computed(plan)
        self._report(reports)
        if not plan.chunks and not scheduler.runnable and scheduler.busy:
            self._take_commands(self.config.idle_step_s)

    def _forward(self, plan: StepPlan, began: float) -> None:
        for chunk in plan.chunks:
            request = chunk.request
            for cache in self._caches:
                cache.write(request.hashes.values, request.blocks, chunk.start, chunk.end)
        spent = time.monotonic() - began
        wanted = self.config.step_s + self.config.token_s * plan.tokens
        if wanted > spent:
            time.sleep(wanted - spent)

    def _report(self, reports: Sequence[StepResults]) -> None:
        sent: set[str] = set()
        ended: set[str] = set()
        for rank, report in enumerate(reports):
            sent |= self._sends.add(rank, set(report.sent))
            failed = set(report.failed)
            ended |= self._loads.add(rank, failed, failed=True)
            ended |= self._loads.add(rank, set(report.received) - failed)
        failed = ended & self._loads.failed
        self._loads.failed -= ended
        if sent or ended:
            self._scheduler.reported(sent, ended - failed, failed)

    def _add(self, spec: RequestSpec) -> None:
        try:
            self._scheduler.add(spec)
        except KvflowError as error:
            now = time.monotonic()
            request = SimRequest(spec=spec, submitted_at=now, outcome="rejected")
            self._on_result(request.result(now, str(error)))

    def _stop(self) -> None:
        self._stopping = True

    # Checks.

    def _on_loaded(self, request: SimRequest) -> None:
        end = request.computed
        self._verify(request, end)
        if self.config.guard:
            for cache in self._caches:
                self._count(request, cache.check_tail(request.blocks, end))

    def _on_end(self, request: SimRequest) -> None:
        if request.outcome == "finished":
            # Once more at the end: a late WRITE into blocks in use must not go unseen.
            self._verify(request, request.computed)
        self._on_result(request.result(time.monotonic()))

    def _verify(self, request: SimRequest, end: int) -> None:
        for cache in self._caches:
            self._count(request, cache.check(request.hashes.values, request.blocks, 0, end))

    def _count(self, request: SimRequest, check: KvCheck) -> None:
        request.checked_bytes += check.checked
        request.mismatched_bytes += check.mismatched
        request.stray_bytes += check.stray
        self._check.add(check)

    def _on_empty(self, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            cache.guard_blocks(blocks)

    def _on_take(self, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            self._check.add(cache.check_guard(blocks))

    def _audit(self) -> EngineReport:
        if self.config.guard:
            self._on_take(self._scheduler.pool.unheld())
        return EngineReport(
            requests=len(self._scheduler.requests), used_blocks=self._scheduler.pool.used, steps=self._steps,
            preemptions=self._preemptions, checked_bytes=self._check.checked,
            mismatched_bytes=self._check.mismatched, stray_bytes=self._check.stray,
        )  # fmt: skip
