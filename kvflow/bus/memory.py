"""The bus inside one process: the same meaning as over NATS, for tests, simulation and single-process runs."""

import asyncio
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvflow.bus.guard import call_guarded, call_on, check_subject
from kvflow.bus.memory_kv import MemoryBucket, MemoryKeyValue
from kvflow.bus.port import (
    Delivery,
    Handler,
    KeyValue,
    StateHandler,
    StreamSpec,
    Subscription,
)
from kvflow.errors import BusError


def subject_matches(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a pattern: `*` stands for one token, a last `>` for one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


@dataclass(eq=False, slots=True)
class _Interest:
    """One subscription or replay: what it wants, and the loop that its handler runs on."""

    pattern: str
    handler: Handler
    loop: asyncio.AbstractEventLoop
    queue: str = ""
    active: bool = True

    def deliver(self, delivery: Delivery) -> None:
        """Have the handler called by its own loop, in order, never from within the publisher's call."""
        call_on(self.loop, functools.partial(self._handle, delivery))

    def caught_up(self, on_caught_up: Callable[[], None]) -> None:
        """Call back behind everything delivered so far."""
        call_on(self.loop, functools.partial(self._run, on_caught_up))

    def _handle(self, delivery: Delivery) -> None:
        if self.active:
            call_guarded(self.handler, delivery)

    def _run(self, work: Callable[[], None]) -> None:
        if self.active:
            work()


@dataclass(eq=False, slots=True)
class _Stream:
    spec: StreamSpec
    messages: deque[tuple[int, float, str, bytes]] = field(default_factory=deque)
    followers: list[_Interest] = field(default_factory=list)
    last: int = 0
    size: int = 0

    def append(self, subject: str, data: bytes) -> int:
        self.last += 1
        self.messages.append((self.last, time.monotonic(), subject, data))
        self.size += len(data)
        self.trim()
        return self.last

    def trim(self) -> None:
        """Drop what is too old, and the oldest while there is too much."""
        oldest = time.monotonic() - self.spec.max_age_s
        while self.messages and (self.messages[0][1] < oldest or self.size > self.spec.max_bytes):
            self.size -= len(self.messages.popleft()[3])


class MemoryBroker:
    """Be the server that several `MemoryBus` clients share; they may live on different threads and event loops."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.interests: list[_Interest] = []
        self.streams: dict[str, _Stream] = {}
        self.buckets: dict[str, MemoryBucket] = {}
        self._turns = itertools.count()

    def publish(self, subject: str, data: bytes) -> None:
        """Store the message in every stream that captures it, and deliver it to every interest and queue group."""
        with self.lock:
            groups: dict[tuple[str, str], list[_Interest]] = {}
            for interest in self.interests:
                if not subject_matches(interest.pattern, subject):
                    continue
                if interest.queue:
                    groups.setdefault((interest.pattern, interest.queue), []).append(interest)
                else:
                    interest.deliver(Delivery(subject, data))
            for members in groups.values():
                members[next(self._turns) % len(members)].deliver(Delivery(subject, data))
            for stream in self.streams.values():
                if any(subject_matches(pattern, subject) for pattern in stream.spec.subjects):
                    sequence = stream.append(subject, data)
                    for follower in stream.followers:
                        if subject_matches(follower.pattern, subject):
                            follower.deliver(Delivery(subject, data, sequence))

    def drop(self, interest: _Interest) -> None:
        """End one interest."""
        interest.active = False
        with self.lock:
            if interest in self.interests:
                self.interests.remove(interest)
            for stream in self.streams.values():
                stream.followers = [follower for follower in stream.followers if follower is not interest]


class MemoryBus:
    """Implement the bus port as one client of a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker | None = None, *, on_state: StateHandler | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._on_state = on_state
        self._interests: list[_Interest] = []
        self._opened: list[MemoryKeyValue] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        """Return whether the bus is open."""
        return not self._closed

    async def publish(self, subject: str, data: bytes) -> None:
        """Hand the message to the broker; handlers run soon after, not within this call."""
        self._check_open()
        check_subject(subject)
        self.broker.publish(subject, bytes(data))

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Deliver matching messages."""
        interest = self._interest(subject, handler, queue)
        with self.broker.lock:
            self.broker.interests.append(interest)
        return _Ending(self, interest)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the stream or give it another specification."""
        self._check_open()
        with self.broker.lock:
            stream = self.broker.streams.setdefault(spec.name, _Stream(spec))
            stream.spec = spec
            stream.trim()

    async def replay(
        self,
        stream: str,
        subject: str,
        handler: Handler,
        *,
        on_caught_up: Callable[[], None] | None = None,
        since_s: float | None = None,
    ) -> Subscription:
        """Deliver what the stream holds, then what comes."""
        interest = self._interest(subject, handler)
        with self.broker.lock:
            found = self.broker.streams.get(stream)
            if found is None:
                raise BusError(f"stream {stream} does not exist", remedy="call ensure_stream first")
            found.trim()
            oldest = float("-inf") if since_s is None else time.monotonic() - since_s
            for sequence, at, of, data in found.messages:
                if since_s != 0 and at >= oldest and subject_matches(subject, of):
                    interest.deliver(Delivery(of, data, sequence))
            if on_caught_up is not None:
                interest.caught_up(on_caught_up)
            found.followers.append(interest)
        return _Ending(self, interest)

    async def key_value(self, bucket: str, *, ttl_s: float) -> KeyValue:
        """Open the bucket, creating it when missing."""
        self._check_open()
        with self.broker.lock:
            found = self.broker.buckets.setdefault(bucket, MemoryBucket(ttl_s))
            found.ttl_s = ttl_s
        opened = MemoryKeyValue(found, self._check_open)
        self._opened.append(opened)
        return opened

    async def flush(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 - nothing is ever on its way here
        """Return at once: a published message has reached the broker."""
        self._check_open()

    async def close(self) -> None:
        """End all subscriptions once what was delivered to them has been handled; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.sleep(0)  # what was delivered before is in the loop's queue ahead of us
        for interest in self._interests:
            self.broker.drop(interest)
        self._interests.clear()
        for opened in self._opened:
            opened.end()
        self._opened.clear()
        if self._on_state is not None:
            self._on_state("closed", "")

    def end(self, interest: _Interest) -> None:
        """End one interest of this client."""
        self.broker.drop(interest)
        if interest in self._interests:
            self._interests.remove(interest)

    def _interest(self, pattern: str, handler: Handler, queue: str = "") -> _Interest:
        self._check_open()
        interest = _Interest(pattern, handler, asyncio.get_running_loop(), queue)
        self._interests.append(interest)
        return interest

    def _check_open(self) -> None:
        if self._closed:
            raise BusError("the bus is closed")


class _Ending:
    """End one subscription or replay."""

    def __init__(self, bus: MemoryBus, interest: _Interest) -> None:
        self._bus = bus
        self._interest = interest

    async def unsubscribe(self) -> None:
        """Stop deliveries; calling it again does nothing."""
        self._bus.end(self._interest)
