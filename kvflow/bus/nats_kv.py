"""A JetStream key-value bucket whose entries expire, laid out as all NATS clients and tools expect it."""

from collections.abc import Callable
from typing import Protocol

from nats.aio.msg import Msg
from nats.js import api

from kvflow.bus.guard import call_guarded
from kvflow.bus.nats_stream import Start
from kvflow.bus.port import KvHandler, KvUpdate, Subscription

OPERATION = "KV-Operation"
MARKER_REASON = "Nats-Marker-Reason"
MAX_BUCKET_BYTES = 64 * 1024 * 1024


class Store(Protocol):
    """What a bucket needs of the bus."""

    async def request_stored(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        """Publish into a stream and wait until it is stored."""

    async def follow(
        self,
        stream: str,
        subject: str,
        deliver: Callable[[Msg, int], None],
        *,
        start: Start,
        on_caught_up: Callable[[], None] | None,
    ) -> Subscription:
        """Follow a stream in order."""


def bucket_config(bucket: str, ttl_s: float, *, markers: bool) -> api.StreamConfig:
    """Return the stream behind a bucket: the last value of each key, in memory, for `ttl_s`."""
    return api.StreamConfig(
        name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1, max_age=ttl_s,
        max_bytes=MAX_BUCKET_BYTES, storage=api.StorageType.MEMORY, discard=api.DiscardPolicy.NEW, num_replicas=1,
        duplicate_window=min(ttl_s, 1.0), allow_rollup_hdrs=True, deny_delete=True, allow_direct=True,
        allow_msg_ttl=True if markers else None, subject_delete_marker_ttl=max(ttl_s, 1.0) if markers else None,
    )  # fmt: skip


class NatsKeyValue:
    """Implement the key-value port over one bucket."""

    def __init__(self, bus: Store, bucket: str, config: api.StreamConfig) -> None:
        self._bus = bus
        self._stream = str(config.name)
        self._prefix = f"$KV.{bucket}."

    async def put(self, key: str, value: bytes) -> None:
        """Store a value and restart its time to live."""
        await self._bus.request_stored(self._prefix + key, value, None)

    async def delete(self, key: str) -> None:
        """Delete a key, leaving a marker for watchers that ages out like a value."""
        await self._bus.request_stored(self._prefix + key, b"", {OPERATION: "PURGE", api.Header.ROLLUP.value: "sub"})

    async def watch(self, handler: KvHandler) -> Subscription:
        """Deliver the present entries, None once, then changes; keys that a watcher never saw do not go."""
        live: set[str] = set()

        def deliver(msg: Msg, _sequence: int) -> None:
            key = msg.subject.removeprefix(self._prefix)
            headers = msg.headers or {}
            if OPERATION not in headers and MARKER_REASON not in headers:
                live.add(key)
                call_guarded(handler, KvUpdate(key, msg.data))
            elif key in live:
                live.discard(key)
                call_guarded(handler, KvUpdate(key, None, expired=headers.get(MARKER_REASON) == "MaxAge"))

        return await self._bus.follow(
            self._stream,
            self._prefix + ">",
            deliver,
            start=Start(last_per_subject=True),
            on_caught_up=lambda: call_guarded(handler, None),
        )
