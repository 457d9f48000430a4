"""What every actor is made of: a bounded mailbox filled by bus handlers, and a loop that steps a pure state.

An actor decodes, steps its state and performs the effects that come out. Bus handlers only enqueue. A message that is
not valid is counted and dropped; it never ends the actor.
"""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import structlog

from kvflow.bus.port import Delivery
from kvflow.errors import WireError
from kvflow.messages import AnyMessage, decode

T = TypeVar("T")

MAILBOX_LIMIT = 65_536

log = structlog.get_logger()


class Mailbox(Generic[T]):
    """Queue items for one consumer, up to a limit. Full means: the item is dropped, counted and reported."""

    def __init__(self, owner: str, limit: int = MAILBOX_LIMIT) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[T](math.inf)
        self._owner = owner
        self._limit = limit
        self.dropped = 0
        self.malformed = 0

    def put(self, item: T, *, own: bool = False) -> bool:
        """Enqueue without waiting; return whether the item was taken.

        The limit is against what others send: an `own` item, which answers something that the consumer did, is always
        taken.
        """
        if not own and self._send.statistics().current_buffer_used >= self._limit:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # at powers of two, so that a flood does not flood the log
                log.error("mailbox_full", actor=self._owner, dropped=self.dropped, limit=self._limit)
            return False
        try:
            self._send.send_nowait(item)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True

    async def get(self) -> T:
        """Wait for the next item; raise anyio.EndOfStream after `close` once all items are taken."""
        return await self._receive.receive()

    def drain(self) -> list[T]:
        """Return everything that is queued right now, without waiting."""
        items: list[T] = []
        while True:
            try:
                items.append(self._receive.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream):
                return items

    def close(self) -> None:
        """Take no more items."""
        self._send.close()

    def __len__(self) -> int:
        return self._send.statistics().current_buffer_used


def decoding_handler(mailbox: Mailbox[AnyMessage] | Mailbox[T], wrap: Callable[[AnyMessage], T] | None = None,
                     *accept: type) -> Callable[[Delivery], None]:  # fmt: skip
    """Return a bus handler that decodes into the mailbox, taking only `accept` types when given.

    `wrap` turns the message into a mailbox item (identity when None).
    """

    def handle(delivery: Delivery) -> None:
        try:
            message = decode(delivery.data)
            if accept and not isinstance(message, accept):
                raise WireError(f"unexpected {type(message).__name__}")
        except WireError as error:
            mailbox.malformed += 1
            if mailbox.malformed & (mailbox.malformed - 1) == 0:  # as above: a flood must not flood the log
                log.warning("message_dropped", subject=delivery.subject, error=str(error), count=mailbox.malformed)
            return
        mailbox.put(wrap(message) if wrap else message)  # type: ignore[arg-type]

    return handle
