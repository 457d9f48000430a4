"""Key-value buckets of the in-memory bus."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvflow.bus.guard import call_guarded, call_on
from kvflow.bus.port import KvHandler, KvUpdate, Subscription

TIMER_SLACK_S = 0.001


@dataclass(eq=False, slots=True)
class _Watcher:
    handler: KvHandler
    loop: asyncio.AbstractEventLoop
    active: bool = True

    def tell(self, update: KvUpdate | None) -> None:
        call_on(self.loop, partial(self._handle, update))

    def _handle(self, update: KvUpdate | None) -> None:
        if self.active:
            call_guarded(self.handler, update)


@dataclass(eq=False, slots=True)
class MemoryBucket:
    """Hold the entries of one bucket; all clients share it, from any thread."""

    ttl_s: float
    entries: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    watchers: list[_Watcher] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, key: str, value: bytes) -> None:
        """Store a value and restart its time to live."""
        with self.lock:
            self.expire()
            expires = time.monotonic() + self.ttl_s
            self.entries[key] = (value, expires)
            for watcher in self.watchers:
                watcher.tell(KvUpdate(key, value))
                self._look_again(watcher, expires)

    def delete(self, key: str) -> None:
        """Delete a key; a missing one does nothing."""
        with self.lock:
            self.expire()
            if self.entries.pop(key, None) is not None:
                self._tell(KvUpdate(key, None))

    def add(self, watcher: _Watcher) -> None:
        """Tell a watcher the entries, None, and from now on every change."""
        with self.lock:
            self.expire()
            for key, (value, expires) in self.entries.items():
                watcher.tell(KvUpdate(key, value))
                self._look_again(watcher, expires)
            watcher.tell(None)
            self.watchers.append(watcher)

    def remove(self, watcher: _Watcher) -> None:
        """Tell a watcher no more."""
        watcher.active = False
        with self.lock:
            self.watchers = [other for other in self.watchers if other is not watcher]

    def expire(self) -> None:
        """Drop the entries whose time is over, and tell the watchers."""
        with self.lock:
            now = time.monotonic()
            for key in [key for key, (_, expires) in self.entries.items() if expires <= now]:
                del self.entries[key]
                self._tell(KvUpdate(key, None, expired=True))

    def _tell(self, update: KvUpdate) -> None:
        for watcher in self.watchers:
            watcher.tell(update)

    def _look_again(self, watcher: _Watcher, expires: float) -> None:
        """Look for expired entries on a watcher's own loop: the loop of whoever stored them may be gone by then."""

        def schedule() -> None:
            watcher.loop.call_later(max(0.0, expires - time.monotonic()) + TIMER_SLACK_S, self.expire)

        call_on(watcher.loop, schedule)


class MemoryKeyValue:
    """Implement the key-value port for one client."""

    def __init__(self, bucket: MemoryBucket, check_open: Callable[[], None]) -> None:
        self._bucket = bucket
        self._check_open = check_open
        self._watchers: list[_Watcher] = []

    async def put(self, key: str, value: bytes) -> None:
        """Store a value and restart its time to live."""
        self._check_open()
        self._bucket.put(key, bytes(value))

    async def delete(self, key: str) -> None:
        """Delete a key."""
        self._check_open()
        self._bucket.delete(key)

    async def watch(self, handler: KvHandler) -> Subscription:
        """Deliver the present entries, None once, then every change."""
        self._check_open()
        watcher = _Watcher(handler, asyncio.get_running_loop())
        self._watchers.append(watcher)
        self._bucket.add(watcher)
        return _Ending(self._bucket, watcher)

    def end(self) -> None:
        """End all watches of this client."""
        for watcher in self._watchers:
            self._bucket.remove(watcher)
        self._watchers.clear()


class _Ending:
    """End one watch."""

    def __init__(self, bucket: MemoryBucket, watcher: _Watcher) -> None:
        self._bucket = bucket
        self._watcher = watcher

    async def unsubscribe(self) -> None:
        """Stop deliveries; calling it again does nothing."""
        self._bucket.remove(self._watcher)
