"""Engines of different block sizes: tokens are mapped one by one, whatever block they lie in, and none too many."""

import itertools
from functools import partial

import pytest
from vllm_support import Pair, Stage, at_most, fresh_prompt

from kvflow.demo.client import complete

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTHS = (2, 33, 64, 65, 97, 128, 129, 193, 700, 2500)
AT_A_TIME = 8
SEEDS = itertools.count(1_000)


async def _check(stage: Stage, pair: Pair) -> None:
    if pair.atom_tokens > 1:
        pytest.skip("this machine's kernels interleave tokens: only equal blocks can be mapped")
    prompts = [fresh_prompt(length, SEEDS) for length in LENGTHS]
    expected = [await stage.expected(prompt, 16) for prompt in prompts]
    answers = await at_most(AT_A_TIME, [partial(stage.both, pair, prompt) for prompt in prompts])
    assert [answer.tokens for _, answer in answers] == expected
    for prompt, (transfer_id, _) in zip(prompts, answers, strict=True):
        if pair.movable(len(prompt)):
            await stage.assert_crossed(transfer_id, len(prompt) - 1)
    assert len(set(expected)) == len(expected), "the model answers the same to everything: equal tokens prove nothing"


# In this order no test has to wait for more than one pair of engines to start.


async def test_i6_blocks_of_96_into_blocks_of_64(stage: Stage, uneven_pair: Pair) -> None:
    await _check(stage, uneven_pair)


@pytest.mark.parametrize("shared", [64, 192, 960])
async def test_i6_prefixes_that_end_inside_a_block_of_the_other_side(
    stage: Stage, uneven_pair: Pair, shared: int
) -> None:
    if uneven_pair.atom_tokens > 1:
        pytest.skip("this machine's kernels interleave tokens: only equal blocks can be mapped")
    prompt = fresh_prompt(shared + 300, SEEDS)
    await complete(stage.session, uneven_pair.decode.url, prompt[:shared], max_tokens=1)
    await complete(stage.session, uneven_pair.prefill.url, prompt[: shared + 100], max_tokens=1)
    expected = await stage.expected(prompt, 16)
    transfer_id, answer = await stage.both(uneven_pair, prompt)
    assert answer.tokens == expected
    await stage.assert_crossed(transfer_id, len(prompt) - 1 - shared)


async def test_i6_blocks_of_128_into_blocks_of_64(stage: Stage, engine_pair: Pair, uneven_pair: Pair) -> None:
    await _check(stage, Pair(engine_pair.prefill, uneven_pair.decode))


async def test_i6_blocks_of_32_into_blocks_of_128(stage: Stage, process_pair: Pair, engine_pair: Pair) -> None:
    await _check(stage, Pair(process_pair.prefill, engine_pair.decode))
