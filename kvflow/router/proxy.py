"""Carry one request: choose engines, send both legs, stream the answer, and give up cleanly when the client does."""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import structlog
from aiohttp import web

from kvflow.bus.guard import end_task
from kvflow.ids import new_transfer_id
from kvflow.router.dialects import DIALECTS, Dialect, DialectName, Ids
from kvflow.router.errors import ApiError, error_event
from kvflow.router.legs import ClientRequest, answered_params, decode_body, local_body, prefill_body
from kvflow.router.placement import Engine, Mode
from kvflow.router.registry import Registry

TRANSFER_HEADER = "x-kvflow-transfer-id"
# What belongs to one connection, and what client session and server write themselves.
_PER_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "content-type", "x-request-id", TRANSFER_HEADER,
    }
)  # fmt: skip
_NOT_SENT_ON = _PER_HOP | {"host", "accept-encoding", "content-encoding", "expect"}
_NOT_SENT_BACK = _PER_HOP | {"date", "server"}
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Say how requests are routed. Durations are seconds.

    `dialect` names the connector that the engines run. `local_below_tokens`: shorter prompts are not worth a transfer.
    `fallback`: without a pair, one engine answers by itself (otherwise the client gets a 503). `patience_s`: how long a
    decode leg whose prefill has failed for good is left to itself before it is sent again without a transfer.
    """

    mode: Mode = "push"
    dialect: DialectName = "kvflow"
    local_below_tokens: int = 0
    fallback: bool = True
    attempts: int = 3
    connect_s: float = 3.0
    prefill_s: float = 600.0
    idle_s: float = 600.0
    patience_s: float = 1.0


PrefillOutcome = Literal["done", "refused", "failed"]


@dataclass(slots=True)
class Answer:
    """Hold an engine's answer whose first bytes are here; `body` gives all of them."""

    engine: Engine
    response: aiohttp.ClientResponse
    first: bytes

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        yield self.first
        async for chunk in self.response.content.iter_any():
            yield chunk


class Unanswered(Exception):  # noqa: N818 - an outcome to act on, not an error to show
    """Say that an engine gave no answer; `sent` tells whether it may have seen the request."""

    def __init__(self, engine: Engine, cause: BaseException) -> None:
        super().__init__(f"{engine.key}: {str(cause) or type(cause).__name__}")
        self.engine = engine
        self.sent = not isinstance(cause, _NEVER_SENT)


