"""Tokens through two engines are those of one engine, and the KV really crossed: lengths, chunks, blocks, orders."""

import asyncio
from functools import partial

import aiohttp
import pytest
from vllm_support import CHUNK_TOKENS, TOKEN_BYTES, Pair, Stage, at_most, fresh_prompt

from kvflow.demo.client import complete
from kvflow.ids import new_transfer_id
from kvflow.router.app import serving

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 1000, 5000)
AT_A_TIME = 8


async def _check_lengths(stage: Stage, pair: Pair) -> None:
    prompts = [fresh_prompt(length) for length in LENGTHS]
    expected = [await stage.expected(prompt, 16) for prompt in prompts]
    answers = await at_most(AT_A_TIME, [partial(stage.both, pair, prompt) for prompt in prompts])
    assert [answer.tokens for _, answer in answers] == expected
    for prompt, (transfer_id, _) in zip(prompts, answers, strict=True):
        if pair.movable(len(prompt)):
            await stage.assert_crossed(transfer_id, pair.movable(len(prompt)))
        else:
            await stage.events.wait_for(transfer_id, "completed")
    assert len(set(expected)) == len(expected), "the model answers the same to everything: equal tokens prove nothing"


async def test_i5_all_lengths_through_node_processes(stage: Stage, process_pair: Pair) -> None:
    await _check_lengths(stage, process_pair)


async def test_i5_all_lengths_through_agents_in_the_engines(stage: Stage, engine_pair: Pair) -> None:
    await _check_lengths(stage, engine_pair)


async def test_a_long_prompt_is_pushed_while_it_is_computed(stage: Stage, process_pair: Pair) -> None:
    prompt = fresh_prompt(6 * CHUNK_TOKENS + 100)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    delivered = await stage.assert_crossed(transfer_id, process_pair.movable(len(prompt)))
    assert delivered.pieces > 1
    left = delivered.bytes_done - delivered.bytes_early
    assert delivered.bytes_early >= 3 * CHUNK_TOKENS * TOKEN_BYTES, delivered
    assert left <= 3 * CHUNK_TOKENS * TOKEN_BYTES, delivered


@pytest.mark.parametrize("length", [100, 3000])
async def test_a_target_that_registers_long_before_its_source_opens(
    stage: Stage, process_pair: Pair, length: int
) -> None:
    prompt = fresh_prompt(length)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt, prefill_after_s=1.0)
    assert answer.tokens == expected
    assert answer.ttft_s > 1.0
    await stage.assert_crossed(transfer_id, process_pair.movable(length))


@pytest.mark.parametrize("length", [100, 3000])
async def test_late_binding_a_target_that_is_chosen_after_prefill(
    stage: Stage, process_pair: Pair, engine_pair: Pair, length: int
) -> None:
    for pair in (process_pair, engine_pair):
        prompt = fresh_prompt(length)
        expected = await stage.expected(prompt, 16)
        transfer_id = new_transfer_id()
        assert await stage.prefill(pair.prefill, prompt, transfer_id) == 200
        await asyncio.sleep(0.5)
        answer = await stage.decode(pair.decode, prompt, transfer_id)
        assert answer.tokens == expected
        if pair.movable(length):
            await stage.assert_crossed(transfer_id, pair.movable(length))


async def test_one_source_serves_as_many_targets_as_were_announced(stage: Stage, process_pair: Pair) -> None:
    prompt = fresh_prompt(700)
    expected = await stage.expected(prompt, 16)
    transfer_id = new_transfer_id()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.prefill(process_pair.prefill, prompt, transfer_id, targets=3))
        answers = [tasks.create_task(stage.decode(process_pair.decode, prompt, transfer_id)) for _ in range(3)]
    assert [answer.result().tokens for answer in answers] == [expected] * 3
    events = await stage.events.wait(transfer_id, lambda seen: sum(event.kind == "delivered" for event in seen) == 3)
    moved = [event.bytes_done for event in events if event.kind == "delivered"]
    assert moved == [process_pair.movable(700) * TOKEN_BYTES] * 3
    await stage.assert_empty(process_pair.prefill)


async def test_through_the_router_with_several_answers_to_one_prompt(stage: Stage, process_pair: Pair) -> None:
    # vLLM takes n > 1 only when it samples, and bfloat16 logits tie often, even for the best token: so a seed.
    body = {
        "model": "tiny", "prompt": fresh_prompt(500), "max_tokens": 16, "temperature": 1, "top_k": 1, "seed": 7,
        "ignore_eos": True, "n": 2, "return_token_ids": True,
    }  # fmt: skip
    async with stage.session.post(f"{stage.alone.url}/v1/completions", json=body) as alone:
        expected = [choice["token_ids"] for choice in (await alone.json())["choices"]]
    async with (
        serving(stage.settings) as router,
        aiohttp.ClientSession() as client,
        client.post(f"{router}/v1/completions", json=body) as answer,
    ):
        found = await answer.json()
        assert [choice["token_ids"] for choice in found["choices"]] == expected
        transfer_id = answer.headers["x-kvflow-transfer-id"]
    await stage.events.wait(transfer_id, lambda seen: sum(event.kind == "completed" for event in seen) >= 2)


async def test_through_the_router_eight_at_a_time(stage: Stage, process_pair: Pair, engine_pair: Pair) -> None:
    prompts = [fresh_prompt(length) for length in (40, 300, 2000, 41, 700, 90, 1100, 64, 65, 400)]
    expected = [await stage.expected(prompt, 16) for prompt in prompts]
    async with serving(stage.settings) as router:
        answers = await at_most(
            AT_A_TIME, [partial(complete, stage.session, router, prompt, max_tokens=16) for prompt in prompts]
        )
    assert [answer.tokens for answer in answers] == expected
    for prompt, answer in zip(prompts, answers, strict=True):
        events = await stage.events.wait_for(answer.transfer_id, "completed")
        targets = {event.target.engine_id for event in events if event.target is not None}
        (pair,) = (pair for pair in (process_pair, engine_pair) if pair.decode.name in targets)
        await stage.assert_crossed(answer.transfer_id, pair.movable(len(prompt)))
