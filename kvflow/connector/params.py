"""Read `kv_transfer_params`, which come from clients: anything at all may be in there, and nothing may raise."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvflow.ids import MAX_ID_LENGTH

MAX_EXPECTED_TARGETS = 4096
HOW_TO_SEND = (
    'send {"transfer_id": "<one id for both legs>", "do_remote_decode": true} to the source and '
    '{"transfer_id": "<the same id>", "do_remote_prefill": true} to the target'
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Hold what a request asks for: to be the source or the target of a transfer."""

    transfer_id: str
    source: bool
    expected_targets: int = 1


@dataclass(frozen=True, slots=True)
class Malformed:
    """Say why parameters cannot be used; the request is computed locally."""

    reason: str


def parse_params(params: object) -> Wish | Malformed | None:
    """Return the wish in the parameters, None when they ask for nothing, or what is wrong with them."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        return Malformed(f"kv_transfer_params is a {type(params).__name__}, not an object")
    source = params.get("do_remote_decode")
    target = params.get("do_remote_prefill")
    for name, flag in (("do_remote_decode", source), ("do_remote_prefill", target)):
        if flag is not None and not isinstance(flag, bool):
            return Malformed(f"{name} is a {type(flag).__name__}, not true or false")
    if not source and not target:
        return None
    if source and target:
        return Malformed("do_remote_decode and do_remote_prefill are both true")
    transfer_id = params.get("transfer_id")
    if reason := _bad_id(transfer_id):
        return Malformed(reason)
    expected = params.get("expected_targets")
    if expected is None:
        expected = 1
    if isinstance(expected, bool) or not isinstance(expected, int) or not 1 <= expected <= MAX_EXPECTED_TARGETS:
        return Malformed(f"expected_targets is not a whole number from 1 to {MAX_EXPECTED_TARGETS}")
    return Wish(transfer_id=str(transfer_id), source=bool(source), expected_targets=expected)


def _bad_id(value: object) -> str:
    if value is None:
        return "transfer_id is missing"
    if not isinstance(value, str) or not value:
        return "transfer_id is not a non-empty string"
    if len(value) > MAX_ID_LENGTH:
        return f"transfer_id has {len(value)} characters, at most {MAX_ID_LENGTH} are allowed"
    return "" if encodable(value) else "transfer_id is not valid Unicode"


def encodable(value: str) -> bool:
    """Return whether a string can travel as UTF-8 (JSON lets lone surrogates through)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
