"""Know the engines: from the directory, from the command line, and by asking each one what it serves."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

import aiohttp
import anyio
import msgspec
import structlog

from kvflow.dataplane.compat import check_compatible
from kvflow.errors import ConfigError
from kvflow.messages import EngineCard, EngineRef
from kvflow.router.placement import Engine, Fleet, SideChannel

ROLES = ("prefill", "decode", "both", "aggregated")
PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 3.0
MAX_MODELS_BYTES = 1 << 20

log = structlog.get_logger()


class EngineCards(Protocol):
    """The part of the engine directory that the router reads."""

    def engines(self) -> dict[EngineRef, tuple[EngineCard, ...]]:
        """Return the complete engines with their cards in rank order."""


@dataclass(slots=True)
class _Served:
    """What an engine said when it was last asked."""

    up: bool = False
    models: tuple[dict[str, Any], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(model["id"]) for model in self.models)


@dataclass(slots=True)
class Registry:
    """Hold the known engines, their load, and which of them fit together. Lives on the event loop."""

    session: aiohttp.ClientSession
    static: tuple[Engine, ...] = ()
    directory: EngineCards | None = None
    api_key: str = ""
    _served: dict[str, _Served] = field(default_factory=dict)
    _from_directory: tuple[Engine, ...] = ()
    _vanished: dict[str, Engine] = field(default_factory=dict)
    _engines: tuple[Engine, ...] = ()
    _in_flight: Counter[str] = field(default_factory=Counter)
    _last_chosen: dict[str, int] = field(default_factory=dict)
    _clock: Iterator[int] = field(default_factory=itertools.count)
    _fits: dict[tuple[str, str], bool] = field(default_factory=dict)
    _wake: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self._rebuild()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return all engines, those that are down too."""
        return self._engines

    @property
    def fleet(self) -> Fleet:
        """Return what placement needs, as it is now."""
        return Fleet(
            engines=self._engines,
            compatible=self.compatible,
            in_flight=self._in_flight,
            last_chosen=self._last_chosen,
        )

    def models(self) -> list[dict[str, Any]]:
        """Return each served model once, as its first engine describes it."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self._engines:
            if engine.up:
                for model in self._served[engine.url].models:
                    found.setdefault(str(model["id"]), model)
        return list(found.values())

    def reserve(self, engine: Engine) -> "Reservation":
        """Count one request on an engine from now until the reservation is released."""
        self._last_chosen[engine.key] = next(self._clock)
        return Reservation(self._in_flight, engine.key)

    def compatible(self, source: Engine, target: Engine) -> bool:
        """Return whether one engine's cache can be written into the other's; engines named by hand are trusted."""
        if not source.profiles or not target.profiles:
            return True
        key = (source.key, target.key)
        if key not in self._fits:
            reason = check_compatible(source.profiles, target.profiles)
            self._fits[key] = reason is None
            if reason is not None:
                log.info("engines_incompatible", source=source.key, target=target.key, reason=reason)
        return self._fits[key]

    def directory_changed(self) -> None:
        """Take over what the directory holds now, and ask new engines what they serve.

        An engine that left the directory but still answers may serve alone: a bus outage costs transfers, not answers.
        """
        found = _reachable_engines(self.directory.engines() if self.directory is not None else {})
        addresses = {engine.url for engine in found}
        for engine in self._from_directory:
            if engine.alone and engine.url not in addresses:
                self._vanished[engine.url] = replace(engine, source=False, target=False, profiles=())
        for url in addresses:
            self._vanished.pop(url, None)
        self._from_directory = found
        alive = {engine.key for engine in found}
        self._fits = {pair: fits for pair, fits in self._fits.items() if alive.issuperset(pair)}
        self._rebuild()
        self._wake.set()

    def mark_down(self, engine: Engine) -> None:
        """Choose the engine no more until it answers a probe."""
        served = self._served.get(engine.url)
        if served is not None and served.up:
            served.up = False
            log.warning("engine_unreachable", engine=engine.key, url=engine.url)
            self._rebuild()
            self._wake.set()

    async def probe_forever(self) -> None:
        """Ask every engine what it serves, again and again, and at once when there are new ones."""
        while True:
            self._wake = anyio.Event()
            await self.probe()
            with anyio.move_on_after(PROBE_INTERVAL_S if all(one.up for one in self._engines) else 1.0):
                await self._wake.wait()
            await anyio.sleep(0.05)  # a burst of changes costs one round

    async def probe(self) -> None:
        """Ask every engine once what it serves."""
        async with anyio.create_task_group() as tasks:
            for url in {engine.url for engine in self._engines}:
                tasks.start_soon(self._probe_one, url)
        self._rebuild()

    async def _probe_one(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            with anyio.fail_after(PROBE_TIMEOUT_S):
                async with self.session.get(f"{url}/v1/models", headers=headers) as answer:
                    answer.raise_for_status()
                    models = _models_of(await answer.json())
        except TimeoutError:
            return  # busy, perhaps; a request that cannot connect says more
        except (aiohttp.ClientError, OSError, ValueError) as error:
            known = self._served.get(url)
            if known is None or known.up:
                log.warning("engine_probe_failed", url=url, error=str(error))
            self._served[url] = _Served(up=False, models=known.models if known else ())
            self._vanished.pop(url, None)
            return
        if not (url in self._served and self._served[url].up):
            log.info("engine_usable", url=url, models=[model["id"] for model in models])
        self._served[url] = _Served(up=True, models=models)

    def _rebuild(self) -> None:
        by_url: dict[str, Engine] = {}
        # What the directory says about an address counts more than the command line.
        for engine in (*self._from_directory, *self.static, *self._vanished.values()):
            by_url.setdefault(engine.url, engine)
        self._served = {url: self._served.get(url, _Served()) for url in by_url}
        self._engines = tuple(
            replace(engine, up=self._served[url].up, models=self._served[url].names) for url, engine in by_url.items()
        )
        known = {engine.key for engine in self._engines}
        self._last_chosen = {key: tick for key, tick in self._last_chosen.items() if key in known}


class Reservation:
    """Count one request on an engine. Made in the same step as the choice, so that simultaneous requests spread."""

    def __init__(self, in_flight: Counter[str], key: str) -> None:
        self._in_flight = in_flight
        self._key = key
        in_flight[key] += 1

    def release(self) -> None:
        """Count the request no more; calling it again does nothing."""
        key, self._key = self._key, ""
        if key:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]


def parse_static(text: str) -> Engine:
    """Parse `role=url` from the command line, with a side channel for upstream's push; raise ConfigError otherwise."""
    role, found, url = text.partition("=")
    parts = urlsplit(url)
    if not found or role not in ROLES or parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(
            f"{text!r} is not an engine", remedy=f"write role=http://host:port with a role of {', '.join(ROLES)}"
        )
    url = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return Engine(
        key=url.rstrip("/"),
        url=url.rstrip("/"),
        models=frozenset(),
        source=role in {"prefill", "both"},
        target=role in {"decode", "both"},
        alone=role != "prefill",
        up=False,
        side=_side_channel(text, parts),
    )


