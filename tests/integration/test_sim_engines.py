"""Simulated engines over real NATS and NIXL, driven into the corners: small caches, other layouts, dead sources."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kvflow.config import Settings
from kvflow.messages import Role
from kvflow.sim.channel import ProcessConfig
from kvflow.sim.control import SimProcess, launch_engine
from kvflow.sim.engine import EngineConfig
from kvflow.sim.layout import SimLayout
from kvflow.sim.load import LoadConfig, plan_load
from kvflow.sim.node import private_node
from kvflow.sim.request import RequestSpec
from kvflow.sim.traffic import Deliveries, Traffic

pytestmark = [pytest.mark.anyio, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(240)]

WAIT_S = 60.0
NUMBERS = itertools.count()


def settings(folder: Path) -> Settings:
    return Settings(
        cluster="sim", runtime_dir=str(folder / "run"), log_level="error", source_wait_s=5.0, source_lease_s=5.0,
        card_ttl_s=4.0, quarantine_s=1.0, stop_grace_s=2.0,
    )  # fmt: skip


@pytest.fixture
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Settings]:
    async with private_node(settings(tmp_path_factory.mktemp("n"))) as reachable:
        yield reachable


@asynccontextmanager
async def pair(
    node: Settings, layout: SimLayout, *, token_s: float = 0.0, target_blocks: int = 0
) -> AsyncIterator[tuple[SimProcess, SimProcess]]:
    def config(role: Role, blocks: int) -> ProcessConfig:
        shape = SimLayout(**{name: getattr(layout, name) for name in layout.__struct_fields__} | {"blocks": blocks})
        engine = EngineConfig(
            engine_id=f"{role}{next(NUMBERS)}", roles=(role,), layout=shape, max_step_tokens=128, token_s=token_s
        )
        return ProcessConfig(engine=engine, settings=node)

    async with (
        launch_engine(config("source", layout.blocks), wait=False) as source,
        launch_engine(config("target", target_blocks or layout.blocks), wait=False) as target,
    ):
        await source.wait_ready()
        await target.wait_ready()
        yield source, target


@pytest.mark.parametrize(("source_blocks", "target_blocks"), [(400, 28), (28, 400)])
async def test_a_small_cache_preempts_and_every_byte_is_still_right(
    node: Settings, source_blocks: int, target_blocks: int
) -> None:
    # One side is ample: with two small ones each could wait for the other until leases end, and transfers would fail.
    layout = SimLayout(layers=2, heads=2, block_tokens=16, blocks=source_blocks)
    async with pair(node, layout, target_blocks=target_blocks) as (source, target):
        traffic = Traffic(source, target, timeout_s=WAIT_S)
        load = LoadConfig(transfers=60, aborts=6, longest=300, output_tokens=60, seed=3)
        await traffic.run(plan_load(load), concurrency=10)
        report = await traffic.report(Deliveries(), WAIT_S)
        assert report.failures == {}
        assert report.mismatched_bytes == report.held_blocks == 0
        assert report.transfers + report.cancelled == 66
        small = source if source_blocks < target_blocks else target
        assert (await small.audit(WAIT_S)).preemptions > 0


async def test_i4_a_killed_source_costs_its_target_a_recomputation_in_bounded_time(node: Settings) -> None:
    layout = SimLayout(layers=2, blocks=256)
    async with pair(node, layout, token_s=0.002) as (source, target):
        prompt = list(range(2000))
        await source.submit(
            RequestSpec(request_id="s", prompt=prompt, params={"transfer_id": "t", "do_remote_decode": True})
        )
        await target.submit(
            RequestSpec(request_id="d", prompt=prompt, params={"transfer_id": "t", "do_remote_prefill": True})
        )
        await anyio.sleep(1.5)  # some chunks have been computed and pushed
        await source.kill()
        result = await target.result("d", WAIT_S)
        assert result.outcome == "finished"
        assert result.loads_failed == 1
        assert result.mismatched_bytes == result.stray_bytes == 0
        report = await target.quiet(WAIT_S)
        assert (report.requests, report.used_blocks, report.mismatched_bytes, report.stray_bytes) == (0, 0, 0, 0)


async def test_i8_aborted_legs_leave_no_blocks_held(node: Settings) -> None:
    layout = SimLayout(layers=2, blocks=256)
    async with pair(node, layout, token_s=0.001) as (source, target):
        prompt = list(range(1000))
        for number, (abort_source, abort_target) in enumerate([(True, False), (False, True), (True, True)]):
            transfer = {"transfer_id": f"t{number}"}
            legs = (f"s{number}", f"d{number}")
            await source.submit(
                RequestSpec(request_id=legs[0], prompt=prompt, params=transfer | {"do_remote_decode": True})
            )
            await target.submit(
                RequestSpec(request_id=legs[1], prompt=prompt, params=transfer | {"do_remote_prefill": True})
            )
            await anyio.sleep(0.3)
            if abort_source:
                await source.abort(legs[0])
            if abort_target:
                await target.abort(legs[1])
            first, second = await source.result(legs[0], WAIT_S), await target.result(legs[1], WAIT_S)
            assert (first.outcome == "aborted") is abort_source
            assert (second.outcome == "aborted") is abort_target
            for engine in (source, target):
                report = await engine.quiet(WAIT_S)
                assert (report.requests, report.used_blocks, report.mismatched_bytes, report.stray_bytes) == (
                    0,
                    0,
                    0,
                    0,
                )
                await engine.drop_cache()


@pytest.mark.parametrize(("order", "packed", "tp_size"), [("NHD", True, 1), ("HND", False, 2)])
async def test_other_layouts_move_as_well(node: Settings, order: str, packed: bool, tp_size: int) -> None:
    layout = SimLayout(layers=2, heads=4, blocks=256, order=order, packed=packed, tp_size=tp_size)  # type: ignore[arg-type]
    async with pair(node, layout) as (source, target):
        traffic = Traffic(source, target, tp_size, timeout_s=WAIT_S)
        await traffic.run(plan_load(LoadConfig(transfers=20, longest=800)), concurrency=6)
        report = await traffic.report(Deliveries(), WAIT_S)
        assert report.failures == {}
        assert report.mismatched_bytes == report.held_blocks == 0
        assert report.transfers == 20
