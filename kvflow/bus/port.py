"""The bus port: what actors may ask of a message bus. `nats.py` and `memory.py` implement it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class Delivery:
    """Carry one message to a handler. `sequence` is the stream sequence for replayed subscriptions, else 0."""

    subject: str
    data: bytes
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class KvUpdate:
    """Carry one change of a key-value bucket; `value` is None when the key was deleted or has `expired`."""

    key: str
    value: bytes | None
    expired: bool = False


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a memory stream that captures subjects."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int = 256 * 1024 * 1024


BusState = Literal["connected", "disconnected", "reconnected", "closed", "slow_consumer", "error"]

# Handlers run on the event loop, must not block and must not raise: they only enqueue.
Handler = Callable[[Delivery], None]
KvHandler = Callable[[KvUpdate | None], None]
StateHandler = Callable[[BusState, str], None]


class Subscription(Protocol):
    """Stop deliveries."""

    async def unsubscribe(self) -> None:
        """Stop deliveries to the handler; calling it again does nothing."""


class KeyValue(Protocol):
    """A key-value bucket whose entries expire."""

    async def put(self, key: str, value: bytes) -> None:
        """Store a value and restart its time to live."""

    async def delete(self, key: str) -> None:
        """Delete a key, leaving a marker that watchers see; deleting a missing key does nothing."""

    async def watch(self, handler: KvHandler) -> Subscription:
        """Deliver the present entries, then None once, then every change, deletions and expiries as value None."""


class Bus(Protocol):
    """Publish and subscribe, replay streams, and keep small values. All methods raise BusError when the bus is gone."""

    @property
    def connected(self) -> bool:
        """Return whether the bus can be reached right now."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send without waiting for anybody; messages of one publisher to one subject arrive in order."""

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Deliver matching messages (`*` one token, `>` the rest); members of one queue group share them."""

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the memory stream or adapt it; calling it again does nothing."""

    async def replay(
        self,
        stream: str,
        subject: str,
        handler: Handler,
        *,
        on_caught_up: Callable[[], None] | None = None,
        since_s: float | None = None,
    ) -> Subscription:
        """Deliver what the stream holds of `subject` in order, call `on_caught_up` once, then follow.

        `since_s` limits the past to that many seconds; 0 delivers only what is new.
        """

    async def key_value(self, bucket: str, *, ttl_s: float) -> KeyValue:
        """Open the bucket, creating it when missing."""

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything published has reached the bus."""

    async def close(self) -> None:
        """Drain subscriptions and leave; calling it again does nothing."""
