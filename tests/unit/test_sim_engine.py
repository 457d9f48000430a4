"""The simulated engine with a connector that copies bytes in-process: what it counts, and what kills it."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvflow.connector.step import EMPTY_STEP, StepMeta, StepResults, StepView
from kvflow.sim.contract import SimContractError
from kvflow.sim.engine import EngineConfig, EngineReport, SimEngine
from kvflow.sim.layout import SimLayout
from kvflow.sim.request import RequestResult, RequestSpec

WAIT_S = 10.0
LAYOUT = SimLayout(layers=2, heads=2, head_bytes=16, block_tokens=4, blocks=48, tp_size=2)


@dataclass
class Wire:
    """Join the two ends: finished sources and waiting targets, by transfer id. Bytes are copied rank by rank."""

    engines: dict[str, SimEngine] = field(default_factory=dict)
    sources: dict[str, tuple[str, list[int], int]] = field(default_factory=dict)
    targets: dict[str, tuple[str, list[int], int, int]] = field(default_factory=dict)
    released: dict[str, list[str]] = field(default_factory=lambda: {"P": [], "D": []})
    arrived: dict[str, list[str]] = field(default_factory=lambda: {"P": [], "D": []})
    spoil: int = 0
    overrun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def match(self) -> None:
        for transfer in self.sources.keys() & self.targets.keys():
            source, theirs, _ = self.sources.pop(transfer)
            target, ours, start, end = self.targets.pop(transfer)
            for origin, copy in zip(self.engines["P"].segments, self.engines["D"].segments, strict=True):
                self.copy(origin.view, copy.view, theirs, ours, start, end + self.overrun)
            self.released["P"].append(source)
            self.arrived["D"].append(target)

    def copy(
        self, origin: np.ndarray, copy: np.ndarray, theirs: list[int], ours: list[int], start: int, end: int
    ) -> None:
        share = LAYOUT.share(0)
        shape = (share.shape[0], -1, *share.shape[2:-1], share.row_bytes)
        source, target = origin.reshape(shape), copy.reshape(shape)
        for token in range(start, end):
            there, here = theirs[token // LAYOUT.block_tokens], ours[token // LAYOUT.block_tokens]
            row = source[:, there, :, token % LAYOUT.block_tokens].copy()
            if self.spoil and token == start:
                row[0, 0, 0] ^= self.spoil
            target[:, here, :, token % LAYOUT.block_tokens] = row


class LoopConnector:
    """Be both halves of one engine's connector."""

    def __init__(self, wire: Wire, side: str, *, ranks: int = 2, repeat: bool = False) -> None:
        self.wire = wire
        self.side = side
        self.workers = [LoopWorker(self) for _ in range(ranks)]
        self.scheduler = self
        self.params: dict[str, Mapping[str, object]] = {}
        self.prompts: dict[str, int] = {}
        self.asked: set[str] = set()
        self.repeat = repeat

    def on_new_request(
        self, request_id: str, params: Mapping[str, object] | None, prompt: Sequence[int], salt: str = ""
    ) -> None:
        self.params[request_id] = params or {}
        self.prompts[request_id] = len(prompt)

    def matched_tokens(self, request_id: str, computed: int) -> tuple[int, bool]:
        wanted = self.prompts[request_id] - 1 - computed
        if wanted <= 0 or "to" not in self.params[request_id] or request_id in self.asked:
            return 0, False
        return wanted, True

    def allocated(self, request_id: str, blocks: tuple[list[int], ...], external: int) -> None:
        if external:
            self.asked.add(request_id)
            end = self.prompts[request_id] - 1
            with self.wire.lock:
                transfer = str(self.params[request_id]["to"])
                self.wire.targets[transfer] = (request_id, blocks[0], end - external, end)

    def build_step(self, step: StepView) -> StepMeta:
        return EMPTY_STEP

    def finished(
        self, request_id: str, aborted: bool, blocks: Sequence[Sequence[int]] | None = None
    ) -> tuple[bool, dict[str, object] | None]:
        transfer = self.params.pop(request_id).get("from")
        if not transfer or aborted or blocks is None:
            return False, None
        with self.wire.lock:
            self.wire.sources[str(transfer)] = (request_id, list(blocks[0]), self.prompts[request_id])
        return True, None

    def loads_ended(self, received: set[str], failed: set[str]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class LoopWorker:
    """Report every answer once; rank 0 makes the copies."""

    def __init__(self, connector: LoopConnector) -> None:
        self.connector = connector
        self.seen = [0, 0]

    def begin_step(self, meta: StepMeta) -> None:
        pass

    def after_forward(self, meta: StepMeta) -> None:
        pass

    def results(self, finished_req_ids: AbstractSet[str]) -> StepResults:
        wire, side = self.connector.wire, self.connector.side
        with wire.lock:
            wire.match()
            sent, received = wire.released[side][self.seen[0] :], wire.arrived[side][self.seen[1] :]
        if not self.connector.repeat:
            self.seen = [self.seen[0] + len(sent), self.seen[1] + len(received)]
        return StepResults(sent=set(sent), received=set(received))


@dataclass
class Pair:
    """Hold the two engines and what they have said."""

    wire: Wire
    results: "queue.Queue[RequestResult]" = field(default_factory=queue.Queue)
    fatal: "queue.Queue[Exception]" = field(default_factory=queue.Queue)

    def transfer(self, number: int, prompt: list[int], output: int = 3) -> None:
        for name, side, most in (("from", "P", 1), ("to", "D", output)):
            spec = RequestSpec(request_id=f"{side}{number}", prompt=prompt, max_tokens=most, params={name: str(number)})
            self.wire.engines[side].submit(spec)

    def collect(self, count: int) -> dict[str, RequestResult]:
        return {result.request_id: result for result in (self.results.get(timeout=WAIT_S) for _ in range(count))}

    def audit(self, side: str) -> EngineReport:
        answer: queue.Queue[EngineReport] = queue.Queue()
        self.wire.engines[side].audit(answer.put)
        return answer.get(timeout=WAIT_S)

    def quiet(self, side: str) -> EngineReport:
        end = time.monotonic() + WAIT_S
        while (report := self.audit(side)).requests and time.monotonic() < end:
            time.sleep(0.005)
        return report


@contextmanager
def pair(*, repeat: bool = False, blocks: int = 48) -> Iterator[Pair]:
    both = Pair(Wire())
    layout = SimLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"blocks": blocks})
    for side in ("P", "D"):
        config = EngineConfig(engine_id=side, layout=layout, max_step_tokens=16, step_s=0.0, idle_step_s=0.0005)
        both.wire.engines[side] = SimEngine(config, both.results.put, both.fatal.put)
    try:
        for side, engine in both.wire.engines.items():
            engine.start(LoopConnector(both.wire, side, repeat=repeat))
        yield both
    finally:
        for engine in both.wire.engines.values():
            engine.stop()


