"""Send a workload through two simulated engines, as a router would, and sum up what came of it."""

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import anyio
import msgspec
import numpy as np

from kvflow.ids import new_transfer_id
from kvflow.messages import EngineRef, TransferEvent
from kvflow.sim.control import SimProcess, SimProcessError
from kvflow.sim.load import PlannedTransfer
from kvflow.sim.request import RequestResult, RequestSpec

MILLISECONDS = 1000.0
SOURCE_LEG, TARGET_LEG = "-source", "-target"
EVENTS_WAIT_S = 3.0


@dataclass(slots=True)
class Deliveries:
    """Keep the latest totals of each binding on each source rank, from its `progress` and `delivered` events.

    Totals only grow, so events may come twice or out of order. A source that is released right after its last byte need
    not say `delivered` any more: its last `progress` then has the same totals.
    """

    latest: dict[tuple[str, int, EngineRef | None, int], TransferEvent] = field(default_factory=dict)
    _whole: dict[str, set[int]] = field(default_factory=dict)
    _more: anyio.Event | None = None

    def add(self, event: TransferEvent) -> None:
        """Take in any event."""
        if event.kind not in {"progress", "delivered"}:
            return
        key = (event.transfer_id, event.binding, event.source, event.rank)
        known = self.latest.get(key)
        if known is None or event.bytes_done >= known.bytes_done:
            self.latest[key] = event
        if event.kind == "delivered" or event.tokens >= event.tokens_total:
            self._whole.setdefault(event.transfer_id, set()).add(event.rank)
        if self._more is not None:
            self._more.set()

    def total(self, name: Literal["bytes_done", "bytes_early", "descriptors", "pieces"]) -> int:
        """Return the sum of one number over all bindings and ranks."""
        return sum(int(getattr(event, name)) for event in self.latest.values())

    async def missing(self, transfers: set[str], ranks: int, timeout_s: float) -> int:
        """Wait until all source ranks of every transfer have said that all is written; return how many have not.

        Such an event may be later than the arrival: the target hears by NIXL, and of the event by the bus.
        """
        late = set(transfers)
        with anyio.move_on_after(timeout_s):
            while late := {transfer for transfer in late if len(self._whole.get(transfer, ())) < ranks}:
                self._more = anyio.Event()
                await self._more.wait()
        return len(late)


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """Say what came of a workload.

    `transfers` ended well; `already_there` of them found all their KV in the target's own prefix cache. The latency is
    from the moment both sides were ready (blocks offered, prompt computed) until the target engine knew.
    """

    transfers: int
    already_there: int
    cancelled: int
    failed: int
    tokens_moved: int
    bytes: int
    bytes_early_share: float
    descriptors: int
    pieces: int
    events_missing: int
    checked_bytes: int
    mismatched_bytes: int
    held_blocks: int
    prefix_hit_tokens: int
    p50_ms: float
    p99_ms: float
    ttft_p50_ms: float
    duration_s: float
    failures: dict[str, int] = {}

    @property
    def passed(self) -> bool:
        """Return whether every byte was right, nothing failed and nothing is left."""
        return not (self.mismatched_bytes or self.failed or self.held_blocks) and self.transfers > 0


