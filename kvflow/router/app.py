"""Serve the OpenAI-compatible API over the engines of the directory and of the command line."""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import aiohttp
import msgspec
import structlog
from aiohttp import web

from kvflow.bus.connect import connect_bus
from kvflow.config import Settings
from kvflow.directory import Directory
from kvflow.errors import ConfigError
from kvflow.router.dialects import DIALECTS
from kvflow.router.errors import ApiError, error_body
from kvflow.router.legs import PATHS, Kind, parse_request
from kvflow.router.proxy import Exchange, Policy, PrefillOutcome
from kvflow.router.registry import Registry, parse_static

MAX_BODY_BYTES = 64 * 1024 * 1024
# uvicorn closes idle connections after 5 s: ours have to be given up before, or a request may meet a closed one.
KEEP_ALIVE_S = 4.0
PREFILL_LINGER_S = 10.0
MAX_REQUEST_ID = 128

_request_id: ContextVar[str] = ContextVar("request_id")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


@dataclass(slots=True)
class Router:
    """Hold what the request handlers share."""

    registry: Registry
    session: aiohttp.ClientSession
    policy: Policy
    _lingering: set["asyncio.Task[None]"] = field(default_factory=set)

    def application(self, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=max_body_bytes, middlewares=[openai_errors])
        app.router.add_post(PATHS["completions"], self._serve("completions"))
        app.router.add_post(PATHS["chat"], self._serve("chat"))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        return app

    async def close(self) -> None:
        """Cancel prefill legs that outlived their answers."""
        for task in list(self._lingering):
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    def _serve(self, kind: Kind) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            leg = parse_request(kind, await request.read())
            exchange = Exchange(
                registry=self.registry,
                session=self.session,
                policy=self.policy,
                request=request,
                leg=leg,
                model=self._known_model(leg.model),
                request_id=_request_id.get(),
            )
            try:
                return await exchange.run()
            finally:
                if (task := exchange.unfinished_prefill) is not None:
                    self._linger(task)

        return serve

    def _linger(self, prefill: "asyncio.Task[PrefillOutcome]") -> None:
        """Let a prefill leg end by itself: cutting it off now would abort a request whose KV has just been read."""

        async def wait() -> None:
            try:
                await asyncio.wait({prefill}, timeout=PREFILL_LINGER_S)
            finally:
                prefill.cancel()

        task = asyncio.create_task(wait())
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    def _known_model(self, model: str | None) -> str:
        up = [engine for engine in self.registry.engines if engine.up]
        served = sorted(frozenset[str]().union(*(engine.models for engine in up)))
        if not served:
            raise ApiError(503, "no engine is up", code="no_engine", remedy="start engines, or wait for them")
        if model is None and len(served) == 1:
            return served[0]
        if model is None:
            raise ApiError(400, f"name a model; served are {', '.join(served)}", param="model")
        if model not in served:
            raise ApiError(404, f"The model {model!r} does not exist", code="model_not_found", param="model")
        return model

    async def _models(self, _request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self.registry.models()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self.registry.models():
            if model["id"] == name:
                return _json(model)
        raise ApiError(404, f"The model {name!r} does not exist", code="model_not_found", param="model")

    async def _health(self, _request: web.Request) -> web.Response:
        up = [engine for engine in self.registry.engines if engine.up]
        if not any(engine.alone for engine in up):
            raise ApiError(503, "no engine is up that can answer", code="no_engine")
        counts = {"prefill": sum(one.source for one in up), "decode": sum(one.target for one in up)}
        return _json({"status": "ok", "engines": len(up), **counts})


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and turn every error into one of OpenAI's shape."""
    sent = request.headers.get("X-Request-Id", "")
    _request_id.set(sent if 0 < len(sent) <= MAX_REQUEST_ID and sent.isprintable() else secrets.token_hex(16))
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error.status, error.body())
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{error.reason}: {request.method} {request.path}"
        answer = _error(error.status, error_body(error.status, message))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except ConnectionResetError:
        log.debug("client_gone", request_id=_request_id.get())
        raise
    except Exception as error:
        log.exception("request_failed", request_id=_request_id.get(), path=request.path)
        return _error(500, error_body(500, f"the router failed: {type(error).__name__}"))


@contextlib.asynccontextmanager
async def serving(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    engines: Sequence[str] = (),
    policy: Policy | None = None,
    api_key: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
) -> AsyncIterator[str]:
    """Run the router inside the block and give its URL; engines come from the directory when a NATS URL is set.

    Raises ConfigError when there is no source of engines or the address cannot be used, BusError without NATS.
    """
    static = tuple(parse_static(text) for text in engines)
    policy = policy or Policy()
    for engine in static:
        if engine.source and not DIALECTS[policy.dialect].can_prefill(engine):
            raise ConfigError(
                f"{policy.dialect} needs the side channel of {engine.url}",
                remedy="write prefill=http://host:port?engine_id=<id>&port=<side channel port>",
            )
    if not static and not settings.nats_url:
        raise ConfigError(
            "the router knows no engines", remedy="start `kvflow up`, set --nats-url, or name engines with --engine"
        )
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(_client_session())
        registry = Registry(session=session, static=static, api_key=api_key)
        if settings.nats_url and policy.dialect == "kvflow":  # the directory knows only engines that run kvflow
            await stack.enter_async_context(_watch_directory(settings, registry))
        router = Router(registry=registry, session=session, policy=policy)
        stack.push_async_callback(router.close)
        await registry.probe()
        probing = asyncio.create_task(registry.probe_forever())
        stack.callback(probing.cancel)
        runner = web.AppRunner(
            router.application(max_body_bytes),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=settings.stop_grace_s,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        yield await _listen(runner, host, port)


def run_router(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    engines: Sequence[str] = (),
    policy: Policy | None = None,
    api_key: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with serving(
            settings,
            host=host,
            port=port,
            engines=engines,
            policy=policy,
            api_key=api_key,
            max_body_bytes=max_body_bytes,
        ) as url:
            log.info("router_ready", url=url)
            await stop.wait()

    asyncio.run(main())
    return 0


def _client_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        connector=connector, auto_decompress=False, skip_auto_headers=("User-Agent", "Accept-Encoding")
    )


@contextlib.asynccontextmanager
async def _watch_directory(settings: Settings, registry: Registry) -> AsyncIterator[None]:
    bus = await connect_bus(settings, name="router")
    try:
        directory = Directory(bus, settings)
        registry.directory = directory
        await directory.watch(lambda _change: registry.directory_changed())
        yield
    finally:
        await bus.close()


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        about_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {_reason(error)}",
            remedy="choose another --port" if about_port else "choose a --host that is an address of this machine",
        ) from error
    bound = runner.addresses[0]
    return f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"


def _reason(error: OSError) -> str:
    """Return the system's words alone: asyncio wraps them into a sentence that repeats the address."""
    known = error.errno is not None and error.errno > 0  # a failed look-up has codes of its own
    return os.strerror(error.errno) if known and error.errno else error.strerror or str(error)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _error(status: int, body: bytes) -> web.Response:
    headers = {"X-Request-Id": _request_id.get()}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
