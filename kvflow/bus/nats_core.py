"""Subscriptions of the NATS bus that outlive a connection."""

from __future__ import annotations

import contextlib

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvflow.bus.guard import call_guarded
from kvflow.bus.nats_dial import NATS_ERRORS
from kvflow.bus.nats_stream import Follower
from kvflow.bus.port import Delivery, Handler

PENDING_MESSAGES = 1 << 20
PENDING_BYTES = 512 * 1024 * 1024


class CoreSubscription:
    """Remember a core subscription, so that it can be placed on another connection; `kept` is what the bus restores."""

    def __init__(self, subject: str, queue: str, handler: Handler, kept: dict[CoreSubscription, None]) -> None:
        self._kept = kept
        self._subject = subject
        self._queue = queue
        self._handler = handler
        self._client: Client | None = None
        self._placed: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        """Place the subscription on a connection; once per connection."""
        if self._client is client:
            return
        self._client = client

        async def receive(msg: Msg) -> None:
            call_guarded(self._handler, Delivery(msg.subject, msg.data))

        self._placed = await client.subscribe(
            self._subject,
            self._queue,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        """Stop deliveries; calling it again does nothing."""
        self._kept.pop(self, None)
        placed, self._placed = self._placed, None
        if placed is None or self._client is None or self._client.is_closed or self._client.is_draining:
            return
        with contextlib.suppress(*NATS_ERRORS):  # a connection that ends now has no subscriptions either
            await placed.unsubscribe()


class Following:
    """End a follower; `kept` is what the bus restores."""

    def __init__(self, follower: Follower, kept: dict[Follower, None]) -> None:
        self._kept = kept
        self._follower = follower

    async def unsubscribe(self) -> None:
        """Stop deliveries; calling it again does nothing."""
        self._kept.pop(self._follower, None)
        await self._follower.stop()