def _side_channel(text: str, parts: SplitResult) -> SideChannel | None:
    """Read `?engine_id=...&port=...[&host=...&tp_size=...&pp_size=...]`, which upstream's push connector needs."""
    if not parts.query:
        return None
    fields: dict[str, object] = {"host": parts.hostname, **dict(parse_qsl(parts.query))}
    try:
        return msgspec.convert(fields, SideChannel, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{text!r} does not locate a side channel: {error}", remedy="write ?engine_id=<id>&port=<side channel port>"
        ) from error


def _reachable_engines(known: dict[EngineRef, tuple[EngineCard, ...]]) -> tuple[Engine, ...]:
    """Return the engines of the directory that say where their API is."""
    engines = []
    for ref, cards in known.items():
        profiles = tuple(card.profile for card in cards)
        url = next((profile.api_url for profile in profiles if profile.api_url), "").rstrip("/")
        if urlsplit(url).scheme not in {"http", "https"}:
            continue
        target = "target" in profiles[0].roles
        engines.append(
            Engine(
                key=str(ref),
                url=url,
                models=frozenset(),
                source="source" in profiles[0].roles,
                target=target,
                alone=target,
                up=False,
                profiles=profiles,
            )
        )
    return tuple(engines)


def _models_of(answer: object) -> tuple[dict[str, Any], ...]:
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, Sequence) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), str) for one in data
    ):
        raise ValueError("the engine's list of models has another shape than OpenAI's")
    return tuple(data)
