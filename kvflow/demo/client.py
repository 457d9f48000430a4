"""Send one streamed completion with token ids, and measure what a user would feel."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from kvflow.errors import KvflowError

TRANSFER_HEADER = "x-kvflow-transfer-id"
REQUEST_TIMEOUT_S = 120.0


class CompletionError(KvflowError):
    """An engine or the router refused a completion or broke it off."""


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: dict[str, object] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Hold an answer: its tokens, when it was asked for and begun (wall clock, s), TTFT and TPOT (s)."""

    tokens: tuple[int, ...]
    transfer_id: str
    sent_at: float
    first_at: float
    ttft_s: float
    tpot_s: float


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    model: str = "tiny",
    params: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> Completion:
    """Ask for exactly `max_tokens` greedy tokens and return them; raise CompletionError when it is no completion.

    `params` are the `kv_transfer_params` of a leg driven by hand, `extra` more fields of the request.
    """
    body: dict[str, object] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **(extra or {}),
    }
    if params is not None:
        body["kv_transfer_params"] = params
    sent_at, started = time.time(), time.perf_counter()
    arrivals: list[float] = []
    tokens: list[int] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as answer:
        if answer.status != 200:
            raise CompletionError(f"{url} answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            found = _tokens_in(line, url)
            if found:
                arrivals.append(time.perf_counter())
                tokens += found
        transfer_id = answer.headers.get(TRANSFER_HEADER, "")
    if not arrivals:
        raise CompletionError(f"{url} answered without a token")
    ttft = arrivals[0] - started
    return Completion(
        tokens=tuple(tokens),
        transfer_id=transfer_id,
        sent_at=sent_at,
        first_at=sent_at + ttft,
        ttft_s=ttft,
        tpot_s=(arrivals[-1] - arrivals[0]) / max(1, len(tokens) - 1),
    )


def _tokens_in(line: bytes, url: str) -> list[int]:
    """Return the tokens in one line of a server-sent event stream."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return []
    try:
        chunk = _decode_chunk(line[5:])
    except msgspec.DecodeError as error:
        raise CompletionError(f"{url} sent something else than a completion: {error}") from error
    if chunk.error is not None:
        raise CompletionError(f"{url} broke off: {chunk.error}")
    return [token for choice in chunk.choices for token in choice.token_ids or []]
