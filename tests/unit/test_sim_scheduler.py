"""The simulated scheduler: vLLM's order of calls, and its assertions as errors."""

import random
from collections.abc import Mapping, Sequence

import pytest

from kvflow.errors import ConfigError
from kvflow.sim.blocks import BlockPool
from kvflow.sim.contract import SimContractError
from kvflow.sim.request import RequestSpec, SimRequest, Status
from kvflow.sim.scheduler import LoadFailurePolicy, SimScheduler, StepPlan

BLOCK = 4


class Hooks:
    """Answer as told, and write down what the scheduler called."""

    def __init__(self) -> None:
        self.external: dict[str, tuple[int, bool]] = {}
        self.hold: set[str] = set()
        self.calls: list[tuple[object, ...]] = []

    def on_new_request(
        self, request_id: str, params: Mapping[str, object] | None, prompt: Sequence[int], salt: str = ""
    ) -> None:
        self.calls.append(("new", request_id, len(prompt)))

    def matched_tokens(self, request_id: str, computed: int) -> tuple[int, bool]:
        total, background = self.external.get(request_id, (0, False))
        return (total - computed, background) if total > computed else (0, False)

    def allocated(self, request_id: str, blocks: tuple[list[int], ...], external: int) -> None:
        self.calls.append(("allocated", request_id, len(blocks[0]), external))

    def finished(
        self, request_id: str, aborted: bool, blocks: Sequence[Sequence[int]] | None = None
    ) -> tuple[bool, dict[str, object] | None]:
        self.calls.append(("finished", request_id, aborted))
        return request_id in self.hold, None

    def loads_ended(self, received: set[str], failed: set[str]) -> None:
        self.calls.append(("loads_ended", received, failed))


class Bench:
    """Hold a scheduler with its surroundings, and step it without an engine."""

    def __init__(
        self, blocks: int = 16, step: int = 8, running: int = 4, failure: LoadFailurePolicy = "recompute"
    ) -> None:
        self.hooks = Hooks()
        self.loaded: list[str] = []
        self.ended: dict[str, str] = {}
        self.pool = BlockPool(blocks)
        self.scheduler = SimScheduler(
            self.hooks,
            self.pool,
            block_tokens=BLOCK,
            max_step_tokens=step,
            max_running=running,
            load_failure=failure,
            on_loaded=lambda request: self.loaded.append(request.request_id),
            on_end=self.end,
        )

    def end(self, request: SimRequest) -> None:
        self.ended[request.request_id] = request.outcome

    def add(self, name: str, prompt: int, output: int = 1) -> SimRequest:
        # Distinct tokens per name: no accidental prefix hits.
        tokens = [sum(name.encode()) * 1000 + i for i in range(prompt)]
        return self.scheduler.add(RequestSpec(request_id=name, prompt=tokens, max_tokens=output))

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.computed(plan)
        return plan

    def chunks(self) -> list[tuple[str, int, int]]:
        return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in self.step().chunks]


def test_prefill_is_cut_into_chunks_and_batches_continue() -> None:
    bench = Bench(step=8)
    bench.add("a", 10, output=3)
    bench.add("b", 5)
    assert bench.chunks() == [("a", 0, 8)]
    assert bench.chunks() == [("a", 8, 10), ("b", 0, 5)]
    assert bench.ended == {"b": "finished"}
    assert bench.chunks() == [("a", 10, 11)]
    assert bench.chunks() == [("a", 11, 12)]
    assert bench.ended["a"] == "finished"
    assert bench.step().finished == {"a"}
    assert not bench.scheduler.busy
    assert bench.pool.used == 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench(step=64)
    tokens = list(range(12))
    bench.scheduler.add(RequestSpec(request_id="a", prompt=tokens))
    bench.step()
    again = bench.scheduler.add(RequestSpec(request_id="b", prompt=tokens))
    assert bench.chunks() == [("b", 8, 12)], "the last token is always computed, hence its block"
    assert again.local_hit_tokens == 8


def test_a_remote_prefix_waits_holding_its_blocks() -> None:
    bench = Bench(step=64)
    bench.hooks.external["d"] = (9, True)
    request = bench.add("d", 10)
    assert bench.chunks() == []
    assert request.status is Status.LOADING
    assert bench.pool.used == 3
    assert not bench.scheduler.runnable
    assert ("allocated", "d", 3, 9) in bench.hooks.calls
    bench.scheduler.reported(set(), {"d"}, set())
    assert bench.loaded == ["d"]
    assert bench.chunks() == [("d", 9, 10)]
    assert bench.ended == {"d": "finished"}
    assert bench.pool.used == 0


def test_waiting_loads_do_not_stop_others() -> None:
    bench = Bench(step=64)
    bench.hooks.external["d"] = (9, True)
    bench.add("d", 10)
    bench.add("local", 6)
    assert bench.chunks() == [("local", 0, 6)]


@pytest.mark.parametrize(("policy", "outcome"), [("recompute", "finished"), ("fail", "load_failed")])
def test_a_failed_load_is_computed_locally_or_fails(policy: LoadFailurePolicy, outcome: str) -> None:
    bench = Bench(step=64, failure=policy)
    bench.hooks.external["d"] = (9, True)
    bench.add("d", 10)
    bench.step()
    bench.hooks.external.clear()
    bench.scheduler.reported(set(), set(), {"d"})
    bench.step()
    assert bench.ended == {"d": outcome}
    assert bench.pool.used == 0