@dataclass(slots=True)
class Traffic:
    """Drive a source and a target engine. `on_progress` is called after each transfer."""

    source: SimProcess
    target: SimProcess
    source_ranks: int = 1
    timeout_s: float = 60.0
    on_progress: Callable[[], None] = lambda: None
    latencies_s: list[float] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    ttfts_s: list[float] = field(default_factory=list)
    counts: "collections.Counter[str]" = field(default_factory=collections.Counter)
    failures: "collections.Counter[str]" = field(default_factory=collections.Counter)

    async def run(self, plan: Iterable[PlannedTransfer], concurrency: int) -> None:
        """Send all transfers, at most `concurrency` at once."""
        send, receive = anyio.create_memory_object_stream[PlannedTransfer](0)
        began = time.monotonic()
        async with anyio.create_task_group() as group:
            async with receive:
                for _ in range(concurrency):
                    group.start_soon(self._work, receive.clone())
            async with send:
                for planned in plan:
                    await send.send(planned)
        self.counts["duration_us"] = round((time.monotonic() - began) * 1e6)

    async def _work(self, queue: "anyio.abc.ObjectReceiveStream[PlannedTransfer]") -> None:
        async with queue:
            async for planned in queue:
                try:
                    await self._transfer(planned)
                except SimProcessError as error:
                    self.failures[str(error)] += 1
                self.on_progress()

    async def _transfer(self, planned: PlannedTransfer) -> None:
        transfer_id = new_transfer_id()
        legs = (transfer_id + SOURCE_LEG, transfer_id + TARGET_LEG)
        source = RequestSpec(
            request_id=legs[0], prompt=planned.prompt, params={"transfer_id": transfer_id, "do_remote_decode": True}
        )
        target = RequestSpec(
            request_id=legs[1], prompt=planned.prompt, max_tokens=planned.output_tokens,
            params={"transfer_id": transfer_id, "do_remote_prefill": True},
        )  # fmt: skip
        await self.source.submit(source)
        first: RequestResult | None = None
        if planned.late and planned.abort_after_s is None:
            first = await self.source.result(legs[0], self.timeout_s)
        await self.target.submit(target)
        if planned.abort_after_s is not None:
            await anyio.sleep(planned.abort_after_s)
            # A client that goes away ends both legs.
            await self.source.abort(legs[0])
            await self.target.abort(legs[1])
        first = first or await self.source.result(legs[0], self.timeout_s)
        self._count(planned, first, await self.target.result(legs[1], self.timeout_s))

    def _count(self, planned: PlannedTransfer, source: RequestResult, target: RequestResult) -> None:
        self.counts["prefix_hit_tokens"] += source.local_hit_tokens + target.local_hit_tokens
        outcomes = {source.outcome, target.outcome}
        if planned.abort_after_s is not None and outcomes <= {"finished", "aborted"} and "aborted" in outcomes:
            self.counts["cancelled"] += 1
        elif outcomes != {"finished"}:
            self.failures[
                f"source {source.outcome}, target {target.outcome} {source.detail} {target.detail}".strip()
            ] += 1
        elif target.loads_failed:
            self.failures["the transfer failed and the target computed the prompt itself"] += 1
        elif target.received_at:
            self.arrived.add(target.request_id.removesuffix(TARGET_LEG))
            self.counts["tokens_moved"] += target.external_tokens
            self.ttfts_s.append(target.first_token_at - min(source.submitted_at, target.submitted_at))
            both_ready_at = max(target.allocated_at, source.first_token_at)
            self.latencies_s.append(max(0.0, target.received_at - both_ready_at))
        elif target.local_hit_tokens >= target.prompt_tokens - 1:
            self.counts["already_there"] += 1
        else:
            self.failures["the target never asked for the transfer"] += 1

    async def report(self, deliveries: Deliveries, quiet_s: float) -> TrafficReport:
        """Wait until both engines hold nothing and all events are in, check all memory, and sum up."""
        source, target = await self.source.quiet(quiet_s), await self.target.quiet(quiet_s)
        missing = await deliveries.missing(self.arrived, self.source_ranks, EVENTS_WAIT_S)
        p50, p99 = _percentiles(self.latencies_s)
        moved = deliveries.total("bytes_done")
        return TrafficReport(
            transfers=len(self.arrived) + self.counts["already_there"], already_there=self.counts["already_there"],
            cancelled=self.counts["cancelled"], failed=self.failures.total(),
            tokens_moved=self.counts["tokens_moved"], bytes=moved,
            bytes_early_share=round(deliveries.total("bytes_early") / moved, 4) if moved else 0.0,
            descriptors=deliveries.total("descriptors"), pieces=deliveries.total("pieces"),
            events_missing=missing,
            checked_bytes=source.checked_bytes + target.checked_bytes,
            mismatched_bytes=sum(
                report.mismatched_bytes + report.stray_bytes for report in (source, target)
            ),
            held_blocks=source.used_blocks + target.used_blocks,
            prefix_hit_tokens=self.counts["prefix_hit_tokens"], p50_ms=p50, p99_ms=p99,
            ttft_p50_ms=_percentiles(self.ttfts_s)[0], duration_s=round(self.counts["duration_us"] / 1e6, 3),
            failures=dict(self.failures),
        )  # fmt: skip


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    if not seconds:
        return 0.0, 0.0
    p50, p99 = np.percentile(np.asarray(seconds) * MILLISECONDS, [50, 99])
    return round(float(p50), 3), round(float(p99), 3)
