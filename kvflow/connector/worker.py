"""The worker half: publishes what a step made final, and tells the engine what has arrived, failed or been released.

The engine's worker thread owns all state. The bridge thread only appends decoded messages to `inbox`, whose appends and
pops are atomic. No method waits.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import structlog

from kvflow.config import Settings
from kvflow.connector.bounds import answer_bound_s
from kvflow.connector.port import WorkerPort
from kvflow.connector.step import NO_RESULTS, Hold, LoadStart, Progress, StepMeta, StepResults
from kvflow.dataplane.memory import MemoryRange
from kvflow.messages import (
    CloseReason,
    EngineProfile,
    Message,
    SourceClosed,
    SourceProgress,
    SourceReleased,
    Subjects,
    TargetCancelled,
    TransferCompleted,
    TransferFailed,
    shard_of,
)

log = structlog.get_logger()

HOUSEKEEPING_S = 1.0
# An answer may overtake the step that tells of its question, but not by more than a step takes.
EARLY_KEPT_S = 120.0
EARLY_LIMIT = 65_536
# A release may have been lost, or the word that the source has ended.
ASK_HELD_S = 10.0


@dataclass(slots=True)
class _Load:
    start: LoadStart
    deadline: float
    reminded: bool = False


@dataclass(slots=True)
class _Held:
    hold: Hold
    deadline: float
    ask_at: float
    reminded: bool = False


class WorkerHalf:
    """Be the transfer side of one engine rank's worker."""

    def __init__(self, settings: Settings, link: WorkerPort, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Publish through `link`, which also has the rank's memory attached. Nothing happens before `start`."""
        self._settings = settings
        self._link = link
        self._clock = clock
        self._subjects = Subjects(settings.cluster)
        self._profile: EngineProfile | None = None
        self.inbox: deque[Message] = deque()
        self._loads: dict[str, _Load] = {}
        self._held: dict[str, _Held] = {}
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        # Answers to questions that this worker has not heard of yet: (request id, attempt) → (answer, when).
        self._early: OrderedDict[tuple[str, int], tuple[Message, float]] = OrderedDict()
        self._next_housekeeping = 0.0
        self._fenced = False
        # No actor has had the memory for so long: its card has expired everywhere and nothing can be in flight.
        self._answer_s = answer_bound_s(settings)
        self._fence_s = settings.card_ttl_s + settings.quarantine_s
        self._bus_grace_s = self._fence_s + settings.transfer_wait_s
        self.counters: Counter[str] = Counter()

    def start(self, profile: EngineProfile, memory: Sequence[MemoryRange]) -> None:
        """Attach this rank's memory (or start its actors here), in the background."""
        self._profile = profile
        self._link.start(profile, memory, self.inbox)

    @property
    def waiting(self) -> int:
        """Return how many loads and held sources wait for an answer."""
        return len(self._loads) + len(self._held)

    def begin_step(self, meta: StepMeta) -> None:
        """Take note of loads that start and of sources that are held from this step on."""
        if not meta.loads and not meta.held:
            return
        now = self._clock()
        for start in meta.loads:
            self._loads[start.request_id] = _Load(start, now + start.bound_s)
            self._answer_early(start.request_id, start.attempt)
        for hold in meta.held:
            self._held[hold.request_id] = _Held(hold, now + hold.bound_s, now + ASK_HELD_S)
            self._answer_early(hold.request_id, hold.attempt)

    def after_forward(self, meta: StepMeta, publish: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Publish the progress of a step whose forward pass is over.

        `publish`, when given, is handed the act of publishing, to be run (on any thread) once the device is done.
        """
        if not meta.progress:
            return
        if publish is None:
            self._publish(meta.progress)
        else:
            publish(lambda: self._publish(meta.progress))

    def results(self, finished_req_ids: AbstractSet[str]) -> StepResults:
        """Return what has ended since the last call; each request is reported once."""
        del finished_req_ids  # only sources that `begin_step` named as held are ever reported as sent
        inbox = self.inbox
        while inbox:
            self._take(inbox.popleft())
        if self._loads or self._held or self._fenced or self._early:
            now = self._clock()
            if now >= self._next_housekeeping:
                self._next_housekeeping = now + HOUSEKEEPING_S
                self._housekeep(now)
        if not self._sent and not self._received:
            return NO_RESULTS
        results = StepResults(self._sent, self._received, self._failed)
        self._sent, self._received, self._failed = set(), set(), set()
        return results

    def shutdown(self) -> None:
        """Detach, and forget everything that waits."""
        self._link.close()
        self._loads.clear()
        self._held.clear()
        self._early.clear()
        self.inbox.clear()

    # Progress.

    def _publish(self, progress: tuple[Progress, ...]) -> None:
        profile = self._profile
        if profile is None:
            return
        subject = self._subjects.transfer(profile.engine, profile.rank)
        for item in progress:
            self._link.post(
                subject,
                SourceProgress(
                    transfer_id=item.transfer_id, attempt=item.attempt, source=profile.engine, rank=profile.rank,
                    tokens_final=item.tokens_final, first_blocks=item.first_blocks, blocks=item.blocks, last=item.last,
                ),
            )  # fmt: skip

    # Answers.

    def _take(self, message: Message) -> None:
        match message:
            case TransferCompleted() | TransferFailed():
                load = self._loads.get(message.request_id)
                if load is None or load.start.attempt < message.target_attempt:
                    self._keep_early(message.request_id, message.target_attempt, message)
                elif load.start.attempt == message.target_attempt:
                    self._end_load(load, message)
            case SourceReleased():
                held = self._held.get(message.request_id)
                if held is None or held.hold.attempt < message.attempt:
                    self._keep_early(message.request_id, message.attempt, message)
                elif held.hold.attempt == message.attempt:
                    self._release(held, message.outcome)
            case _:
                self.counters["unexpected"] += 1

    def _keep_early(self, request_id: str, attempt: int, message: Message) -> None:
        self._early[request_id, attempt] = (message, self._clock())
        if len(self._early) > EARLY_LIMIT:
            self._early.popitem(last=False)
            self.counters["early_dropped"] += 1

    def _answer_early(self, request_id: str, attempt: int) -> None:
        if self._early and (kept := self._early.pop((request_id, attempt), None)) is not None:
            self._take(kept[0])

    def _end_load(self, load: _Load, message: TransferCompleted | TransferFailed) -> None:
        if isinstance(message, TransferCompleted):
            profile = self._profile
            if profile is None or message.rank != profile.rank or message.transfer_id != load.start.transfer_id:
                self.counters["unexpected"] += 1
                return
            self.counters["completed"] += 1
        else:
            self._fail_load(load, message.reason, message.detail)
            return
        self._finish_load(load)

    def _fail_load(self, load: _Load, reason: str, detail: str) -> None:
        start = load.start
        self.counters[f"failed_{reason}"] += 1
        tell = log.info if reason == "cancelled" else log.warning  # what was asked for is no trouble
        tell("load_failed", request_id=start.request_id, transfer_id=start.transfer_id, reason=reason, detail=detail)
        self._failed.add(start.request_id)
        self._finish_load(load)

    def _finish_load(self, load: _Load) -> None:
        del self._loads[load.start.request_id]
        self._received.add(load.start.request_id)

    def _release(self, held: _Held, outcome: str) -> None:
        del self._held[held.hold.request_id]
        self.counters[f"released_{outcome}"] += 1
        self._sent.add(held.hold.request_id)

    # The engine's own bound, for when nobody answers.

    def _housekeep(self, now: float) -> None:
        while self._early:
            key, (_, kept_at) = next(iter(self._early.items()))
            if now - kept_at < EARLY_KEPT_S:
                break
            del self._early[key]
        if self._link.detached_for() >= self._fence_s:
            self._end_all()
        elif not self._fenced and (self._remind(now) or self._cut_off()):
            self._fenced = True
            self.counters["fenced"] += 1
            log.error(
                "memory_fenced", loads=len(self._loads), held=len(self._held),
                note="nobody answered within the bounds; the actors lose this rank's memory, then the requests end",
            )  # fmt: skip
            self._link.fence()

    def _cut_off(self) -> bool:
        return bool(self.waiting) and self._link.bus_down_for() > self._bus_grace_s

    def _remind(self, now: float) -> bool:
        """Ask once more for what is overdue; return whether something stayed unanswered even then."""
        unanswered = False
        for load in self._loads.values():
            if now < load.deadline:
                continue
            if load.reminded:
                unanswered = True
                continue
            load.reminded, load.deadline = True, now + self._answer_s
            self._cancel(load.start)
        for held in self._held.values():
            if now < held.deadline:
                if now >= held.ask_at:
                    held.ask_at = now + ASK_HELD_S
                    self._ask_held(held)
                continue
            if held.reminded:
                unanswered = True
                continue
            held.reminded, held.deadline = True, now + self._answer_s
            self._give_up(held.hold)
        return unanswered

    def _cancel(self, start: LoadStart) -> None:
        self.counters["load_overdue"] += 1
        log.error("load_overdue", request_id=start.request_id, transfer_id=start.transfer_id, bound_s=start.bound_s)
        if self._profile is not None:
            self._link.post(
                self._subjects.registration(),
                TargetCancelled(
                    transfer_id=start.transfer_id, attempt=start.attempt, target=self._profile.engine,
                    request_id=start.request_id, detail="no answer within the bound",
                ),
            )  # fmt: skip

    def _ask_held(self, held: _Held) -> None:
        """Say again how a held source ended: who has missed it hears it, who has released the source says so again."""
        self.counters["asked_held"] += 1
        self._close(held.hold, "aborted" if held.reminded else held.hold.reason, "no release yet")

    def _give_up(self, hold: Hold) -> None:
        self.counters["release_overdue"] += 1
        log.error("release_overdue", request_id=hold.request_id, transfer_id=hold.transfer_id, bound_s=hold.bound_s)
        self._close(hold, "aborted", "no release within the bound")

    def _close(self, hold: Hold, reason: CloseReason, detail: str) -> None:
        if self._profile is not None:
            shard = shard_of(hold.transfer_id, self._settings.shards)
            self._link.post(
                self._subjects.control(shard, "source", self._profile.engine),
                SourceClosed(
                    transfer_id=hold.transfer_id, attempt=hold.attempt, source=self._profile.engine,
                    request_id=hold.request_id, reason=reason, detail=detail,
                ),
            )  # fmt: skip

    def _end_all(self) -> None:
        """End everything that waits: no actor has had the memory for long enough that nothing can touch it."""
        for load in list(self._loads.values()):
            self._fail_load(load, "unreachable", "the node has been away for too long")
        for held in list(self._held.values()):
            self._release(held, "unreachable")
        if self._fenced:
            self._fenced = False
            self._link.resume()
