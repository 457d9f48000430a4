"""The data that the matching reducer keeps: transfers, their sources, registrations and bindings, and deadlines."""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvflow.actors.matching.effects import Fail, Release
from kvflow.messages import EngineRef, FailureReason, SourceOpened, TargetRegistered, TransferBound

Answer = tuple[str, EngineRef, str, int]  # transfer id, engine, request id, attempt
TargetName = tuple[EngineRef, str]  # the target engine and its request id

_COMPACT_FROM = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound how long and how much the reducer waits and keeps. Durations are seconds.

    `quiesce_wait_s` is how long a live source may take to answer a revocation; it has to outlast the time within which
    a transfer actor answers whatever its WRITEs do. It is asked again every `quarantine_s` of it, and once at its end.
    """

    source_lease_s: float = 30.0
    compute_wait_s: float = 600.0
    quarantine_s: float = 5.0
    quiesce_wait_s: float = 10.0
    engine_grace_s: float = 12.0
    tombstone_s: float = 60.0
    max_live: int = 100_000
    max_sources: int = 16
    max_registrations: int = 256


@dataclass(slots=True, eq=False)
class Source:
    """One attempt of one engine to supply a transfer.

    `ended` says why it can supply no more: "", "superseded", "lost" or a CloseReason. `released` is the outcome told to
    the engine, or "" while the source may still hold blocks.
    """

    transfer: "Transfer"
    engine: EngineRef
    attempt: int
    request_id: str
    opened: SourceOpened | None
    sealed: bool = False
    ended: str = ""
    lost: bool = False
    lease_over: bool = False
    released: str = ""
    used: bool = False
    timer: int = 0

    @property
    def usable(self) -> bool:
        """Return whether a registration may be bound to it."""
        return not (self.ended or self.released or self.lease_over)


@dataclass(slots=True, eq=False)
class Registration:
    """One attempt of one target request to receive a transfer.

    `verdict` is the reason for which it is to end, as soon as no WRITE can land; `ended` says how it did ("completed",
    "empty" or a FailureReason). `offer` is dropped at the end. `completed` is a bit mask of target ranks.
    """

    transfer: "Transfer"
    target: EngineRef
    request_id: str
    attempt: int
    offer: TargetRegistered | None
    final: float = 0.0
    deadline: float = 0.0
    binding: "Binding | None" = None
    past_bindings: tuple[int, ...] = ()
    verdict: FailureReason | None = None
    detail: str = ""
    last_source_end: str = ""
    completed: int = 0
    ended: str = ""
    timer: int = 0

    @property
    def name(self) -> TargetName:
        """Return what its attempts have in common."""
        return self.target, self.request_id


@dataclass(slots=True, eq=False)
class Binding:
    """A source attempt that writes into a registration. `delivered` and `quiet` are bit masks of source ranks."""

    number: int
    source: Source
    registration: Registration
    message: TransferBound
    all_ranks: int
    delivered: int = 0
    quiet: int = 0
    revoked: FailureReason | None = None
    fence_at: float = 0.0
    fenced: bool = False
    timer: int = 0

    @property
    def is_delivered(self) -> bool:
        """Return whether every source rank has written its share."""
        return self.delivered == self.all_ranks

    @property
    def is_quiet(self) -> bool:
        """Return whether no WRITE of it can be in flight any more."""
        return self.fenced or (self.delivered | self.quiet) == self.all_ranks


@dataclass(slots=True, eq=False)
class Transfer:
    """Everything that shares a transfer id. Not live means: kept only as a tombstone until `expires`."""

    transfer_id: str
    sources: dict[EngineRef, Source] = field(default_factory=dict)
    registrations: dict[TargetName, Registration] = field(default_factory=dict)
    superseded: list[Registration] = field(default_factory=list)  # older attempts that have not ended yet
    retiring: list[Source] = field(default_factory=list)  # older attempts that may still be read
    bindings: dict[int, Binding] = field(default_factory=dict)
    live: bool = False
    expires: float = 0.0

    def reading(self, source: Source) -> bool:
        """Return whether a WRITE may still read this source's blocks."""
        for binding in self.bindings.values():  # a plain loop: this runs at every event
            if binding.source is source and not (binding.is_delivered or binding.is_quiet):
                return True
        return False

    def served(self, source: Source) -> int:
        """Return how many registrations need this source no more."""
        count = 0
        for registration in self.registrations.values():
            binding = registration.binding
            if registration.ended or (binding is not None and binding.source is source and binding.is_delivered):
                count += 1
        return count


@dataclass(slots=True, eq=False)
class Suspect:
    """An engine that sent messages but has no cards; it counts as gone when its timer fires."""

    engine: EngineRef
    timer: int = 0


Timed = Source | Registration | Binding | Suspect


class Timers:
    """Keep one deadline per object in a heap; moving or dropping a deadline leaves a stale entry, removed in time.

    An object's `timer` is the number of its valid entry, or 0.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._sequence = 0
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._stale

    @property
    def next(self) -> float | None:
        """Return the earliest time at which something may be due."""
        return self._heap[0][0] if self._heap else None

    def schedule(self, item: Timed, when: float) -> None:
        """Set the deadline of an object, replacing the one it had."""
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, item))
        moved = item.timer != 0
        item.timer = self._sequence
        if moved:
            self._stale += 1
            self._compact()

    def cancel(self, item: Timed) -> None:
        """Drop the deadline of an object, if it has one."""
        if item.timer:
            item.timer = 0
            self._stale += 1
            self._compact()

    def due(self, now: float) -> Iterator[Timed]:
        """Yield and forget the objects whose deadline has come, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, sequence, item = heapq.heappop(self._heap)
            if item.timer != sequence:
                self._stale -= 1
                continue
            item.timer = 0
            yield item

    def _compact(self) -> None:
        # Amortised: a rebuild happens after as many changes as it touches entries. Empty at once when nothing is live.
        if self._stale == len(self._heap):
            self._heap.clear()
            self._stale = 0
        elif self._stale > _COMPACT_FROM and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].timer == entry[1]]
            heapq.heapify(self._heap)
            self._stale = 0


@dataclass(slots=True)
class State:
    """The state of one matching shard.

    While `following` it only learns: its own earlier decisions come back from the control stream, and it takes none.
    Until `forgot_until` bindings may be live that it has never heard of, since it began without a record: who asks
    about what it does not know is not told that nothing was ever bound.
    """

    limits: Limits = field(default_factory=Limits)
    next_binding: int = 1
    following: bool = False
    forgot_until: float = 0.0
    transfers: dict[str, Transfer] = field(default_factory=dict)
    live: int = 0
    by_engine: dict[EngineRef, dict[str, None]] = field(default_factory=dict)
    engines: dict[EngineRef, int] = field(default_factory=dict)
    suspects: dict[EngineRef, Suspect] = field(default_factory=dict)
    gone: dict[EngineRef, float] = field(default_factory=dict)
    incompatible: dict[EngineRef, dict[EngineRef, str]] = field(default_factory=dict)
    tombstones: deque[tuple[float, Transfer | EngineRef]] = field(default_factory=deque)
    timers: Timers = field(default_factory=Timers)
    owed: dict[Answer, Fail | Release] = field(default_factory=dict)  # answers that nobody is known to have given

    def next_deadline(self) -> float | None:
        """Return when the next Tick is worth sending, or None."""
        grave = self.tombstones[0][0] if self.tombstones else None
        timer = None if self.following else self.timers.next
        if grave is None or timer is None:
            return timer if grave is None else grave
        return min(grave, timer)
