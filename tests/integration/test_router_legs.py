"""The router in front of real HTTP servers: which legs are sent, with what, and what the client sees."""

import asyncio
import json

import aiohttp
import pytest
from router_fakes import FakeEngine, completion, routed

from kvflow.router.proxy import Policy

pytestmark = pytest.mark.anyio


async def test_both_legs_go_out_at_once_and_the_decode_bytes_come_back_unchanged() -> None:
    prefill, decode = FakeEngine("p", hold=True), FakeEngine("d")
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        # The prefill leg never answers in time: the answer does not wait for it.
        async with client.post("/v1/completions", json=completion()) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["X-Engine"] == "d"
            assert await answer.read() == b"".join(decode.chunks)
            transfer_id = answer.headers["x-kvflow-transfer-id"]
        assert prefill.seen[0].params == {
            "transfer_id": transfer_id, "do_remote_decode": True, "do_remote_prefill": False, "expected_targets": 1,
        }  # fmt: skip
        assert decode.seen[0].params == {
            "transfer_id": transfer_id, "do_remote_decode": False, "do_remote_prefill": True,
        }  # fmt: skip
        prefill.let_go.set()
        await prefill.wait_for(lambda one: one.seen[0].finished)
        assert not prefill.seen[0].aborted


async def test_the_prefill_leg_is_valid_whatever_shapes_the_answer() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    request = completion(
        n=3, max_tokens=100, min_tokens=50, stop=["x"], logprobs=5, stream_options={"include_usage": True}, seed=3,
        temperature=0,
    )  # fmt: skip
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        async with client.post("/v1/completions", json=request) as answer:
            await answer.read()
        await prefill.wait_for(lambda one: bool(one.seen))
    leg = prefill.seen[0].body
    assert leg["kv_transfer_params"]["expected_targets"] == 3
    del leg["kv_transfer_params"]
    assert leg == {
        "model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 1, "n": 1, "stream": False, "seed": 3, "temperature": 0,
    }  # fmt: skip
    answered = decode.seen[0].body
    del answered["kv_transfer_params"]
    assert answered == request


async def test_client_sent_transfer_parameters_never_reach_an_engine() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    evil = {"transfer_id": "mine", "remote_host": "10.0.0.1", "do_remote_prefill": True}
    sent = completion(kv_transfer_params=evil, vllm_xargs={"kv_transfer_params": "x", "kept": 1})
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        for prompt in ([1, 2], ["several", "prompts"]):
            async with client.post("/v1/completions", json={**sent, "prompt": prompt}) as answer:
                await answer.read()
    for seen in (*prefill.seen, *decode.seen):
        assert "mine" not in json.dumps(seen.body)
        assert seen.body["vllm_xargs"] == {"kept": 1}
    assert decode.seen[1].params == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"echo": True},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
    ],
)
async def test_what_cannot_be_one_transfer_goes_to_the_decode_engine_alone(fields: dict[str, object]) -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    async with (
        routed(("prefill", prefill), ("decode", decode)) as client,
        client.post("/v1/completions", json=completion(**fields)) as answer,
    ):
        assert answer.status == 200
        assert "x-kvflow-transfer-id" not in answer.headers
    assert not prefill.seen
    assert decode.seen[0].params == {}


async def test_chat_and_unstreamed_answers_take_the_same_way() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d", chunks=(b'{"choices":', b"[]}"))
    request = {"model": "tiny", "messages": [{"role": "user", "content": "t5"}], "max_completion_tokens": 9}
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        async with client.post("/v1/chat/completions", json=request) as answer:
            assert await answer.json() == {"choices": []}
            assert answer.headers["Content-Length"] == "14"
        await prefill.wait_for(lambda one: bool(one.seen))
    assert prefill.seen[0].path == "/v1/chat/completions"
    assert prefill.seen[0].body["max_tokens"] == 1
    assert "max_completion_tokens" not in prefill.seen[0].body


async def test_headers_pass_and_the_request_id_is_given_or_drawn() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    headers = {"Authorization": "Bearer k", "traceparent": "00-1-2-01", "X-Request-Id": "mine"}
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        async with client.post("/v1/completions", json=completion(), headers=headers) as answer:
            assert answer.headers["X-Request-Id"] == "mine"
        async with client.post("/v1/completions", json=completion()) as answer:
            drawn = answer.headers["X-Request-Id"]
        await prefill.wait_for(lambda one: len(one.seen) == 2)
    for engine in (prefill, decode):
        assert [engine.seen[0].headers[name.lower()] for name in headers] == list(headers.values())
        assert engine.seen[1].headers["x-request-id"] == drawn


async def test_deferred_mode_asks_decode_only_after_prefill() -> None:
    prefill, decode = FakeEngine("p", hold=True), FakeEngine("d")
    async with routed(("prefill", prefill), ("decode", decode), policy=Policy(mode="deferred")) as client:
        sent = asyncio.create_task(client.post("/v1/completions", json=completion()))
        await prefill.wait_for(lambda one: bool(one.seen))
        await asyncio.sleep(0.05)
        assert not decode.seen
        prefill.let_go.set()
        async with await sent as answer:
            assert answer.status == 200
    assert decode.seen[0].params["transfer_id"] == prefill.seen[0].params["transfer_id"]


async def test_short_prompts_stay_local_when_told_so() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    async with routed(("prefill", prefill), ("decode", decode), policy=Policy(local_below_tokens=10)) as client:
        for tokens in (9, 10):
            async with client.post("/v1/completions", json=completion(prompt=[7] * tokens)) as answer:
                await answer.read()
    assert [bool(seen.params) for seen in decode.seen] == [False, True]


async def test_load_spreads_over_engines() -> None:
    prefills = [FakeEngine(f"p{n}") for n in range(2)]
    decodes = [FakeEngine(f"d{n}", hold=True) for n in range(2)]
    engines = [("prefill", one) for one in prefills] + [("decode", one) for one in decodes]

    async def ask(client: aiohttp.ClientSession) -> None:
        async with client.post("/v1/completions", json=completion()) as answer:
            await answer.read()

    async with routed(*engines) as client, asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(ask(client))
        for decode in decodes:
            await decode.wait_for(lambda one: len(one.seen) == 3)
            decode.let_go.set()
    assert [len(one.seen) for one in prefills] == [3, 3]
