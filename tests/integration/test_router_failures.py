"""The router when something breaks: clients that go, engines that die, refuse or never answer, and bad requests."""

import asyncio
import io

import aiohttp
import pytest
from router_fakes import FakeEngine, completion, routed

from kvflow.config import Settings
from kvflow.errors import ConfigError
from kvflow.router.app import serving
from kvflow.router.proxy import Policy

pytestmark = pytest.mark.anyio

QUICK = Policy(patience_s=0.1, connect_s=1.0)


async def test_a_client_that_goes_aborts_both_legs() -> None:
    prefill, decode = FakeEngine("p", hold=True), FakeEngine("d", hold=True)
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        sent = asyncio.create_task(client.post("/v1/completions", json=completion()))
        for engine in (prefill, decode):
            await engine.wait_for(lambda one: bool(one.seen))
        sent.cancel()
        for engine in (prefill, decode):
            await engine.wait_for(lambda one: one.seen[0].aborted)


async def test_a_client_that_goes_in_the_middle_of_the_stream_aborts_decode() -> None:
    endless = (b"data: 1\n\n" * 10_000,) * 10_000  # far more than all buffers on the way hold
    prefill, decode = FakeEngine("p"), FakeEngine("d", chunks=endless)
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        answer = await client.post("/v1/completions", json=completion())
        await answer.content.readany()
        answer.close()
        await decode.wait_for(lambda one: one.seen[0].aborted)


async def test_a_failed_prefill_is_retried_elsewhere_under_the_same_transfer_id() -> None:
    broken, healthy, decode = FakeEngine("a", cut_before_answer=True), FakeEngine("b"), FakeEngine("d", hold=True)
    engines = [("prefill", broken), ("prefill", healthy), ("decode", decode)]
    async with routed(*engines, policy=Policy(patience_s=5)) as client:
        for _ in range(2):  # one of the two meets the broken engine first
            sent = asyncio.create_task(client.post("/v1/completions", json=completion()))
            await asyncio.sleep(0.1)
            decode.let_go.set()
            async with await sent as answer:
                assert answer.status == 200
    assert broken.seen
    assert {seen.params["transfer_id"] for seen in healthy.seen} == {seen.params["transfer_id"] for seen in decode.seen}
    assert not any(seen.aborted for seen in decode.seen)


async def test_when_prefill_fails_for_good_decode_computes_by_itself() -> None:
    prefill, decode = FakeEngine("p", status=500), FakeEngine("d", hold=True)
    async with routed(("prefill", prefill), ("decode", decode), policy=QUICK) as client:
        sent = asyncio.create_task(client.post("/v1/completions", json=completion()))
        await decode.wait_for(lambda one: len(one.seen) == 2)
        await decode.wait_for(lambda one: one.seen[0].aborted)
        assert decode.seen[1].params == {}
        decode.let_go.set()
        async with await sent as answer:
            assert await answer.read() == b"".join(decode.chunks)
            assert "x-kvflow-transfer-id" not in answer.headers


async def test_an_invalid_request_gets_the_decode_engines_own_answer() -> None:
    mine = b'{"error":{"message":"max_tokens is too large","type":"BadRequestError","param":null,"code":400}}'
    prefill, decode = FakeEngine("p", status=400), FakeEngine("d", status=400, error=mine)
    async with (
        routed(("prefill", prefill), ("decode", decode)) as client,
        client.post("/v1/completions", json=completion()) as answer,
    ):
        assert answer.status == 400
        assert await answer.read() == mine
    assert len(decode.seen) == 1


async def test_a_refused_answer_aborts_the_prefill_leg() -> None:
    prefill, decode = FakeEngine("p", hold=True), FakeEngine("d", status=422)
    async with routed(("prefill", prefill), ("decode", decode)) as client:
        async with client.post("/v1/completions", json=completion()) as answer:
            assert answer.status == 422
        if prefill.seen:
            await prefill.wait_for(lambda one: one.seen[0].aborted)


async def test_a_decode_engine_that_cannot_be_reached_is_replaced_under_the_same_transfer_id() -> None:
    prefill, gone, decode = FakeEngine("p", hold=True), FakeEngine("a"), FakeEngine("b")
    async with routed(("prefill", prefill), ("decode", gone), ("decode", decode), policy=QUICK) as client:
        await gone.stop()
        for _ in range(2):
            async with client.post("/v1/completions", json=completion()) as answer:
                assert answer.headers["X-Engine"] == "b"
        assert [seen.params["transfer_id"] for seen in prefill.seen] == [
            seen.params["transfer_id"] for seen in decode.seen
        ]
        assert not any(seen.aborted for seen in prefill.seen)
        prefill.let_go.set()


