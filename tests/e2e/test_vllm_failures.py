"""What breaks on the way: clients that leave, sources that die, hostile parameters. Engines live, blocks come back."""

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest
from vllm_support import CHUNK_TOKENS, Pair, Stage, eventually, fresh_prompt

from kvflow.demo.client import CompletionError, complete
from kvflow.ids import new_transfer_id

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(400)]

LONG = 6 * CHUNK_TOKENS


@pytest.fixture(params=["process_pair", "engine_pair"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Pair)
    return found


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await task


async def test_i4_a_client_that_leaves_a_waiting_target_frees_its_blocks(stage: Stage, pair: Pair) -> None:
    transfer_id = new_transfer_id()
    waiting = asyncio.create_task(stage.decode(pair.decode, fresh_prompt(LONG), transfer_id))
    await stage.events.wait_for(transfer_id, "registered")

    async def holds() -> bool:
        return await stage.cache_usage(pair.decode) > 0

    await eventually(holds, 5, "the waiting request holds blocks")
    await _cancel(waiting)
    await stage.events.wait_for(transfer_id, "cancelled")
    await stage.assert_empty(pair.decode)


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.8])
async def test_i2_i3_a_client_that_leaves_in_the_middle_frees_both_sides(
    stage: Stage, pair: Pair, after_s: float
) -> None:
    prompt, transfer_id = fresh_prompt(LONG), new_transfer_id()
    legs = (
        asyncio.create_task(stage.prefill(pair.prefill, prompt, transfer_id)),
        asyncio.create_task(stage.decode(pair.decode, prompt, transfer_id)),
    )
    await asyncio.sleep(after_s)
    await _cancel(*legs)
    await stage.assert_empty(pair.prefill, pair.decode)


async def test_i4_a_source_that_nobody_reads_is_let_go_after_its_lease(stage: Stage, pair: Pair) -> None:
    transfer_id = new_transfer_id()
    assert await stage.prefill(pair.prefill, fresh_prompt(500), transfer_id) == 200
    await stage.events.wait_for(transfer_id, "sealed")
    await stage.assert_empty(pair.prefill, within_s=stage.settings.source_lease_s + 15)


async def test_i4_without_a_source_the_target_computes_the_prompt_itself(stage: Stage, pair: Pair) -> None:
    prompt, transfer_id = fresh_prompt(300), new_transfer_id()
    expected = await stage.expected(prompt, 16)
    answer = await stage.decode(pair.decode, prompt, transfer_id)
    assert answer.tokens == expected
    assert answer.ttft_s < stage.settings.source_wait_s + 10
    failed = [event for event in await stage.events.wait_for(transfer_id, "failed") if event.kind == "failed"]
    assert failed[0].reason == "source_timeout"
    await stage.assert_empty(pair.decode)


async def test_a_prefill_that_is_aborted_and_retried_is_used(stage: Stage, pair: Pair) -> None:
    prompt, transfer_id = fresh_prompt(LONG), new_transfer_id()
    expected = await stage.expected(prompt, 16)
    target = asyncio.create_task(stage.decode(pair.decode, prompt, transfer_id))
    first = asyncio.create_task(stage.prefill(pair.prefill, prompt, transfer_id))
    await stage.events.wait_for(transfer_id, "bound")
    await asyncio.sleep(0.3)
    await _cancel(first)
    assert await stage.prefill(pair.prefill, prompt, transfer_id) == 200
    assert (await target).tokens == expected
    await stage.assert_crossed(transfer_id, pair.movable(LONG))
    await stage.assert_empty(pair.prefill, pair.decode)


async def test_different_prompts_under_one_transfer_id_never_mix(stage: Stage, pair: Pair) -> None:
    for ours, theirs in ((300, 300), (300, 301), (301, 300)):
        prompt, other, transfer_id = fresh_prompt(ours), fresh_prompt(theirs), new_transfer_id()
        expected = await stage.expected(prompt, 16)
        source = asyncio.create_task(stage.prefill(pair.prefill, other, transfer_id))
        answer = await stage.decode(pair.decode, prompt, transfer_id)
        await source
        assert answer.tokens == expected
        assert not stage.events.of(transfer_id, "delivered")
    await stage.assert_empty(pair.decode)
    await stage.assert_empty(pair.prefill, within_s=stage.settings.source_lease_s + 15)


HOSTILE: list[dict[str, Any]] = [
    {},
    {"do_remote_prefill": True},
    {"do_remote_decode": True},
    {"do_remote_prefill": True, "transfer_id": ""},
    {"do_remote_prefill": True, "transfer_id": None},
    {"do_remote_prefill": True, "transfer_id": 7},
    {"do_remote_decode": True, "transfer_id": ["x"]},
    {"do_remote_decode": True, "transfer_id": "x" * 100_000},
    {"do_remote_decode": True, "transfer_id": "\ud800"},
    {"do_remote_decode": True, "transfer_id": "a.>.*  \n\0b", "expected_targets": 1},
    {"do_remote_decode": True, "transfer_id": "ok1", "expected_targets": -1},
    {"do_remote_decode": True, "transfer_id": "ok2", "expected_targets": 1e300},
    {"do_remote_decode": True, "transfer_id": "ok3", "expected_targets": 1 << 70},
    {"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "both"},
    {"do_remote_prefill": "yes", "do_remote_decode": [], "transfer_id": {"a": 1}},
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "10.0.0.1", "remote_port": 1, "tp_size": 0,
     "remote_block_ids": [[1, 2, -3]]},
    {"transfer_id": "ok4", "do_remote_decode": True, "expected_targets": 4000, "nested": {"a": [{"b": None}] * 50}},
]  # fmt: skip


async def test_i7_hostile_parameters_harm_nobody_else(stage: Stage, pair: Pair) -> None:
    async def attack(url: str, params: dict[str, Any]) -> None:
        prompt = fresh_prompt(40)
        with contextlib.suppress(CompletionError):  # that one request may fail
            answer = await complete(stage.session, url, prompt, max_tokens=4, params=params)
            assert answer.tokens == await stage.expected(prompt, 4), params

    for engine in (pair.prefill, pair.decode):
        await asyncio.gather(*(attack(engine.url, params) for params in HOSTILE))
        assert engine.healthy()
    prompt = fresh_prompt(200)
    transfer_id, answer = await stage.both(pair, prompt)
    assert answer.tokens == await stage.expected(prompt, 16)
    await stage.assert_crossed(transfer_id, pair.movable(200))
    await stage.assert_empty(pair.decode)
    await stage.assert_empty(pair.prefill, within_s=stage.settings.source_lease_s + 15)
