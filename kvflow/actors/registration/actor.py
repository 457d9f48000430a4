"""The registration actor's driver: takes registrations and cancels, rejects with a reason or passes on to matching."""

import time
from collections.abc import Callable

import anyio
import anyio.abc
import structlog

from kvflow.actors.base import Mailbox, decoding_handler
from kvflow.actors.outbox import Outbox
from kvflow.actors.registration.state import Accepted, Rejected, Verdict, check
from kvflow.bus.port import Bus, Subscription
from kvflow.config import Settings
from kvflow.directory import Directory, DirectoryChange
from kvflow.errors import WireError
from kvflow.events import EventSink
from kvflow.messages import (
    EngineCard,
    EngineRef,
    Subjects,
    TargetCancelled,
    TargetRegistered,
    TransferEvent,
    TransferFailed,
    shard_of,
)

QUEUE = "registration"
# A registration that comes before the directory has told everything, or right behind its engine's first card, waits.
PATIENCE_S = 1.5
RECHECK_S = 0.02

Inquiry = TargetRegistered | TargetCancelled

log = structlog.get_logger()


class RegistrationActor:
    """Be the front door of matching; any number of these serve one cluster."""

    def __init__(
        self, *, bus: Bus, settings: Settings, directory: Directory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._directory = directory
        self._clock = clock
        self._subjects = Subjects(settings.cluster)
        self._mailbox: Mailbox[Inquiry] = Mailbox("registration")
        self._events = EventSink(bus, self._subjects, "registration")
        self._outbox = Outbox(bus, self._events, "registration")
        self._engines: dict[EngineRef, tuple[EngineCard, ...]] = {}
        self._engines_stale = True
        self._waiting: list[tuple[float, TargetRegistered]] = []
        self.rejected = 0

    @property
    def malformed(self) -> int:
        """Return how many messages were dropped because they could not be decoded."""
        return self._mailbox.malformed

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready once subscribed. Raises BusError when the bus refuses."""
        await self._events.ensure_stream(self._settings.events_retention_s)
        handler = decoding_handler(self._mailbox, None, TargetRegistered, TargetCancelled)
        subscriptions: list[Subscription] = [
            await self._directory.watch(self._on_directory),
            await self._bus.subscribe(self._subjects.registration(), handler, queue=QUEUE),
        ]
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._outbox.run)
                task_status.started()
                await self._serve()
        finally:
            with anyio.move_on_after(1.0, shield=True):
                for subscription in subscriptions:
                    await subscription.unsubscribe()

    def _on_directory(self, change: DirectoryChange) -> None:  # noqa: ARG002 - whatever changed, ask again
        self._engines_stale = True

    async def _serve(self) -> None:
        while True:
            for inquiry in self._mailbox.drain() or await self._wait():
                self._take(inquiry, self._clock() + PATIENCE_S)
            waiting, self._waiting = self._waiting, []
            for until, registration in waiting:
                self._take(registration, until)
            await anyio.lowlevel.checkpoint()

    async def _wait(self) -> list[Inquiry]:
        if not self._waiting:
            return [await self._mailbox.get()]
        with anyio.move_on_after(RECHECK_S):
            return [await self._mailbox.get()]
        return []

    def _take(self, inquiry: Inquiry, until: float) -> None:
        try:
            if isinstance(inquiry, TargetCancelled):
                self._forward(inquiry)  # it may overtake a registration that waits here: matching expects that
                return
            verdict = self._judge(inquiry)
            if isinstance(verdict, Accepted):
                self._forward(inquiry)
            elif verdict.reason == "unknown_engine" and self._clock() < until:
                self._waiting.append((until, inquiry))
            elif inquiry.repeated:
                self._reject_repeated(inquiry, verdict)
            else:
                self._reject(inquiry, verdict)
        except WireError as error:  # an empty engine id, for one: nobody can be listening there
            log.warning("registration_unaddressable", error=str(error))

    def _judge(self, registration: TargetRegistered) -> Verdict:
        if self._engines_stale:
            self._engines = self._directory.engines()
            self._engines_stale = False
        try:
            return check(registration, self._engines.get(registration.target, ()))
        except Exception as error:
            # A defect must cost one registration, and its engine must hear of it.
            log.exception("check_failed", transfer_id=registration.transfer_id)
            return Rejected("bad_registration", f"the check failed: {error}")

    def _forward(self, inquiry: Inquiry) -> None:
        shard = shard_of(inquiry.transfer_id, self._settings.shards)
        self._outbox.send(self._subjects.control(shard, "target", inquiry.target), inquiry)

    def _reject_repeated(self, registration: TargetRegistered, rejected: Rejected) -> None:
        """Leave the end to matching: what came before was perhaps let in, and WRITEs to it may be under way."""
        if rejected.reason == "unknown_engine":
            return  # matching watches engines itself, and a lapse of the cards may pass
        cancelled = TargetCancelled(
            transfer_id=registration.transfer_id, attempt=registration.attempt, target=registration.target,
            request_id=registration.request_id, detail=f"{rejected.reason}: {rejected.detail}",
        )  # fmt: skip
        self._forward(cancelled)

    def _reject(self, registration: TargetRegistered, rejected: Rejected) -> None:
        self.rejected += 1
        log.warning(
            "registration_rejected", transfer_id=registration.transfer_id, target=str(registration.target),
            reason=rejected.reason, detail=rejected.detail,
        )  # fmt: skip
        failed = TransferFailed(
            transfer_id=registration.transfer_id, target=registration.target, target_attempt=registration.attempt,
            request_id=registration.request_id, reason=rejected.reason, detail=rejected.detail,
        )  # fmt: skip
        self._outbox.send(self._subjects.engine(registration.target), failed)
        self._outbox.emit(
            TransferEvent(
                kind="rejected", transfer_id=registration.transfer_id, at=0.0, actor="registration",
                attempt=registration.attempt, request_id=registration.request_id, target=registration.target,
                tokens_total=registration.prompt_tokens, reason=rejected.reason, detail=rejected.detail,
            )
        )  # fmt: skip