def test_i2_an_aborted_load_keeps_its_blocks_until_reported() -> None:
    bench = Bench()
    bench.hooks.external["d"] = (9, True)
    bench.add("d", 10)
    bench.step()
    bench.scheduler.abort("d")
    bench.scheduler.abort("d")
    assert bench.ended == {"d": "aborted"}
    assert bench.pool.used == 3
    bench.scheduler.reported(set(), set(), {"d"})
    assert bench.pool.used == 0
    bench.step()
    assert not bench.scheduler.busy


def test_i3_a_held_source_keeps_its_blocks_until_sent() -> None:
    bench = Bench()
    bench.hooks.hold.add("s")
    bench.add("s", 6)
    bench.step()
    assert bench.ended == {"s": "finished"}
    bench.step()
    assert bench.pool.used == 2
    assert bench.scheduler.busy
    bench.scheduler.reported({"s"}, set(), set())
    assert bench.pool.used == 0


def test_out_of_blocks_preempts_the_youngest_and_recomputes_it() -> None:
    bench = Bench(blocks=6, step=64)
    first = bench.add("a", 8, output=9)
    second = bench.add("b", 8, output=9)
    preempted: set[str] = set()
    for _ in range(60):
        preempted |= bench.step().preempted
    assert preempted == {"b"}
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert bench.ended == {"a": "finished", "b": "finished"}
    assert bench.pool.used == 0


def test_loaded_requests_run_though_one_before_them_does_not_fit() -> None:
    bench = Bench(blocks=6, step=64)
    for name in ("x", "y"):
        bench.hooks.external[name] = (8, True)
        bench.add(name, 9, output=2)
    bench.step()
    assert bench.pool.used == 6, "three blocks each: two loaded, and one for the last prompt token"
    bench.add("big", 20)
    bench.scheduler._waiting.insert(0, bench.scheduler._waiting.pop())
    bench.scheduler.reported(set(), {"x", "y"}, set())
    for _ in range(8):
        bench.step()
    assert bench.ended == {"x": "finished", "y": "finished", "big": "finished"}


def test_the_first_admission_tells_the_local_hit() -> None:
    bench = Bench(blocks=8, step=64)
    tokens = list(range(13))
    bench.scheduler.add(RequestSpec(request_id="a", prompt=tokens))
    bench.step()
    again = bench.scheduler.add(RequestSpec(request_id="b", prompt=tokens, max_tokens=4))
    bench.step()
    assert again.local_hit_tokens == 12
    bench.scheduler._running.remove(again)
    bench.scheduler._preempt(again)
    bench.pool.drop_cached()
    bench.step()
    assert again.local_hit_tokens == 12


def test_contract_errors_where_vllm_asserts() -> None:
    bench = Bench()
    bench.hooks.external["d"] = (9, True)
    bench.add("d", 10)
    bench.add("run", 5, output=4)
    report = bench.scheduler.reported
    with pytest.raises(SimContractError, match="which is waiting"):
        report(set(), {"run"}, set())
    bench.step()
    with pytest.raises(SimContractError, match="unknown"):
        report(set(), {"ghost"}, set())
    with pytest.raises(SimContractError, match="unknown"):
        report({"ghost"}, set(), set())
    with pytest.raises(SimContractError, match="not held"):
        report({"run"}, set(), set())
    with pytest.raises(SimContractError, match="which is running"):
        report(set(), {"run"}, set())
    report(set(), {"d"}, set())
    with pytest.raises(SimContractError, match="twice"):
        report(set(), {"d"}, set())


def test_a_load_of_an_ended_request_is_reported_once() -> None:
    bench = Bench()
    bench.hooks.hold.add("s")
    bench.add("s", 5)
    bench.step()
    with pytest.raises(SimContractError, match="waits for none"):
        bench.scheduler.reported(set(), {"s"}, set())


@pytest.mark.parametrize("answer", [(99, True), (-1, True), (4, False), (0, True)])
def test_impossible_matches_are_contract_errors(answer: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.hooks, "matched_tokens", lambda *_: answer)
    bench.add("d", 10)
    with pytest.raises(SimContractError):
        bench.step()


def test_requests_that_can_never_run_are_refused() -> None:
    bench = Bench(blocks=2)
    with pytest.raises(ConfigError, match="3 blocks of 2"):
        bench.add("big", 8)
    with pytest.raises(ConfigError, match="prompt"):
        bench.add("empty", 0)
    bench.add("a", 3)
    with pytest.raises(ConfigError, match="exists"):
        bench.add("a", 3)


@pytest.mark.parametrize("seed", range(20))
def test_i8_random_loads_end_and_leave_nothing(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(blocks=12, step=draw.choice([3, 8, 64]), running=draw.choice([1, 3, 8]))
    names = [f"r{i}" for i in range(25)]
    for name in names:
        prompt = draw.randint(1, 30)
        if prompt > 1 and draw.random() < 0.5:
            bench.hooks.external[name] = (prompt - 1, True)
        elif draw.random() < 0.5:
            bench.hooks.hold.add(name)
        bench.add(name, prompt, output=draw.randint(1, 8))
    for _ in range(3000):
        bench.step()
        if draw.random() < 0.05:
            bench.scheduler.abort(draw.choice(names))
        requests = list(bench.scheduler.requests.values())
        loads = {r.request_id for r in requests if r.status is Status.LOADING or r.awaits_load}
        loads -= bench.scheduler._load_reports.keys()
        sends = {r.request_id for r in requests if r.awaits_sent}
        received = {name for name in loads if draw.random() < 0.3}
        failed = {name for name in received if draw.random() < 0.3}
        for name in failed:
            bench.hooks.external.pop(name, None)
        bench.scheduler.reported({name for name in sends - loads if draw.random() < 0.3}, received, failed)
        if not bench.scheduler.busy:
            break
    assert bench.ended.keys() == set(names)
    assert not bench.scheduler.busy
    assert bench.pool.used == 0
