"""Prefix caches on either side: blocks are paired by position, and only what is missing crosses."""

import pytest
from vllm_support import CHUNK_TOKENS, TOKEN_BYTES, Pair, Stage, fresh_prompt

from kvflow.demo.client import complete

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(400)]

SHARED = 992  # whole blocks, so that it is cached entirely


async def test_i6_a_prefix_that_the_target_has_is_not_sent(stage: Stage, process_pair: Pair) -> None:
    shared = fresh_prompt(SHARED)
    await complete(stage.session, process_pair.decode.url, shared, max_tokens=1)
    prompt = shared + fresh_prompt(333)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.assert_crossed(transfer_id, process_pair.movable(len(prompt), SHARED))


async def test_a_prefix_that_the_source_has_goes_at_once(stage: Stage, process_pair: Pair) -> None:
    shared = fresh_prompt(3 * CHUNK_TOKENS)
    await complete(stage.session, process_pair.prefill.url, shared, max_tokens=1)
    prompt = shared + fresh_prompt(2 * CHUNK_TOKENS)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    delivered = await stage.assert_crossed(transfer_id, process_pair.movable(len(prompt)))
    assert delivered.bytes_early >= len(shared) * TOKEN_BYTES


async def test_i6_prefixes_of_different_lengths_on_both_sides(stage: Stage, process_pair: Pair) -> None:
    prompt = fresh_prompt(1500)
    await complete(stage.session, process_pair.decode.url, prompt[:320], max_tokens=1)
    await complete(stage.session, process_pair.prefill.url, prompt[:960], max_tokens=1)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.assert_crossed(transfer_id, process_pair.movable(len(prompt), 320))


async def test_a_prompt_that_the_source_has_wholly(stage: Stage, process_pair: Pair) -> None:
    prompt = fresh_prompt(SHARED)
    await complete(stage.session, process_pair.prefill.url, prompt, max_tokens=1)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.assert_crossed(transfer_id, process_pair.movable(len(prompt)))


@pytest.mark.parametrize("length", [SHARED, SHARED + 1, SHARED + 7])
async def test_a_prompt_that_the_target_has_wholly_lets_the_source_go(
    stage: Stage, process_pair: Pair, length: int
) -> None:
    prompt = fresh_prompt(length)
    await complete(stage.session, process_pair.decode.url, prompt, max_tokens=1)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.events.wait_for(transfer_id, "completed", "released")
    assert not stage.events.of(transfer_id, "delivered")
    await stage.assert_empty(process_pair.prefill)


async def test_the_same_prompt_again_crosses_only_once(stage: Stage, process_pair: Pair) -> None:
    prompt = fresh_prompt(640)
    expected = await stage.expected(prompt, 16)
    first, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.assert_crossed(first, process_pair.movable(640))
    second, answer = await stage.both(process_pair, prompt)
    assert answer.tokens == expected
    await stage.events.wait_for(second, "completed", "released")
    assert not stage.events.of(second, "delivered")
