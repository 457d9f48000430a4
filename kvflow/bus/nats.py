"""The bus over NATS: core subjects, JetStream memory streams and key-value buckets.

nats-py's own reconnection is not used. When a connection ends, the bus dials a new one with back-off for ever, and
before it lets anything out it restores what it knows: subscriptions, streams and buckets (a restarted server has lost
those in memory), and replays, which go on behind the last message delivered. What is published meanwhile waits in a
backlog.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import MaxPayloadError, SlowConsumerError
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError

from kvflow.bus.guard import bounded, call_guarded, check_subject, end_task
from kvflow.bus.nats_core import CoreSubscription, Following
from kvflow.bus.nats_dial import NATS_ERRORS, AccessError, dial, readable, servers_of, stream_error
from kvflow.bus.nats_kv import NatsKeyValue, bucket_config
from kvflow.bus.nats_stream import REQUEST_TIMEOUT_S, Follower, Start
from kvflow.bus.port import BusState, Delivery, Handler, KeyValue, StateHandler, StreamSpec, Subscription
from kvflow.config import Settings
from kvflow.errors import BusError

BACKLOG_BYTES = 16 * 1024 * 1024
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0
SUPERVISE_S = 1.0
CLOSE_TIMEOUT_S = 3.0
# A pong that comes after its waiter was cancelled would break nats-py's reader, so flushes wait longer than it pings.
PONG_TIMEOUT_S = 30
STREAM_EXISTS_OTHERWISE = 10058

log = structlog.get_logger()


class NatsBus:
    """Implement the bus port over one NATS connection; made by `NatsBus.connect`."""

    def __init__(self, settings: Settings, *, name: str, on_state: StateHandler | None = None) -> None:
        self._settings = settings
        self._servers = servers_of(settings)
        self._name = name
        self._on_state = on_state
        self._client: Client | None = None
        self._ready = False
        self._closing = False
        self._wake = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[CoreSubscription, None] = {}
        self._followers: dict[Follower, None] = {}
        self._streams: dict[str, api.StreamConfig] = {}
        self._backlog: deque[tuple[str, bytes]] = deque()
        self._backlog_bytes = 0
        self.slow_consumers = 0
        self.reconnects = 0

    @classmethod
    async def connect(cls, settings: Settings, *, name: str, on_state: StateHandler | None = None) -> "NatsBus":
        """Connect within `nats_connect_timeout_s`, waiting for a server that is still starting; raise BusError."""
        bus = cls(settings, name=name, on_state=on_state)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.nats_connect_timeout_s
        while True:
            try:
                bus._client = await bus._dial(max(deadline - loop.time(), 0.1))
                break
            except AccessError:
                raise
            except BusError:
                if loop.time() + 2 * FIRST_RETRY_S > deadline:
                    raise
                await asyncio.sleep(FIRST_RETRY_S)
        bus._ready = True
        bus._supervisor = asyncio.create_task(bus._supervise(), name=f"{name}-bus")
        bus._tell("connected", readable(bus._servers))
        return bus

    @property
    def connected(self) -> bool:
        """Return whether the server can be reached right now and everything is restored."""
        return self._ready and self._client is not None and self._client.is_connected

    async def publish(self, subject: str, data: bytes) -> None:
        """Send; while the server is away, keep up to BACKLOG_BYTES and raise BusError beyond."""
        check_subject(subject)
        client = self._open_client()
        if client is None:
            self._defer(subject, data)
            return
        try:
            await client.publish(subject, data)
        except MaxPayloadError as error:
            raise BusError(
                f"a message of {len(data)} bytes exceeds the server's limit of {client.max_payload}",
                remedy="raise max_payload in the server's configuration",
            ) from error
        except NATS_ERRORS as error:
            if not client.is_closed:
                raise BusError(f"cannot publish to {subject}: {error}") from error
            self._defer(subject, data)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Deliver matching messages; when this returns, the server knows of the interest."""
        self._check_open()
        subscription = CoreSubscription(subject, queue, handler, self._subscriptions)
        self._subscriptions[subscription] = None
        client = self._client
        if client is not None and not client.is_closed:
            try:
                await subscription.attach(client)
                await self._round_trip(client, REQUEST_TIMEOUT_S)
            except NATS_ERRORS as error:
                if not client.is_closed:  # otherwise the restore attaches it
                    await subscription.unsubscribe()
                    raise BusError(f"cannot subscribe to {subject}: {error}") from error
        return subscription

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the memory stream or adapt it, now and whenever the server has lost it."""
        await self._keep_stream(
            api.StreamConfig(
                name=spec.name, subjects=list(spec.subjects), retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.MEMORY, discard=api.DiscardPolicy.OLD, max_age=spec.max_age_s,
                max_bytes=spec.max_bytes, num_replicas=1, duplicate_window=min(spec.max_age_s, 1.0), allow_direct=True,
            )
        )  # fmt: skip

    async def replay(
        self, stream: str, subject: str, handler: Handler, *, on_caught_up: Callable[[], None] | None = None,
        since_s: float | None = None,
    ) -> Subscription:  # fmt: skip
        """Deliver what the stream holds of `subject`, then follow it, in order and without gaps over reconnects."""

        def deliver(msg: Msg, sequence: int) -> None:
            call_guarded(handler, Delivery(msg.subject, msg.data, sequence))

        return await self.follow(stream, subject, deliver, start=Start(since_s=since_s), on_caught_up=on_caught_up)

    async def follow(
        self, stream: str, subject: str, deliver: Callable[[Msg, int], None], *, start: Start,
        on_caught_up: Callable[[], None] | None,
    ) -> Subscription:  # fmt: skip
        """Start a follower and keep it going until it is unsubscribed."""
        client = self._require_client()
        follower = Follower(
            stream, subject, deliver, start=start, on_caught_up=on_caught_up or _nothing, on_gap=self._wake.set
        )
        await follower.restart(client)
        self._followers[follower] = None
        return Following(follower, self._followers)

    async def key_value(self, bucket: str, *, ttl_s: float) -> KeyValue:
        """Open the bucket, creating it (in memory) when missing."""
        client = self._require_client()
        # Servers from 2.11 on tell watchers of expiry by a marker; with older ones only the watchers' own clocks do.
        version = client.connected_server_version
        config = bucket_config(bucket, ttl_s, markers=(version.major, version.minor) >= (2, 11))
        await self._keep_stream(config)
        return NatsKeyValue(self, bucket, config)

    async def request_stored(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        """Publish into a stream and wait until it is stored; raise BusError. Restores a stream that has vanished."""
        for last_try in (False, True):
            client = self._require_client()
            try:
                await client.jetstream(timeout=REQUEST_TIMEOUT_S).publish(subject, data, headers=headers)
                return
            except NoStreamResponseError as error:
                if last_try:
                    raise BusError(f"no stream takes {subject}", remedy="open the bucket first") from error
                for config in list(self._streams.values()):
                    await self._create(client, config)
            except NATS_ERRORS as error:
                raise stream_error(f"cannot store into {subject}", error) from error

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything published has reached the server; raise BusError when it does not within the time."""
        client = self._require_client()
        try:
            await self._round_trip(client, timeout_s)
        except NATS_ERRORS as error:
            raise BusError(f"NATS did not confirm within {timeout_s:g} s: {error}") from error

    async def close(self) -> None:
        """Drain the subscriptions for up to CLOSE_TIMEOUT_S and leave; calling it again does nothing."""
        if self._closing:
            return
        self._closing = True
        if self._supervisor is not None:
            await end_task(self._supervisor)
        for follower in list(self._followers):
            await follower.stop()
        self._ready = False
        if self._client is not None and not self._client.is_closed:
            await bounded(self._client.drain(), CLOSE_TIMEOUT_S)
            if not self._client.is_closed:
                await bounded(self._client.close(), CLOSE_TIMEOUT_S)
        for task in self._flushes:
            task.cancel()
        self._tell("closed", "")

    # Connection.

    async def _dial(self, timeout_s: float) -> Client:
        return await dial(
            self._settings, self._servers, name=self._name, timeout_s=timeout_s, on_error=self._note_error,
            on_closed=self._note_closed,
        )  # fmt: skip

    async def _note_closed(self) -> None:
        self._wake.set()

    async def _note_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self.slow_consumers += 1
            if self.slow_consumers & (self.slow_consumers - 1) == 0:  # at powers of two: a flood must not flood the log
                log.error("bus_slow_consumer", bus=self._name, subject=error.subject, dropped=self.slow_consumers)
                self._tell("slow_consumer", error.subject)
        elif not self._closing:
            log.warning("bus_error", bus=self._name, error=str(error) or type(error).__name__)
            self._tell("error", str(error) or type(error).__name__)

    async def _supervise(self) -> None:
        """Replace a lost connection and mend followers; the tick catches what no callback tells."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUPERVISE_S):
                    await self._wake.wait()
            self._wake.clear()
            client = self._client
            try:
                if client is None or client.is_closed:
                    await self._reopen()
                    continue
                for follower in [f for f in self._followers if f.needs_restart]:
                    await self._mend(client, follower)
            except BusError as error:
                log.warning("bus_not_restored", bus=self._name, error=str(error))
            except Exception as error:  # whatever it is, giving up would leave the bus dead for good
                log.exception("bus_supervisor_failed", bus=self._name, error=str(error))

    async def _mend(self, client: Client, follower: Follower) -> None:
        config = self._streams.get(follower.stream)
        if config is not None:  # it may have been deleted under us
            await self._create(client, config)
        await follower.restart(client)

    async def _reopen(self) -> None:
        """Dial until the server is back, restore everything, and let the backlog out."""
        if self._ready:
            self._ready = False
            log.warning("bus_disconnected", bus=self._name, servers=readable(self._servers))
            self._tell("disconnected", readable(self._servers))
        delay, failures = FIRST_RETRY_S, 0
        while True:
            try:
                self._client = await self._dial(self._settings.nats_connect_timeout_s)
                await self._restore(self._client)
                break
            except (BusError, *NATS_ERRORS) as error:
                if self._client is not None and not self._client.is_closed:
                    await bounded(self._client.close(), CLOSE_TIMEOUT_S)
                failures += 1
                if failures & (failures - 1) == 0:
                    log.warning("bus_unreachable", bus=self._name, attempts=failures, error=str(error))
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, so that clients spread
            delay = min(2 * delay, LONGEST_RETRY_S)
        self.reconnects += 1
        log.info("bus_reconnected", bus=self._name, servers=readable(self._servers), failures=failures)
        self._tell("reconnected", readable(self._servers))

    async def _restore(self, client: Client) -> None:
        for subscription in list(self._subscriptions):
            await subscription.attach(client)
        await self._round_trip(client, REQUEST_TIMEOUT_S)
        # Streams before anything is published: what goes out without them would be missing from every replay.
        for config in list(self._streams.values()):
            await self._create(client, config)
        for follower in list(self._followers):
            with contextlib.suppress(BusError):  # its stream may be another process's to restore: the tick tries again
                await follower.restart(client)
        while self._backlog:
            subject, data = self._backlog[0]
            await client.publish(subject, data)
            self._backlog.popleft()
            self._backlog_bytes -= len(data)
        self._ready = True

    async def _keep_stream(self, config: api.StreamConfig) -> None:
        await self._create(self._require_client(), config)
        self._streams[str(config.name)] = config

    async def _create(self, client: Client, config: api.StreamConfig) -> None:
        js = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            try:
                await js.add_stream(config)
            except APIError as error:
                if error.err_code != STREAM_EXISTS_OTHERWISE:
                    raise
                await js.update_stream(config)
        except NATS_ERRORS as error:
            raise stream_error(f"cannot create the stream {config.name}", error) from error

    async def _round_trip(self, client: Client, timeout_s: float) -> None:
        task = asyncio.create_task(client.flush(timeout=PONG_TIMEOUT_S))
        self._flushes.add(task)
        task.add_done_callback(self._flush_ended)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise TimeoutError("no answer to a ping")
        task.result()

    def _flush_ended(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits sees it; if nobody does, it is of no interest any more

    def _defer(self, subject: str, data: bytes) -> None:
        if self._backlog_bytes + len(data) > BACKLOG_BYTES:
            raise BusError("NATS has been away for too long: the backlog is full", remedy="check the NATS server")
        self._backlog.append((subject, data))
        self._backlog_bytes += len(data)

    def _check_open(self) -> None:
        if self._closing:
            raise BusError("the bus is closed")

    def _open_client(self) -> Client | None:
        """Return the client when messages may go out, None while they have to wait."""
        self._check_open()
        client = self._client
        return client if self._ready and client is not None and not client.is_closed else None

    def _require_client(self) -> Client:
        client = self._open_client()
        if client is None:
            raise BusError(f"NATS at {readable(self._servers)} is away", remedy="check the NATS server")
        return client

    def _tell(self, state: BusState, detail: str) -> None:
        if self._on_state is not None:
            call_guarded(partial(self._on_state, state), detail)


def _nothing() -> None:
    """Serve as the callback of those who did not give one."""
