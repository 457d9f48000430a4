"""Turn a client's request into the bodies of its prefill and decode legs. Pure; the prompt's bytes are never decoded.

A request that vLLM would split into several prompts (a list of prompts, beam search) has one `kv_transfer_params` for
all of them, so one transfer id would name several prompts. Such requests go to one engine, without a transfer: simple,
and never wrong. So do requests that need every prompt token computed where the answer is made (`echo`,
`prompt_logprobs`), and those with `prompt_embeds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvflow.router.errors import ApiError

Kind = Literal["completions", "chat"]
Fields = dict[str, msgspec.Raw]

PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_TARGETS = 128
TRANSFER_FIELD = "kv_transfer_params"
EXTRA_FIELD = "vllm_xargs"  # vLLM merges it with kv_transfer_params, so it could smuggle them in

# What shapes the answer but not the prompt's KV: the prefill leg makes one token that nobody reads.
_ANSWER_ONLY = frozenset(
    {
        "stream_options", "max_completion_tokens", "min_tokens", "best_of", "stop", "stop_token_ids", "logprobs",
        "top_logprobs", "logprob_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "response_format",
        "structured_outputs", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets",
        "include_stop_str_in_output", "repetition_detection", "thinking_token_budget", "stream_interval",
    }
)  # fmt: skip
_NEEDS_ONE_ENGINE = frozenset({"echo", "prompt_logprobs", "use_beam_search", "prompt_embeds"})
_UNSET = frozenset({b"null", b"false"})
_CHARACTERS_PER_TOKEN = 4

_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: dict[str, object] | None = None


_decode_answer = msgspec.json.Decoder(_PrefillAnswer).decode
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """Hold a client's request without its transfer parameters.

    `not_transferable` says why the request must stay on one engine (empty: it need not). `prompt_tokens` is exact for
    token ids and a guess for text.
    """

    kind: Kind
    fields: Fields
    model: str | None
    targets: int
    prompt_tokens: int
    not_transferable: str

    @property
    def path(self) -> str:
        """Return the path of both legs."""
        return PATHS[self.kind]


def parse_request(kind: Kind, body: bytes) -> ClientRequest:
    """Read as much of a request as routing needs; raise ApiError (400) for what is no JSON object or names no model.

    Everything else that may be wrong with it is for the engine to judge.
    """
    try:
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error
    fields.pop(TRANSFER_FIELD, None)
    _strip_extra(fields)
    targets = _targets(fields)
    tokens, several = _prompt(fields) if kind == "completions" else (_guess_chat_tokens(fields), "")
    why = several or ("" if targets else "n is not a small positive number") or _needs_one_engine(fields)
    return ClientRequest(
        kind=kind, fields=fields, model=_model(fields), targets=targets or 1, prompt_tokens=tokens, not_transferable=why
    )


def prefill_body(request: ClientRequest, params: Mapping[str, object]) -> bytes:
    """Return the body of the leg that computes the prompt."""
    fields = {name: raw for name, raw in request.fields.items() if name not in _ANSWER_ONLY}
    return _encode(fields | {"max_tokens": _ONE, "n": _ONE, "stream": _FALSE}, params)


def decode_body(request: ClientRequest, params: Mapping[str, object]) -> bytes:
    """Return the body of the leg that receives the prompt's KV and makes the answer."""
    return _encode(request.fields, params)


def answered_params(answer: bytes) -> Mapping[str, object]:
    """Return the transfer parameters in a prefill's answer; empty when there are none."""
    try:
        return _decode_answer(answer).kv_transfer_params or {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def local_body(request: ClientRequest) -> bytes:
    """Return the body for an engine that does everything itself."""
    return msgspec.json.encode(request.fields)


def _encode(fields: Fields, params: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({**fields, TRANSFER_FIELD: params})


def _strip_extra(fields: Fields) -> None:
    raw = fields.get(EXTRA_FIELD)
    if raw is None:
        return
    try:
        extra = _decode_fields(raw)
    except msgspec.DecodeError:
        return  # no object: the engine refuses it
    extra.pop(TRANSFER_FIELD, None)
    fields[EXTRA_FIELD] = msgspec.Raw(msgspec.json.encode(extra))


def _model(fields: Fields) -> str | None:
    raw = fields.get("model")
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError as error:
        raise ApiError(400, "model must be a string", param="model") from error


def _targets(fields: Fields) -> int:
    """Return how many readers the prompt's KV will have; 0 when that cannot be told."""
    raw = fields.get("n")
    if raw is None or bytes(raw) == b"null":
        return 1
    try:
        number = msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        return 0
    return number if 1 <= number <= MAX_TARGETS else 0


def _needs_one_engine(fields: Fields) -> str:
    for name in sorted(_NEEDS_ONE_ENGINE & fields.keys()):
        if bytes(fields[name]) not in _UNSET:
            return f"{name} is set"
    return ""


def _prompt(fields: Fields) -> tuple[int, str]:
    """Return the number of prompt tokens and why the prompt cannot be transferred (empty: it can)."""
    raw = bytes(fields.get("prompt", b""))
    if raw[1:64].lstrip()[:1] in {b'"', b"["} and raw[:1] == b"[":
        prompts = _decode_list(raw)
        if len(prompts) > 1:
            return 0, f"{len(prompts)} prompts in one request"
        raw = bytes(prompts[0])
    if raw[:1] == b'"':
        return max(1, (len(raw) - 2) // _CHARACTERS_PER_TOKEN), ""
    if raw[:1] == b"[" and raw[1:64].lstrip()[:1].isdigit():
        return raw.count(b",") + 1, ""
    return 0, "the prompt is neither one text nor one list of token ids"


def _guess_chat_tokens(fields: Fields) -> int:
    return max(1, len(bytes(fields.get("messages", b""))) // _CHARACTERS_PER_TOKEN)