def prompt(number: int, length: int) -> list[int]:
    return [number * 1000 + i for i in range(length)]


def test_both_engines_agree_on_every_byte_and_token() -> None:
    with pair() as both:
        for number in range(20):
            both.transfer(number, prompt(number % 7, 5 + 3 * number))
        results = both.collect(40)
        for number in range(20):
            source, target = results[f"P{number}"], results[f"D{number}"]
            assert source.outcome == target.outcome == "finished"
            assert target.output[0] == source.output[0]
            assert target.checked_bytes
            assert target.mismatched_bytes == target.stray_bytes == 0
        assert any(results[f"D{number}"].external_tokens for number in range(20))
        for side in ("P", "D"):
            report = both.quiet(side)
            assert (report.requests, report.used_blocks, report.mismatched_bytes, report.stray_bytes) == (0, 0, 0, 0)


def test_times_follow_one_another() -> None:
    with pair() as both:
        both.transfer(1, prompt(1, 30))
        results = both.collect(2)
        target = results["D1"]
        assert target.submitted_at <= target.allocated_at <= target.received_at
        assert target.received_at <= target.first_token_at <= target.finished_at
        assert results["P1"].first_token_at <= target.received_at


def test_i5_a_spoilt_byte_is_counted_at_arrival_and_at_the_end() -> None:
    with pair() as both:
        both.wire.spoil = 0x40
        both.transfer(1, prompt(1, 30))
        assert both.collect(2)["D1"].mismatched_bytes == 2 * LAYOUT.tp_size
        assert both.audit("D").mismatched_bytes == 2 * LAYOUT.tp_size


def test_bytes_written_past_the_range_are_counted() -> None:
    with pair() as both:
        both.wire.overrun = 1
        both.transfer(1, prompt(1, 30))
        assert both.collect(2)["D1"].stray_bytes > 0


def test_i2_a_late_write_into_freed_blocks_is_counted() -> None:
    with pair() as both:
        both.transfer(1, prompt(1, 30))
        both.collect(2)
        assert both.quiet("D").stray_bytes == 0
        both.wire.engines["D"].segments[0].view[-1] ^= 1
        assert both.audit("D").stray_bytes == 1


def test_a_double_report_kills_the_engine_with_a_contract_error() -> None:
    with pair(repeat=True) as both:
        both.transfer(1, prompt(1, 9), output=50)
        error = both.fatal.get(timeout=WAIT_S)
        assert isinstance(error, SimContractError)


def test_a_small_cache_preempts_and_still_ends_clean() -> None:
    with pair(blocks=12) as both:
        for number in range(12):
            both.transfer(number, prompt(number, 14), output=20)
        results = both.collect(24)
        assert all(result.outcome == "finished" for result in results.values())
        assert both.quiet("D").preemptions > 0
        assert sum(result.mismatched_bytes + result.stray_bytes for result in results.values()) == 0


def test_a_request_that_can_never_run_is_rejected() -> None:
    with pair() as both:
        both.wire.engines["P"].submit(RequestSpec(request_id="big", prompt=prompt(1, 4000)))
        assert both.collect(1)["big"].outcome == "rejected"


@pytest.mark.parametrize("guard", [True, False])
def test_stop_closes_the_memory(guard: bool) -> None:
    config = EngineConfig(engine_id="P", layout=LAYOUT, guard=guard)
    engine = SimEngine(config, lambda _: None, lambda _: None)
    engine.start(LoopConnector(Wire(), "P"))
    engine.stop()
    engine.stop()
