"""Follow a JetStream stream in order, across lost messages, reconnects and streams that vanished."""

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import api
from nats.js.errors import NotFoundError

from kvflow.bus.nats_dial import NATS_ERRORS
from kvflow.errors import BusError

HEARTBEAT_S = 2.0
STALE_AFTER_S = 3 * HEARTBEAT_S
CONSUMER_IDLE_S = 30.0
REQUEST_TIMEOUT_S = 5.0

log = structlog.get_logger()

Deliver = Callable[[Msg, int], None]


@dataclass(frozen=True, slots=True)
class Start:
    """Say where to begin: everything (None), the last message of every subject, or only the last `since_s` seconds."""

    since_s: float | None = None
    last_per_subject: bool = False


class Follower:
    """Deliver a stream's messages on one subject exactly in order, through an ephemeral push consumer.

    The consumer acknowledges nothing; its own sequence numbers and heartbeats show a gap, upon which a new consumer
    starts behind the last message delivered. `deliver` gets each message and its stream sequence; it must not raise.
    """

    def __init__(
        self,
        stream: str,
        subject: str,
        deliver: Deliver,
        *,
        start: Start,
        on_caught_up: Callable[[], None],
        on_gap: Callable[[], None],
    ) -> None:
        self.stream = stream
        self._subject = subject
        self._deliver = deliver
        self._start = start
        self._on_caught_up = on_caught_up
        self._on_gap = on_gap
        self._client: Client | None = None
        self._subscription: NatsSubscription | None = None
        self._generation = 0
        self._created: dt.datetime | None = None
        self._next_stream_seq = 0
        self._next_consumer_seq = 1
        self._caught_up = False
        self._broken = False
        self._heard = 0.0
        self.restarts = 0

    @property
    def needs_restart(self) -> bool:
        """Return whether messages were lost or the consumer has gone silent."""
        return self._broken or time.monotonic() - self._heard > STALE_AFTER_S

    async def restart(self, client: Client) -> None:
        """Begin, or go on behind the last message delivered, with a new consumer; raise BusError."""
        await self.stop()
        self._generation += 1
        generation = self._generation
        self._client = client
        self._next_consumer_seq = 1
        self._broken = False
        self._heard = time.monotonic()
        if generation > 1:
            self.restarts += 1

        async def receive(msg: Msg) -> None:
            if generation == self._generation:
                await self._receive(client, msg)

        inbox = client.new_inbox()
        js = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            info = await js.stream_info(self.stream)
            config = self._consumer(info, inbox)
            # No limits: what the server has sent cannot be pushed back, and a drop here would only mean to ask again.
            self._subscription = await client.subscribe(inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0)
            consumer = await js.add_consumer(self.stream, config)
        except NotFoundError as error:
            self._broken = True
            raise BusError(f"stream {self.stream} does not exist", remedy="call ensure_stream first") from error
        except NATS_ERRORS as error:
            self._broken = True
            raise BusError(f"cannot follow stream {self.stream}: {error}") from error
        if not consumer.num_pending and not (consumer.delivered and consumer.delivered.consumer_seq):
            self._reached_end()

    async def stop(self) -> None:
        """Stop deliveries at once; the server drops the consumer when nobody listens to its inbox."""
        self._generation += 1
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._client is None or self._client.is_closed:
            return
        try:
            await subscription.unsubscribe()
        except NATS_ERRORS as error:
            log.debug("unsubscribe_failed", stream=self.stream, error=str(error))

    def _consumer(self, info: api.StreamInfo, inbox: str) -> api.ConsumerConfig:
        """Choose where to begin in the stream as it is now."""
        policy, sequence, since = api.DeliverPolicy.ALL, None, None
        recreated = self._created is not None and self._created != info.created
        if recreated:
            # The stream was lost and made anew: all that it holds was published since, so take everything.
            log.warning("stream_recreated", stream=self.stream, last_sequence=self._next_stream_seq - 1)
            self._next_stream_seq = 0
        elif not self._next_stream_seq and self._start.since_s == 0:
            self._next_stream_seq = info.state.last_seq + 1
        if self._next_stream_seq:
            policy, sequence = api.DeliverPolicy.BY_START_SEQUENCE, self._next_stream_seq
        elif self._start.since_s and not recreated:
            past = dt.timedelta(seconds=self._start.since_s)
            policy, since = api.DeliverPolicy.BY_START_TIME, dt.datetime.now(dt.UTC) - past
        if policy is api.DeliverPolicy.ALL and self._start.last_per_subject:
            policy = api.DeliverPolicy.LAST_PER_SUBJECT
        self._created = info.created
        return api.ConsumerConfig(
            deliver_policy=policy, opt_start_seq=sequence, opt_start_time=since, filter_subject=self._subject,
            deliver_subject=inbox, ack_policy=api.AckPolicy.NONE, max_deliver=1, flow_control=True,
            idle_heartbeat=HEARTBEAT_S, inactive_threshold=CONSUMER_IDLE_S, mem_storage=True, num_replicas=1,
        )  # fmt: skip

    async def _receive(self, client: Client, msg: Msg) -> None:
        self._heard = time.monotonic()
        if msg.headers and msg.headers.get(api.Header.STATUS) is not None and not msg.data:
            await self._control(client, msg)
            return
        if self._broken:
            return
        fields = msg.metadata
        if fields.sequence.consumer != self._next_consumer_seq:
            self._gap(f"expected message {self._next_consumer_seq} of the consumer, got {fields.sequence.consumer}")
            return
        self._next_consumer_seq += 1
        self._next_stream_seq = fields.sequence.stream + 1
        self._deliver(msg, fields.sequence.stream)
        if not fields.num_pending:
            self._reached_end()

    async def _control(self, client: Client, msg: Msg) -> None:
        """Answer flow control, and compare a heartbeat's position with ours."""
        headers = msg.headers or {}
        reply = msg.reply or headers.get(api.Header.CONSUMER_STALLED, "")
        if reply:  # the server holds back until it hears that what it sent so far has been taken
            await client.publish(reply)
            return
        last = headers.get(api.Header.LAST_CONSUMER)
        if last is None or self._broken:
            return
        if last != str(self._next_consumer_seq - 1):
            self._gap(f"the consumer has sent {last} messages, {self._next_consumer_seq - 1} arrived")
        else:
            self._reached_end()  # a heartbeat means that there was nothing to send

    def _gap(self, detail: str) -> None:
        self._broken = True
        log.warning("stream_gap", stream=self.stream, detail=detail)
        self._on_gap()

    def _reached_end(self) -> None:
        if not self._caught_up:
            self._caught_up = True
            self._on_caught_up()
