"""A stand-in for an engine's API server: real HTTP, every way to answer, wait, refuse and break that is tested."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvflow.config import Settings
from kvflow.router.app import serving
from kvflow.router.proxy import Policy


@dataclass(slots=True)
class Seen:
    """One request that reached a fake engine."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    aborted: bool = False
    finished: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.body.get("kv_transfer_params") or {})


@dataclass(slots=True)
class FakeEngine:
    """Answer completions with `chunks`; `held` requests wait until `let_go` is set."""

    name: str
    model: str = "tiny"
    chunks: tuple[bytes, ...] = (b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n")
    status: int = 200
    error: bytes = b'{"error":{"message":"no","type":"t","param":null,"code":1}}'
    hold: bool = False
    cut_before_answer: bool = False
    cut_after_chunks: int | None = None
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def wait_for(self, fact: Callable[["FakeEngine"], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: fact(self))

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "x"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.path,
            json.loads(await request.read()),
            {name.lower(): text for name, text in request.headers.items()},
        )
        self.seen.append(seen)
        await self._note()
        try:
            answer = await self._answer(request, seen)
            seen.finished = True
            return answer
        except (asyncio.CancelledError, ConnectionResetError):
            seen.aborted = True
            raise
        finally:
            # Not cancelled with the handler: the tests wait for exactly this moment.
            self._task = asyncio.ensure_future(self._note())

    _task: "asyncio.Future[None] | None" = None

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if self.cut_before_answer:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(5)
        if self.status != 200:
            return web.Response(status=self.status, body=self.error, content_type="application/json")
        if not seen.body.get("stream"):
            if self.hold:
                await self.let_go.wait()
            return web.Response(
                body=b"".join(self.chunks), content_type="application/json", headers={"X-Engine": self.name}
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Engine": self.name}
        )
        await response.prepare(request)
        if self.hold:
            await self.let_go.wait()
        for number, chunk in enumerate(self.chunks):
            if number == self.cut_after_chunks:
                await asyncio.sleep(0.05)
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(5)
            await response.write(chunk)
        return response


@asynccontextmanager
async def routed(
    *engines: tuple[str, FakeEngine], policy: Policy | None = None, max_body_bytes: int = 1 << 24
) -> AsyncIterator[aiohttp.ClientSession]:
    """Start fake engines and a router before them; give a client whose base URL is the router."""
    async with AsyncExitStack() as stack:
        for _, engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        named = [f"{role}={engine.url}" for role, engine in engines]
        url = await stack.enter_async_context(
            serving(Settings(stop_grace_s=0.5), engines=named, policy=policy, max_body_bytes=max_body_bytes)
        )
        yield await stack.enter_async_context(aiohttp.ClientSession(url))


def completion(**fields: Any) -> dict[str, Any]:
    """Return a streamed completion request, changed as told."""
    return {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 8, "stream": True, **fields}
