"""Schedule simulated requests the way vLLM does: continuous batching, chunked prefill, prefix hits, preemption, aborts.

The scheduler calls a connector's scheduler half at the moments vLLM would, and raises SimContractError where vLLM would
fail an assertion.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvflow.errors import ConfigError
from kvflow.sim.blocks import BlockPool
from kvflow.sim.contract import SimContractError
from kvflow.sim.request import RequestSpec, SimRequest, Status

LoadFailurePolicy = Literal["recompute", "fail"]


class SchedulerHooks(Protocol):
    """What the scheduler needs of a connector's scheduler half."""

    def on_new_request(
        self, request_id: str, params: Mapping[str, object] | None, prompt: Sequence[int], salt: str = ""
    ) -> None:
        """Hear of a request that has just been queued."""

    def matched_tokens(self, request_id: str, computed: int) -> tuple[int, bool]:
        """Return how many tokens beyond `computed` come from elsewhere, and whether they load in the background."""

    def allocated(self, request_id: str, blocks: tuple[list[int], ...], external: int) -> None:
        """Hear of the blocks that a request got."""

    def finished(
        self, request_id: str, aborted: bool, blocks: Sequence[Sequence[int]] | None = None
    ) -> tuple[bool, dict[str, object] | None]:
        """Hear of the end of a request and its final blocks; return whether they must be kept."""

    def loads_ended(self, received: set[str], failed: set[str]) -> None:
        """Hear which background loads the workers have reported as ended, and which of those failed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Say which token positions of a request this step computes."""

    request: SimRequest
    start: int
    end: int


