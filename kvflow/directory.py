"""The directory of live engine ranks: cards in a key-value bucket with a time to live.

A rank's card stays while its owner refreshes it. Every watcher counts the time to live on a clock of its own as well,
so that an engine is found lost even where the bucket cannot tell; while the bus is away nobody is declared lost, since
nobody can be heard.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from kvflow.bus.guard import call_guarded, end_task
from kvflow.bus.port import Bus, KeyValue, KvUpdate, Subscription
from kvflow.config import Settings
from kvflow.errors import BusError, WireError
from kvflow.messages import EngineCard, EngineRef, Subjects, decode, encode
from kvflow.messages.subjects import parse_card_key

BUCKET = "engines"
# Watchers wait a little longer than the bucket, which normally tells first.
EXPIRY_SLACK_S = 0.5
MAX_RANKS = 65_536

RankKey = tuple[EngineRef, int]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Joined:
    """Tell of a rank that has joined, or whose card has changed (its actors restarted on a new agent)."""

    card: EngineCard


@dataclass(frozen=True, slots=True)
class Left:
    """Tell of a rank that has gone: it withdrew its card ("left") or stopped refreshing it ("lost")."""

    engine: EngineRef
    rank: int
    reason: Literal["left", "lost"]


@dataclass(frozen=True, slots=True)
class Synced:
    """Tell that every card that was there at the beginning has been told."""


DirectoryChange = Joined | Left | Synced
ChangeHandler = Callable[[DirectoryChange], None]


class Directory:
    """Publish this process's cards and watch everybody's; one per bus.

    Change handlers run on the event loop, must not block and must not raise: they only enqueue.
    """

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._ttl_s = settings.card_ttl_s
        self._subjects = Subjects(settings.cluster)
        self._bucket: KeyValue | None = None
        self._opening = asyncio.Lock()
        self._own: dict[RankKey, asyncio.Task[None]] = {}
        self._stored_at: dict[RankKey, float] = {}
        self._lapses: dict[RankKey, int] = {}
        self._cards: dict[RankKey, EngineCard] = {}
        self._raw: dict[RankKey, bytes] = {}
        self._expires: dict[RankKey, float] = {}
        self._handlers: dict[_Watching, ChangeHandler] = {}
        self._watch: Subscription | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._synced = False
        self.bad_cards = 0

    @property
    def cards(self) -> dict[RankKey, EngineCard]:
        """Return the live cards as far as they are known; empty unless watching."""
        return dict(self._cards)

    @property
    def synced(self) -> bool:
        """Return whether every card that was there at the beginning has been told."""
        return self._synced

    def engines(self, *, complete: bool = True) -> dict[EngineRef, tuple[EngineCard, ...]]:
        """Return the engines with their cards in rank order; only those whose ranks all have cards unless told so."""
        found: dict[EngineRef, list[EngineCard]] = {}
        for (engine, _), card in sorted(self._cards.items()):
            found.setdefault(engine, []).append(card)
        return {
            engine: tuple(cards)
            for engine, cards in found.items()
            if not complete or all(card.profile.ranks == len(cards) for card in cards)
        }

    async def publish(self, card: EngineCard) -> None:
        """Put the card and refresh it every third of its time to live until `withdraw` or `close`; raise BusError."""
        key = (card.engine, card.rank)
        bucket = await self._open()
        previous = self._own.pop(key, None)
        if previous is not None:
            await end_task(previous)
        await self._store(bucket, key, encode(card))
        self._own[key] = asyncio.create_task(self._refresh(bucket, key, encode(card)), name=f"card-{key[0]}-{key[1]}")

    def lapses(self, engine: EngineRef, rank: int) -> int:
        """Return how often an own card was not refreshed within its time to live, so that others may count it as lost.

        A lapse counts as soon as it happens, and a process that was halted finds out before it does anything else.
        """
        key = (engine, rank)
        return self._lapses.get(key, 0) + self._is_overdue(key)

    async def withdraw(self, engine: EngineRef, rank: int) -> None:
        """Stop refreshing and delete the card, so that watchers see it leave at once; raise BusError."""
        task = self._own.pop((engine, rank), None)
        if task is None:
            return
        self._stored_at.pop((engine, rank), None)
        await end_task(task)
        bucket = await self._open()
        await bucket.delete(self._key((engine, rank)))

    async def watch(self, on_change: ChangeHandler) -> Subscription:
        """Tell of the present cards, then Synced once, then of every change."""
        subscription = _Watching(self)
        if self._watch is None and not self._handlers:
            self._handlers[subscription] = on_change
            try:
                bucket = await self._open()
                self._watch = await bucket.watch(self._on_update)
            except BusError:
                self._handlers.pop(subscription, None)
                raise
            self._sweeper = asyncio.create_task(self._sweep(), name="directory-sweep")
            return subscription
        for card in list(self._cards.values()):
            call_guarded(on_change, Joined(card))
        if self._synced:
            call_guarded(on_change, Synced())
        self._handlers[subscription] = on_change
        return subscription

    async def close(self) -> None:
        """Stop refreshing and watching; the cards stay until they expire (use `withdraw` to leave)."""
        for task in self._own.values():
            await end_task(task)
        self._own.clear()
        self._handlers.clear()
        await self._stop_watching()

    async def unwatch(self, subscription: "_Watching") -> None:
        """End one watch, and the bucket's when it was the last."""
        if self._handlers.pop(subscription, None) is not None and not self._handlers:
            await self._stop_watching()

    async def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            await end_task(sweeper)
        if watch is not None:
            await watch.unsubscribe()
        self._cards.clear()
        self._raw.clear()
        self._expires.clear()
        self._synced = False

    async def _open(self) -> KeyValue:
        async with self._opening:
            if self._bucket is None:
                self._bucket = await self._bus.key_value(self._subjects.bucket(BUCKET), ttl_s=self._ttl_s)
            return self._bucket

    def _key(self, key: RankKey) -> str:
        return self._subjects.card_key(*key)

    async def _store(self, bucket: KeyValue, key: RankKey, data: bytes) -> None:
        began = asyncio.get_running_loop().time()
        await bucket.put(self._key(key), data)
        self._lapses[key] = self._lapses.get(key, 0) + self._is_overdue(key)
        self._stored_at[key] = began

    def _is_overdue(self, key: RankKey) -> bool:
        stored_at = self._stored_at.get(key)
        return stored_at is not None and asyncio.get_running_loop().time() - stored_at > self._ttl_s

    async def _refresh(self, bucket: KeyValue, key: RankKey, data: bytes) -> None:
        failures = 0
        while True:
            # While the bus is away, try often: the card must be back before watchers count it as lost.
            await asyncio.sleep(self._ttl_s / (3 if not failures else 12))
            try:
                await self._store(bucket, key, data)
            except BusError as error:
                failures += 1
                if failures & (failures - 1) == 0:
                    log.warning("card_not_refreshed", engine=str(key[0]), rank=key[1], error=str(error))
            else:
                failures = 0

    async def _sweep(self) -> None:
        """Find ranks that were not refreshed; give everybody a new time to live while nobody could be heard.

        That is while the bus is away, and after this process stood still: what came meanwhile has yet to be read.
        """
        loop = asyncio.get_running_loop()
        pause = min(EXPIRY_SLACK_S, self._ttl_s / 4)
        now = loop.time()
        while True:
            await asyncio.sleep(pause)
            asleep_since, now = now, loop.time()
            if not self._bus.connected or now - asleep_since > 2 * pause:
                self._expires = dict.fromkeys(self._expires, now + self._ttl_s + EXPIRY_SLACK_S)
            for key in [key for key, expires in self._expires.items() if expires <= now]:
                self._remove(key, "lost")

    def _on_update(self, update: KvUpdate | None) -> None:
        if update is None:
            self._synced = True
            self._tell(Synced())
            return
        try:
            key = parse_card_key(update.key)
            if update.value is None:
                self._remove(key, "lost" if update.expired else "left")
                return
            self._put(key, update.value)
        except WireError as error:
            self.bad_cards += 1
            if self.bad_cards & (self.bad_cards - 1) == 0:
                log.warning("bad_card_ignored", key=update.key, error=str(error), count=self.bad_cards)

    def _put(self, key: RankKey, data: bytes) -> None:
        changed = self._raw.get(key) != data
        if changed:
            card = decode(data)
            if not isinstance(card, EngineCard):
                raise WireError(f"a {type(card).__name__} is not an engine card")
            if (card.engine, card.rank) != key:
                raise WireError(f"the card is of {card.engine} rank {card.rank}")
            if not 0 <= card.rank < card.profile.ranks <= MAX_RANKS:
                raise WireError(f"rank {card.rank} of {card.profile.ranks} ranks")
            self._cards[key] = card
            self._raw[key] = data
        self._expires[key] = asyncio.get_running_loop().time() + self._ttl_s + EXPIRY_SLACK_S
        if changed:
            self._tell(Joined(self._cards[key]))

    def _remove(self, key: RankKey, reason: Literal["left", "lost"]) -> None:
        if self._cards.pop(key, None) is None:
            return
        self._raw.pop(key, None)
        self._expires.pop(key, None)
        self._tell(Left(key[0], key[1], reason))

    def _tell(self, change: DirectoryChange) -> None:
        for handler in list(self._handlers.values()):
            call_guarded(handler, change)


class _Watching:
    """End one watch of a directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def unsubscribe(self) -> None:
        """Stop telling; calling it again does nothing."""
        await self._directory.unwatch(self)
