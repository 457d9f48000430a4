"""The outbox: nothing that a peer made an actor say may end the actor or hold up what others wait for."""

import anyio
import pytest

from kvflow.actors.base import Mailbox
from kvflow.actors.outbox import Outbox
from kvflow.bus.memory import MemoryBroker, MemoryBus
from kvflow.bus.port import Delivery
from kvflow.errors import BusError
from kvflow.events import EventSink
from kvflow.messages import EngineRef, Subjects, TargetCancelled, TransferEvent, encode

pytestmark = pytest.mark.anyio

CANCEL = TargetCancelled(
    transfer_id="t", attempt=1, target=EngineRef(engine_id="d", incarnation="1"), request_id="r"
)  # fmt: skip


class PickyBus(MemoryBus):
    """Refuse one subject for good, as NATS does with what is too large."""

    async def publish(self, subject: str, data: bytes) -> None:
        if subject == "refused":
            raise BusError("will not have it")
        await super().publish(subject, data)


async def test_i7_hostile_event_or_refused_message_holds_nothing_up() -> None:
    bus = PickyBus(MemoryBroker())
    heard: list[Delivery] = []
    await bus.subscribe("wanted", heard.append)
    outbox = Outbox(bus, EventSink(bus, Subjects("c"), "test"), "test")
    outbox.emit(TransferEvent(kind="rejected", transfer_id="", at=0.0, actor="test"))
    outbox.send("refused", CANCEL)
    outbox.send("wanted", CANCEL)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        with anyio.fail_after(5):
            while not heard:  # noqa: ASYNC110 - the bus has no event to wait for
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert [delivery.data for delivery in heard] == [encode(CANCEL)]
    assert outbox.lost == 1
    await bus.close()


def test_full_mailbox_still_takes_the_consumers_own_results() -> None:
    mailbox: Mailbox[int] = Mailbox("test", limit=1)
    assert mailbox.put(1)
    assert not mailbox.put(2)
    assert mailbox.put(3, own=True)
    assert mailbox.drain() == [1, 3]