@dataclass(slots=True)
class Exchange:
    """Serve one client request. One instance per request; `run` is called once."""

    registry: Registry
    session: aiohttp.ClientSession
    policy: Policy
    request: web.Request
    leg: ClientRequest
    model: str
    request_id: str
    transfer_id: str = ""
    prefill: Engine | None = None
    _excluded: set[str] = field(default_factory=set)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _prefill_task: asyncio.Task[PrefillOutcome] | None = None
    _prefill_answer: bytes = b""
    _started: float = field(default_factory=time.monotonic)

    async def run(self) -> web.StreamResponse:
        """Answer the client; raise ApiError while nothing has been sent to it."""
        finished = False
        try:
            answer = await self._obtain()
            response = await self._relay(answer)
            finished = answer.response.status < 400
            return response
        finally:
            self._stack.close()
            if not finished:
                await self._drop_prefill()

    @property
    def unfinished_prefill(self) -> "asyncio.Task[PrefillOutcome] | None":
        """Return the prefill leg when it is still under way: its engine finishes by itself within moments."""
        task = self._prefill_task
        return task if task is not None and not task.done() else None

    async def _obtain(self) -> Answer:
        """Return an answer of which some bytes are here, trying other engines while the client has seen nothing."""
        problem: Unanswered | None = None
        for _ in range(self.policy.attempts):
            try:
                return await (self._transferred() if self._wants_transfer() else self._alone())
            except Unanswered as error:
                problem = error
                log.warning("decode_unanswered", request_id=self.request_id, error=str(error), sent=error.sent)
                await self._drop_prefill()
                self._exclude(error)
        raise ApiError(502, f"no engine answered: {problem}", code="engine_unreachable")

    def _wants_transfer(self) -> bool:
        return (
            self.policy.mode != "local"
            and not self.leg.not_transferable
            and self.leg.prompt_tokens >= self.policy.local_below_tokens
            and (self._dialect.fan_out or self.leg.targets == 1)
        )

    @property
    def _dialect(self) -> Dialect:
        return DIALECTS[self.policy.dialect]

    @property
    def _ids(self) -> Ids:
        return Ids(transfer_id=self.transfer_id, request_id=self._leg_request_id, kind=self.leg.kind)

    @property
    def _leg_request_id(self) -> str:
        # Where the connector finds its transfers by request id, one that a client may repeat will not do.
        return self.request_id if self._dialect.movable or not self.transfer_id else self.transfer_id

    async def _transferred(self) -> Answer:
        """Have one engine compute the prompt and another one answer."""
        pair = self.registry.fleet.pair(self.model, self._excluded)
        if pair is None:
            if not self.policy.fallback:
                raise ApiError(503, f"no pair of engines is up for the model {self.model!r}", code="no_engine_pair")
            return await self._alone()
        self.transfer_id = new_transfer_id()
        prefill = self._start_prefill(pair.prefill, pair.decode)
        decode = pair.decode
        if self.policy.mode == "deferred" or self._dialect.late:
            # The prompt is computed first, and the decode engine is chosen by the load of that later moment.
            if await prefill != "done":
                return await self._alone()
            decode = self._other_decode() or decode
        return await self._decode_beside(prefill, decode)

    async def _decode_beside(self, prefill: "asyncio.Task[PrefillOutcome]", decode: Engine) -> Answer:
        """Wait for the decode leg: move it while it cannot have registered, free it when its prefill has failed."""
        params = self._dialect.decode(self._ids, self.prefill or decode, answered_params(self._prefill_answer))
        body = decode_body(self.leg, params)
        while True:
            opening = asyncio.create_task(self._open(self._reserved(decode), body))
            try:
                await asyncio.wait({opening, prefill}, return_when=asyncio.FIRST_COMPLETED)
                if not opening.done() and prefill.result() != "done":
                    await asyncio.wait({opening}, timeout=self.policy.patience_s)
                    if not opening.done():
                        await _cancel(opening)
                        return await self._alone(on=decode)
                return await opening
            except Unanswered as error:
                self._exclude(error)
                other = self._other_decode()
                if error.sent or other is None:
                    raise
                decode = other
            finally:
                await _cancel(opening)

    def _other_decode(self) -> Engine | None:
        if self.prefill is None:
            return None
        return self.registry.fleet.decode_for(self.prefill, self.model, self._excluded)

    async def _alone(self, *, on: Engine | None = None) -> Answer:
        """Let one engine do everything."""
        await self._drop_prefill()
        self.transfer_id = ""
        engine = on or self.registry.fleet.alone(self.model, self._excluded)
        if engine is None:
            raise ApiError(503, f"no engine is up that can answer for the model {self.model!r}", code="no_engine")
        return await self._open(self._reserved(engine), local_body(self.leg))

    def _reserved(self, engine: Engine) -> Engine:
        """Count this exchange on the engine until its end, at once: another request may choose in the next moment."""
        self._stack.callback(self.registry.reserve(engine).release)
        return engine

    async def _open(self, engine: Engine, body: bytes) -> Answer:
        """Send a request and return its answer once there is something of the body; raise Unanswered."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.policy.connect_s, sock_read=self.policy.idle_s)
        with contextlib.ExitStack() as unless_answered:
            try:
                response = await self._post(engine, body, limits)
                # Closing gives the connection back after a whole answer; before that it aborts the engine's request.
                unless_answered.callback(response.close)
                # Engines send the status line long before the first token; until then everything can be tried again.
                first = await response.content.readany()
            except _NETWORK_ERRORS as error:
                raise Unanswered(engine, error) from error
            self._stack.push(unless_answered.pop_all())
        return Answer(engine, response, first)

    async def _post(self, engine: Engine, body: bytes, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        headers = {name: text for name, text in self.request.headers.items() if name.lower() not in _NOT_SENT_ON}
        headers |= {"Content-Type": "application/json", "X-Request-Id": self._leg_request_id}
        # A stream is sent in steps; megabytes of bytes would hold up the event loop.
        return await self.session.post(
            engine.url + self.leg.path, data=io.BytesIO(body), headers=headers, timeout=limits
        )

    def _start_prefill(self, engine: Engine, decode: Engine) -> "asyncio.Task[PrefillOutcome]":
        hold = self.registry.reserve(engine)
        body = prefill_body(self.leg, self._dialect.prefill(self._ids, self.leg.targets))
        task = asyncio.create_task(self._run_prefill(engine, decode, body))
        task.add_done_callback(lambda _: hold.release())
        self.prefill = engine
        self._prefill_task = task
        return task

    async def _run_prefill(self, engine: Engine, decode: Engine, body: bytes) -> PrefillOutcome:
        """Have the prompt computed, on another engine when one fails: the decode leg waits for the transfer id only."""
        tried = {engine.key}
        outcome = await self._prefill_once(engine, body)
        while outcome == "failed" and self._dialect.movable and len(tried) < self.policy.attempts:
            other = self.registry.fleet.prefill_for(decode, self.model, tried)
            if other is None:
                break
            tried.add(other.key)
            self.prefill = other
            hold = self.registry.reserve(other)
            try:
                outcome = await self._prefill_once(other, body)
            finally:
                hold.release()
        return outcome

    async def _prefill_once(self, engine: Engine, body: bytes) -> PrefillOutcome:
        limits = aiohttp.ClientTimeout(total=self.policy.prefill_s, sock_connect=self.policy.connect_s)
        try:
            async with await self._post(engine, body, limits) as response:
                text = await response.read()
        except _NETWORK_ERRORS as error:
            if isinstance(error, _NEVER_SENT):
                self.registry.mark_down(engine)
            log.warning("prefill_failed", request_id=self.request_id, engine=engine.key, error=str(error))
            return "failed"
        if response.status < 400:
            self._prefill_answer = text
            return "done"
        log.warning("prefill_refused", request_id=self.request_id, engine=engine.key, status=response.status,
                    answer=text[:200].decode(errors="replace"))  # fmt: skip
        return "failed" if response.status in _RETRIED_STATUS else "refused"

    async def _drop_prefill(self) -> None:
        task, self._prefill_task = self._prefill_task, None
        if task is not None:
            await _cancel(task)

    def _exclude(self, error: Unanswered) -> None:
        if not error.sent:
            self.registry.mark_down(error.engine)
        others = [one for one in self.registry.engines if one.up and one.target and one.key != error.engine.key]
        # A connection that the engine closed while idle looks like a lost request: a lone engine is asked once more.
        if others or error.engine.key in self._excluded:
            self._excluded.add(error.engine.key)

    async def _relay(self, answer: Answer) -> web.StreamResponse:
        """Pass the answer on as it comes."""
        source = answer.response
        response = web.StreamResponse(status=source.status, reason=source.reason)
        for name, value in source.headers.items():
            if name.lower() not in _NOT_SENT_BACK:
                response.headers.add(name, value)
        response.headers["Content-Type"] = source.headers.get("Content-Type", "application/json")
        response.headers["X-Request-Id"] = self.request_id
        if self.transfer_id:
            response.headers[TRANSFER_HEADER] = self.transfer_id
        if source.content_length is not None:
            response.content_length = source.content_length
        await response.prepare(self.request)
        first_at = time.monotonic()
        try:
            async for chunk in answer.body():
                await response.write(chunk)
        except ConnectionResetError:
            raise  # the client has gone
        except _NETWORK_ERRORS as error:
            await self._break_off(response, answer, error)
            return response
        await response.write_eof()
        self._log_access(answer, first_at)
        return response

    async def _break_off(self, response: web.StreamResponse, answer: Answer, error: BaseException) -> None:
        """Tell the client that the answer is not complete: in the stream, or by cutting the connection."""
        log.warning("answer_broken", request_id=self.request_id, engine=answer.engine.key, error=str(error))
        if response.headers["Content-Type"].startswith("text/event-stream"):
            await response.write(error_event(502, f"the engine broke off: {error}"))
            await response.write_eof()
        elif self.request.transport is not None:
            self.request.transport.abort()

    def _log_access(self, answer: Answer, first_at: float) -> None:
        now = time.monotonic()
        log.debug("request", request_id=self.request_id, transfer_id=self.transfer_id, path=self.leg.path,
                  status=answer.response.status, prefill=self.prefill.key if self.prefill and self.transfer_id else "",
                  decode=answer.engine.key, first_byte_ms=round((first_at - self._started) * 1000, 2),
                  total_ms=round((now - self._started) * 1000, 2))  # fmt: skip


async def _cancel(task: "asyncio.Task[Answer] | asyncio.Task[PrefillOutcome]") -> None:
    """Cancel a task and wait for its end, within a bound; what it ended with is of no interest any more."""
    await end_task(task)
    if task.done() and not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it as forgotten
