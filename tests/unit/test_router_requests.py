"""Reading clients' requests and making legs of them: whatever a client sends, nothing but ApiError comes out."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.bus import guard
from kvflow.router import proxy
from kvflow.router.errors import ApiError
from kvflow.router.legs import Kind, decode_body, local_body, parse_request, prefill_body


def parsed(**fields: Any) -> Any:
    return parse_request("completions", json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("prompt", "tokens", "transferable"),
    [
        ("t5 t6 t7 t8 t9", 3, True),
        ([1, 2, 3], 3, True),
        (["one text"], 2, True),
        ([[1, 2]], 2, True),
        (["a", "b"], 0, False),
        ([[1], [2]], 0, False),
        ([], 0, False),
        ([[]], 0, False),
        ([[[1]]], 0, False),
        ([1.5], 1, True),  # not the router's business: both engines refuse it
        ({}, 0, False),
        (None, 0, False),
        (7, 0, False),
    ],
)
def test_which_prompts_can_be_one_transfer(prompt: object, tokens: int, transferable: bool) -> None:
    request = parsed(prompt=prompt)
    assert request.prompt_tokens == tokens
    assert (request.not_transferable == "") is transferable


@pytest.mark.parametrize(("n", "targets"), [(1, 1), (4, 4), (None, 1)])
def test_n_says_how_many_read_the_source(n: int | None, targets: int) -> None:
    request = parsed(prompt="a", n=n)
    assert request.targets == targets
    assert not request.not_transferable


@pytest.mark.parametrize("n", [0, -1, 1e9, "2", 1.5, [1]])
def test_a_strange_n_is_left_to_the_engine(n: object) -> None:
    request = parsed(prompt="a", n=n)
    assert request.not_transferable
    assert json.loads(local_body(request))["n"] == n


def test_numbers_and_unicode_pass_unchanged() -> None:
    body = b'{"prompt":"\\u00fc\xc3\xbc","temperature":1e-07,"seed":12345678901234567890}'
    assert local_body(parse_request("completions", body)) == body


def test_the_last_of_repeated_transfer_parameters_is_stripped_too() -> None:
    body = b'{"prompt":"a","kv_transfer_params":{},"kv_transfer_params":{"x":1},"kv_transfer_p\\u0061rams":{"y":1}}'
    request = parse_request("completions", body)
    assert local_body(request) == b'{"prompt":"a"}'
    assert json.loads(decode_body(request, {"transfer_id": "t"}))["kv_transfer_params"]["transfer_id"] == "t"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    ["prompt", "messages", "model", "n", "stream", "max_tokens", "kv_transfer_params", "vllm_xargs", "echo", "stop"]
)


@given(st.dictionaries(names, json_values))
@settings(deadline=None, max_examples=200)
def test_i7_any_object_becomes_valid_legs_or_an_api_error(fields: dict[str, Any]) -> None:
    kinds: tuple[Kind, ...] = ("completions", "chat")
    for kind in kinds:
        try:
            request = parse_request(kind, json.dumps(fields).encode())
        except ApiError:
            continue
        expected = {name: value for name, value in fields.items() if name not in {"kv_transfer_params", "vllm_xargs"}}
        alone = json.loads(local_body(request))
        assert "kv_transfer_params" not in alone
        alone.pop("vllm_xargs", None)
        assert alone == expected
        leg = json.loads(prefill_body(request, {"transfer_id": "t"}))
        assert (leg["max_tokens"], leg["n"], leg["stream"]) == (1, 1, False)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_i7_any_bytes_are_a_request_or_an_api_error(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        parse_request("completions", body)


def test_an_api_error_says_what_is_wrong_in_openais_shape() -> None:
    with pytest.raises(ApiError) as caught:
        parse_request("completions", b"{")
    assert caught.value.status == 400
    error = json.loads(caught.value.body())["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_json", None)


@pytest.mark.anyio
async def test_i4_leg_that_cannot_be_cancelled_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CANCEL_WAIT_S", 0.01)
    let_go = asyncio.Event()

    async def stubborn() -> proxy.PrefillOutcome:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        return "done"

    leg = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    began = time.monotonic()
    await proxy._cancel(leg)
    assert time.monotonic() - began < 5
    assert not leg.done()
    let_go.set()
    await leg