@dataclass(slots=True)
class StepPlan:
    """Hold what one step computes, whom it preempted, and which requests ended since the step before."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


class SimScheduler:
    """Own the requests and the blocks of one simulated engine. Not thread-safe: the engine's step thread calls it.

    `on_loaded` is called when a load that a request still wants has arrived, `on_end` when a request has ended.
    """

    def __init__(
        self,
        hooks: SchedulerHooks,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_step_tokens: int,
        max_running: int,
        load_failure: LoadFailurePolicy = "recompute",
        on_loaded: Callable[[SimRequest], None],
        on_end: Callable[[SimRequest], None],
    ) -> None:
        self._hooks = hooks
        self.pool = pool
        self._block_tokens = block_tokens
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._load_failure = load_failure
        self._on_loaded = on_loaded
        self._on_end = on_end
        self.requests: dict[str, SimRequest] = {}
        self._waiting: list[SimRequest] = []
        self._running: list[SimRequest] = []
        self._load_reports: dict[str, bool] = {}
        self._finished_ids: set[str] = set()

    # Requests come and go.

    def add(self, spec: RequestSpec) -> SimRequest:
        """Queue a request; raise ConfigError when it can never run."""
        needed = self._blocks_for(len(spec.prompt) + spec.max_tokens)
        if not spec.prompt or spec.max_tokens < 1 or needed > self.pool.size:
            raise ConfigError(
                f"request {spec.request_id} needs {needed} blocks of {self.pool.size}, a prompt and an output",
                remedy="shorten the prompt or give the engine more blocks",
            )
        if spec.request_id in self.requests:
            raise ConfigError(f"request {spec.request_id} exists already")
        request = SimRequest(spec=spec, submitted_at=time.monotonic())
        self.requests[spec.request_id] = request
        self._waiting.append(request)
        self._hooks.on_new_request(spec.request_id, spec.params, spec.prompt)
        return request

    def abort(self, request_id: str) -> None:
        """End a request early; one that is unknown or has ended does nothing."""
        request = self.requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return
        if request.status is Status.LOADING:
            # Bytes may still be landing in its blocks: they are freed when the connector says that the load has ended.
            request.awaits_load = self._load_reports.pop(request_id, None) is None
        self._end(request, "aborted")

    @property
    def unfinished(self) -> int:
        """Return how many requests have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def runnable(self) -> bool:
        """Return whether a step could compute something, rather than wait for loads and releases."""
        return bool(self._running) or any(
            request.status is not Status.LOADING or request.request_id in self._load_reports
            for request in self._waiting
        )

    @property
    def busy(self) -> bool:
        """Return whether anything is left to do or to wait for: requests, held blocks, ends not yet told to workers."""
        return bool(self.requests or self._finished_ids)

    def block_table(self, request_id: str) -> tuple[list[int], ...]:
        """Return the blocks of a request, per group."""
        return (list(self.requests[request_id].blocks),)

    # One step.

    def schedule(self) -> StepPlan:
        """Choose what the next step computes."""
        plan = StepPlan(finished=self._finished_ids)
        self._finished_ids = set()
        budget = self._schedule_running(plan, self._max_step_tokens)
        if not plan.preempted:
            self._schedule_waiting(plan, budget)
        return plan

    def computed(self, plan: StepPlan) -> None:
        """Take in the end of a step's forward pass: sample tokens, end requests."""
        for chunk in plan.chunks:
            request = chunk.request
            if request.status is not Status.RUNNING:
                continue
            self._remember(request)
            if request.computed < len(request.tokens):
                continue
            if not request.first_token_at:
                request.first_token_at = time.monotonic()
            request.append(request.hashes.at(len(request.tokens) - 1) % 50_000)
            if request.generated >= request.spec.max_tokens:
                self._end(request, "finished")

    def reported(self, sent: set[str], received: set[str], failed: set[str]) -> None:
        """Take in what all workers agree on: sources released, loads arrived, loads failed."""
        ended = received | failed
        if ended:
            self._hooks.loads_ended(ended, failed)
        for request_id in sorted(ended):
            self._load_ended(request_id, arrived=request_id not in failed)
        for request_id in sorted(sent):
            request = self.requests.get(request_id)
            if request is None:
                raise SimContractError(f"sent is reported for {request_id}, which is unknown or was freed before")
            if request.status is not Status.FINISHED or not request.awaits_sent:
                raise SimContractError(f"sent is reported for {request_id}, whose blocks are not held")
            self._free(request)

    # Scheduling.

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        index = 0
        while index < len(self._running) and budget:
            request = self._running[index]
            wanted = min(len(request.tokens) - request.computed, budget)
            if not self._grow(request, request.computed + wanted):
                victim = self._running.pop()
                self._preempt(victim)
                plan.preempted.add(victim.request_id)
                if victim is request:
                    break
                continue
            self._add_chunk(plan, request, wanted)
            budget -= wanted
            index += 1
        return budget

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        # Who holds blocks goes first: behind a request that does not fit they would be kept for nothing.
        for request in sorted(self._waiting, key=lambda waiting: not waiting.holds_load):
            if not budget or len(self._running) >= self._max_running:
                return
            if request.status is Status.LOADING and not self._resume(request):
                continue
            if request.computed == 0:
                started = self._start(request)
                if started is None:
                    return
                if request.status is Status.LOADING:
                    continue
            wanted = min(len(request.tokens) - request.computed, budget)
            if not self._grow(request, request.computed + wanted):
                self._give_back_hits(request)
                return
            self._admitted(request)
            self._hooks.allocated(request.request_id, (list(request.blocks),), 0)
            self._waiting.remove(request)
            request.status = Status.RUNNING
            self._running.append(request)
            self._add_chunk(plan, request, wanted)
            budget -= wanted

    def _start(self, request: SimRequest) -> bool | None:
        """Look for cached and remote tokens; None when the blocks for remote ones do not fit now."""
        hits = self.pool.find(self._block_hashes(request, (len(request.tokens) - 1) // self._block_tokens))
        local = len(hits) * self._block_tokens
        external, in_background = self._hooks.matched_tokens(request.request_id, local)
        if external < 0 or local + external > len(request.tokens):
            raise SimContractError(f"{external} external tokens do not fit {request.request_id} beyond its {local}")
        if external and not in_background:
            raise SimContractError(f"{request.request_id} is to load in the foreground, which kvflow never does")
        if not external and in_background:
            raise SimContractError(f"{request.request_id} is to load nothing in the background")
        request.blocks, request.cached_blocks, request.computed = hits, len(hits), local
        if not external:
            return True
        # Room for the whole prompt, though its last token is not loaded: what is loaded can then run without asking for
        # more, else several loaded requests could hold all blocks and wait for one another.
        if not self._grow(request, len(request.tokens)):
            self._give_back_hits(request)
            return None
        self._admitted(request)
        request.external_tokens, request.holds_load = external, True
        request.computed = local + external
        request.status = Status.LOADING
        request.allocated_at, request.received_at = time.monotonic(), 0.0
        self._hooks.allocated(request.request_id, (list(request.blocks),), external)
        return True

    def _resume(self, request: SimRequest) -> bool:
        """Take a request whose load has ended back into the queue; False while it still loads."""
        arrived = self._load_reports.pop(request.request_id, None)
        if arrived is None:
            return False
        request.status = Status.WAITING
        if arrived:
            self._remember(request)
            request.computed = min(request.computed, len(request.tokens) - 1)
        else:
            self._reset(request)
        return True

    def _admitted(self, request: SimRequest) -> None:
        if not request.admitted:
            # Of the first time only: what a preempted request finds again says nothing about its prompt.
            request.admitted, request.local_hit_tokens = True, request.cached_blocks * self._block_tokens

    def _grow(self, request: SimRequest, tokens: int) -> bool:
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _give_back_hits(self, request: SimRequest) -> None:
        # A request whose remote prefix is already in its blocks keeps them while it waits for room.
        if not request.holds_load:
            self._reset(request)

    def _preempt(self, request: SimRequest) -> None:
        request.status = Status.PREEMPTED
        request.preemptions += 1
        self._reset(request)
        self._waiting.insert(0, request)

    def _reset(self, request: SimRequest) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        request.cached_blocks = request.computed = 0
        request.holds_load = False

    def _add_chunk(self, plan: StepPlan, request: SimRequest, tokens: int) -> None:
        plan.chunks.append(Chunk(request, request.computed, request.computed + tokens))
        request.computed += tokens

    # The end of loads and requests.

    def _load_ended(self, request_id: str, *, arrived: bool) -> None:
        request = self.requests.get(request_id)
        if request is None:
            raise SimContractError(f"a load is reported for {request_id}, which is unknown or was freed before")
        if request.status is Status.FINISHED:
            if not request.awaits_load:
                raise SimContractError(f"a load is reported for {request_id}, which has ended and waits for none")
            self._free(request)
            return
        if request.status is not Status.LOADING:
            raise SimContractError(f"a load is reported for {request_id}, which is {request.status.value}")
        if request_id in self._load_reports:
            raise SimContractError(f"the load of {request_id} is reported twice")
        self._load_reports[request_id] = arrived
        if arrived:
            request.received_at = time.monotonic()
            self._on_loaded(request)
            return
        request.loads_failed += 1
        if self._load_failure == "fail":
            del self._load_reports[request_id]
            self._end(request, "load_failed")

    def _end(self, request: SimRequest, outcome: str) -> None:
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.status, request.outcome = Status.FINISHED, outcome
        request.awaits_sent, _ = self._hooks.finished(
            request.request_id, outcome != "finished", self.block_table(request.request_id)
        )
        self._finished_ids.add(request.request_id)
        self._on_end(request)
        if not (request.awaits_sent or request.awaits_load):
            self._free(request)

    def _free(self, request: SimRequest) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        del self.requests[request.request_id]

    # Prefix cache.

    def _remember(self, request: SimRequest) -> None:
        full = min(request.computed, len(request.tokens)) // self._block_tokens
        for number in range(request.cached_blocks, full):
            self.pool.remember(request.blocks[number], request.hashes.at((number + 1) * self._block_tokens - 1))
        request.cached_blocks = max(request.cached_blocks, full)

    def _block_hashes(self, request: SimRequest, count: int) -> list[int]:
        return [request.hashes.at((number + 1) * self._block_tokens - 1) for number in range(count)]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
