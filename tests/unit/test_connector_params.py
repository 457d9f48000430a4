from collections.abc import Mapping

import pytest
from connector_fakes import scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.connector.params import MAX_EXPECTED_TARGETS, Malformed, Wish, parse_params
from kvflow.connector.step import StepView
from kvflow.messages import encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["transfer_id", "do_remote_decode", "do_remote_prefill", "expected_targets", "remote_host"])
PARAMS = VALUES | st.dictionaries(KEYS | st.text(max_size=10), VALUES, max_size=6)


def test_source_and_target_are_told_apart() -> None:
    assert parse_params({"transfer_id": "a", "do_remote_decode": True}) == Wish("a", source=True)
    assert parse_params({"transfer_id": "a", "do_remote_prefill": True, "do_remote_decode": False}) == Wish(
        "a", source=False
    )
    assert parse_params({"transfer_id": "a", "do_remote_decode": True, "expected_targets": 3}) == Wish(
        "a", source=True, expected_targets=3
    )


@pytest.mark.parametrize("params", [None, {}, {"transfer_id": "a"}, {"do_remote_decode": False}])
def test_nothing_asked_for_is_nothing(params: object) -> None:
    assert parse_params(params) is None


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ([], "list"),
        ({"do_remote_decode": True}, "missing"),
        ({"do_remote_decode": 1, "transfer_id": "a"}, "int"),
        ({"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "a"}, "both"),
        ({"do_remote_decode": True, "transfer_id": ""}, "non-empty"),
        ({"do_remote_decode": True, "transfer_id": 7}, "non-empty"),
        ({"do_remote_decode": True, "transfer_id": "x" * 257}, "257"),
        ({"do_remote_decode": True, "transfer_id": "\ud800"}, "Unicode"),
        ({"do_remote_decode": True, "transfer_id": "a", "expected_targets": True}, "expected_targets"),
        ({"do_remote_decode": True, "transfer_id": "a", "expected_targets": 0}, "expected_targets"),
        ({"do_remote_decode": True, "transfer_id": "a", "expected_targets": MAX_EXPECTED_TARGETS + 1}, "whole number"),
    ],
)
def test_what_is_wrong_is_named(params: object, word: str) -> None:
    found = parse_params(params)
    assert isinstance(found, Malformed)
    assert word in found.reason


@given(PARAMS)
@settings(max_examples=300, deadline=None)
def test_i7_no_parameters_ever_raise(params: object) -> None:
    found = parse_params(params)
    if isinstance(found, Wish):
        assert isinstance(params, Mapping)
        assert 1 <= found.expected_targets <= MAX_EXPECTED_TARGETS
        found.transfer_id.encode()


@given(st.lists(st.tuples(PARAMS, st.text(min_size=1, max_size=20), st.lists(st.integers(0, 2**33), max_size=40))))
@settings(max_examples=100, deadline=None)
def test_i7_no_request_stops_a_scheduler_and_all_letters_can_be_sent(
    requests: list[tuple[object, str, list[int]]],
) -> None:
    half, port = scheduler()
    for params, request_id, prompt in requests:
        half.on_new_request(request_id, params, prompt)
        wanted, background = half.matched_tokens(request_id, 0)
        assert background == (wanted > 0)
        half.allocated(request_id, ([1] * 10,), wanted)
        half.build_step(StepView(scheduled={request_id: len(prompt)}, block_table=lambda _: ([1] * 10,)))
        half.finished(request_id, aborted=False)
    for message in port.take():
        encode(message)