async def test_a_decode_engine_that_dies_before_the_first_token_is_replaced_with_a_new_transfer() -> None:
    prefill, dying, decode = FakeEngine("p"), FakeEngine("a", cut_before_answer=True), FakeEngine("b")
    async with routed(("prefill", prefill), ("decode", dying), ("decode", decode), policy=QUICK) as client:
        for _ in range(2):
            async with client.post("/v1/completions", json=completion()) as answer:
                assert await answer.read() == b"".join(decode.chunks)
    assert dying.seen
    used = {seen.params["transfer_id"] for seen in dying.seen}
    assert used.isdisjoint(seen.params["transfer_id"] for seen in decode.seen)


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d", cut_after_chunks=1)
    async with (
        routed(("prefill", prefill), ("decode", decode)) as client,
        client.post("/v1/completions", json=completion()) as answer,
    ):
        text = await answer.read()
    assert text.startswith(decode.chunks[0])
    assert b'data: {"error":' in text
    assert b"[DONE]" not in text


async def test_without_a_pair_one_engine_answers_unless_forbidden() -> None:
    alone = FakeEngine("x")
    async with routed(("aggregated", alone)) as client, client.post("/v1/completions", json=completion()) as answer:
        assert answer.status == 200
    assert alone.seen[0].params == {}
    async with (
        routed(("decode", FakeEngine("d")), policy=Policy(fallback=False)) as client,
        client.post("/v1/completions", json=completion()) as answer,
    ):
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_engine_pair"
    async with routed(("prefill", FakeEngine("p"))) as client:
        async with client.post("/v1/completions", json=completion()) as answer:
            assert answer.status == 503
        async with client.get("/health") as answer:
            assert answer.status == 503


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b'{"model":7}', 400),
        ("POST", "/v1/completions", b'{"model":"other","prompt":"a"}', 404),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"' + b"a" * 2_000_000 + b'"}', 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/nothing", b"", 404),
        ("GET", "/v1/models/other", b"", 404),
    ],
)
async def test_errors_have_openais_shape(method: str, path: str, body: bytes, status: int) -> None:
    decode = FakeEngine("d")
    async with (
        routed(("decode", decode), max_body_bytes=1_000_000) as client,
        client.request(method, path, data=io.BytesIO(body) if body else None) as answer,
    ):
        assert answer.status == status
        error = (await answer.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["X-Request-Id"]
    assert not decode.seen


async def test_models_and_health() -> None:
    async with routed(("prefill", FakeEngine("p")), ("decode", FakeEngine("d"))) as client:
        async with client.get("/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["tiny"]
        async with client.get("/v1/models/tiny") as answer:
            assert (await answer.json())["id"] == "tiny"
        async with client.get("/health") as answer:
            assert await answer.json() == {"status": "ok", "engines": 2, "prefill": 1, "decode": 1}


async def test_an_unnamed_model_is_the_only_one_served() -> None:
    engines = [("decode", FakeEngine("d"))]
    request = {"prompt": [1, 2]}
    async with routed(*engines) as client, client.post("/v1/completions", json=request) as answer:
        assert answer.status == 200
    two = [("decode", FakeEngine("d")), ("decode", FakeEngine("e", model="other"))]
    async with routed(*two) as client, client.post("/v1/completions", json=request) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "model"


async def test_an_engine_that_comes_back_is_used_again() -> None:
    decode = FakeEngine("d")
    await decode.start()
    try:
        async with (
            serving(Settings(), engines=[f"decode={decode.url}", "prefill=http://127.0.0.1:9"]) as url,
            aiohttp.ClientSession(url) as client,
            client.post("/v1/completions", json=completion()) as answer,
        ):
            assert answer.status == 200
    finally:
        await decode.stop()


async def test_a_router_without_any_source_of_engines_says_so() -> None:
    with pytest.raises(ConfigError, match="knows no engines"):
        async with serving(Settings()):
            pass
    for bad in ("decode", "cook=http://x", "decode=ftp://x", "decode=http://"):
        with pytest.raises(ConfigError, match="is not an engine"):
            async with serving(Settings(), engines=[bad]):
                pass
