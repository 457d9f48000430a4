"""The completion actor's reducer: `step(state, event, now)` changes the state and returns the effects to perform.

A binding is complete when `writers` distinct source ranks, all of one source attempt, have said so. Notifications come
from other processes' memory writes and are believed only as far as they agree with each other and with the binding.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import assert_never

from kvflow.messages import (
    EngineRef,
    RankDelivered,
    TransferBound,
    TransferCompleted,
    TransferFailed,
    TransferStarted,
)

BindingKey = tuple[str, int]
# No engine has more ranks that write to one target rank; a larger number could never be reached.
MAX_WRITERS = 4096
MAX_LOST = 4096


@dataclass(frozen=True, slots=True)
class Tick:
    """Say that time has passed."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Say that a peer is about to connect, and asks for polling for some seconds."""

    poll_s: float


@dataclass(frozen=True, slots=True)
class SourceLost:
    """Say that an engine counts as lost: what it has not delivered by now must not be believed any more."""

    engine: EngineRef


@dataclass(frozen=True, slots=True)
class SourceBack:
    """Say that an engine is there (again): its new bindings are believed."""

    engine: EngineRef


Input = TransferBound | TransferStarted | TransferFailed | RankDelivered | Hello | SourceLost | SourceBack | Tick


@dataclass(frozen=True, slots=True)
class Listen:
    """Poll the agent for at least this long from now on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Tell the target's worker, and then matching."""

    message: TransferCompleted


@dataclass(frozen=True, slots=True)
class Reject:
    """Count and log a notification or message that cannot be believed."""

    reason: str


Effect = Listen | Complete | Reject


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what the actor keeps and how it polls. Durations are seconds.

    A binding that nobody has started is polled for `glance_s` every `slow_s`, in case that the start got lost. After a
    start or a notification it is polled without pause for `active_s`: sources repeat the start while pieces are under
    way. `stretch_s` is how much polling is asked for at a time, and so how long it goes on in vain at the end.
    An entry is dropped after `stale_s` of silence, or `unbound_s` when only a source has spoken of it; whatever comes
    later makes it anew.
    """

    pending: int = 100_000
    memories: int = 100_000
    memory_s: float = 120.0
    stale_s: float = 900.0
    unbound_s: float = 60.0
    slow_s: float = 0.2
    glance_s: float = 0.005
    active_s: float = 3.0
    stretch_s: float = 0.25
    hello_max_s: float = 10.0


@dataclass(slots=True)
class Pending:
    """Keep one binding that is not complete yet; what is not known yet is None."""

    touched: float
    request: tuple[str, int] | None = None  # request id and attempt of the target
    origin: tuple[EngineRef, int] | None = None  # engine and attempt of the source
    writers: int | None = None
    active_until: float = 0.0
    ranks: set[int] = field(default_factory=set)


class CompletionState:
    """Hold the state of one target rank's completion actor."""

    def __init__(self, me: EngineRef, rank: int, limits: Limits | None = None) -> None:
        self.me = me
        self.rank = rank
        self.limits = limits or Limits()
        self.pending: dict[BindingKey, Pending] = {}
        self.by_transfer: dict[str, set[int]] = {}
        self.ended: OrderedDict[BindingKey, float] = OrderedDict()
        self.lost: OrderedDict[EngineRef, None] = OrderedDict()
        self.listen_until = 0.0
        self.hello_until = 0.0
        self.next_glance = 0.0

    @property
    def live(self) -> bool:
        """Return whether anything is kept that time will change: without it, ticks are not needed."""
        return bool(self.pending or self.ended)

    def tick_s(self) -> float | None:
        """Return after how many seconds the next tick is due; None when none is."""
        if self.pending:
            return min(self.limits.slow_s, self.limits.stretch_s / 2)
        return 1.0 if self.ended or self.hello_until else None


def step(state: CompletionState, event: Input, now: float) -> list[Effect]:
    """Apply one fact at monotonic time `now` (seconds) and return what to do, in order."""
    out: list[Effect] = []
    match event:
        case RankDelivered():
            _delivered(state, event, now, out)
        case TransferStarted():
            _started(state, event, now, out)
        case TransferBound():
            _bound(state, event, now, out)
        case TransferFailed():
            _failed(state, event, now)
        case Hello():
            state.hello_until = max(state.hello_until, now + min(max(event.poll_s, 0.0), state.limits.hello_max_s))
        case SourceLost():
            _source_lost(state, event.engine, now)
        case SourceBack():
            state.lost.pop(event.engine, None)
        case Tick():
            _tick(state, now)
        case _:
            assert_never(event)
    _listen(state, now, out)
    return out


def _entry(state: CompletionState, key: BindingKey, now: float, out: list[Effect]) -> Pending | None:
    """Return the binding's entry, made if need be; None when it has ended or the table is full."""
    if key in state.ended:
        return None
    pending = state.pending.get(key)
    if pending is None:
        if len(state.pending) >= state.limits.pending:
            out.append(Reject(f"{len(state.pending)} bindings are pending already"))
            return None
        pending = state.pending[key] = Pending(touched=now)
        state.by_transfer.setdefault(key[0], set()).add(key[1])
    pending.touched = now
    return pending


def _bound(state: CompletionState, event: TransferBound, now: float, out: list[Effect]) -> None:
    if event.target != state.me:
        out.append(Reject(f"binding for {event.target}"))
        return
    pending = _entry(state, (event.transfer_id, event.binding), now, out)
    if pending is None:
        return
    request, origin = (event.request_id, event.target_attempt), (event.source, event.source_attempt)
    if not (_agrees(pending.request, request) and _agrees(pending.origin, origin)):
        out.append(Reject(f"binding {event.binding} of {event.transfer_id} differs from what is known of it"))
        return
    pending.request, pending.origin = request, origin
    # A new binding of the same registration means that the ones before it were revoked.
    _end_request(state, event.transfer_id, request, now, before=event.binding)


def _started(state: CompletionState, event: TransferStarted, now: float, out: list[Effect]) -> None:
    if event.target != state.me or event.target_rank != state.rank:
        out.append(Reject(f"start for rank {event.target_rank} of {event.target}"))
        return
    pending = _entry(state, (event.transfer_id, event.binding), now, out)
    if pending is not None:
        pending.active_until = now + state.limits.active_s


def _delivered(state: CompletionState, event: RankDelivered, now: float, out: list[Effect]) -> None:
    if event.target != state.me or event.target_rank != state.rank:
        out.append(Reject(f"delivery for rank {event.target_rank} of {event.target}"))
        return
    if not 1 <= event.writers <= MAX_WRITERS or event.source_rank < 0:
        out.append(Reject(f"delivery from rank {event.source_rank} of {event.writers} writers"))
        return
    key = (event.transfer_id, event.binding)
    if event.source in state.lost:
        _end(state, key, now)
        out.append(
            Reject(f"delivery of binding {event.binding} of {event.transfer_id} by {event.source}, which was lost")
        )
        return
    pending = _entry(state, key, now, out)
    if pending is None:
        return
    request, origin = (event.request_id, event.target_attempt), (event.source, event.source_attempt)
    if not (
        _agrees(pending.request, request)
        and _agrees(pending.origin, origin)
        and _agrees(pending.writers, event.writers)
    ):
        out.append(Reject(f"delivery of binding {event.binding} of {event.transfer_id} differs from what is known"))
        return
    if _is_replaced(state, event.transfer_id, event.binding, request):
        # Its registration has been bound anew: another source writes there, whatever this one has written before.
        _end(state, key, now)
        out.append(Reject(f"delivery of binding {event.binding} of {event.transfer_id}, which was replaced"))
        return
    pending.request, pending.origin, pending.writers = request, origin, event.writers
    pending.active_until = now + state.limits.active_s
    pending.ranks.add(event.source_rank)
    if len(pending.ranks) < event.writers:
        return
    _end(state, key, now)
    out.append(
        Complete(
            TransferCompleted(
                transfer_id=event.transfer_id,
                binding=event.binding,
                target=state.me,
                target_attempt=event.target_attempt,
                request_id=event.request_id,
                rank=state.rank,
            )
        )
    )


def _source_lost(state: CompletionState, engine: EngineRef, now: float) -> None:
    """End all bindings of a source that counts as lost.

    After the quarantine it has its blocks back, whether it is dead or only stood still. What it writes on waking up may
    be another request's KV, and its notification says nothing about that.
    """
    state.lost[engine] = None
    if len(state.lost) > MAX_LOST:
        state.lost.popitem(last=False)
    for key, pending in list(state.pending.items()):
        if pending.origin is not None and pending.origin[0] == engine:
            _end(state, key, now)


def _failed(state: CompletionState, event: TransferFailed, now: float) -> None:
    if event.target == state.me:
        _end_request(state, event.transfer_id, (event.request_id, event.target_attempt), now)


def _end_request(
    state: CompletionState, transfer_id: str, request: tuple[str, int], now: float, *, before: int | None = None
) -> None:
    """End the pending bindings of one registration, or only those with a number below `before`."""
    for binding in sorted(state.by_transfer.get(transfer_id, ())):
        if state.pending[transfer_id, binding].request == request and (before is None or binding < before):
            _end(state, (transfer_id, binding), now)


def _is_replaced(state: CompletionState, transfer_id: str, number: int, request: tuple[str, int]) -> bool:
    """Return whether a newer binding of the same registration is pending."""
    return any(
        binding > number and state.pending[transfer_id, binding].request == request
        for binding in state.by_transfer.get(transfer_id, ())
    )


def _end(state: CompletionState, key: BindingKey, now: float) -> None:
    """Forget a binding and ignore what still comes of it for a while."""
    _forget(state, key)
    state.ended.pop(key, None)
    state.ended[key] = now + state.limits.memory_s
    if len(state.ended) > state.limits.memories:
        state.ended.popitem(last=False)


def _forget(state: CompletionState, key: BindingKey) -> None:
    if state.pending.pop(key, None) is not None:
        bindings = state.by_transfer[key[0]]
        bindings.discard(key[1])
        if not bindings:
            del state.by_transfer[key[0]]


def _tick(state: CompletionState, now: float) -> None:
    while state.ended and next(iter(state.ended.values())) <= now:
        state.ended.popitem(last=False)
    if state.hello_until <= now:
        state.hello_until = 0.0
    for key, pending in list(state.pending.items()):
        if now - pending.touched > (state.limits.unbound_s if pending.request is None else state.limits.stale_s):
            _forget(state, key)


def _listen(state: CompletionState, now: float, out: list[Effect]) -> None:
    """Ask for polling when a binding or a greeting wants it and what was asked for is about to run out."""
    limits = state.limits
    hello = state.hello_until - now
    if hello > 0 and state.listen_until < state.hello_until:
        _ask(state, hello, now, out)
    elif state.listen_until - now <= limits.stretch_s / 2 and any(
        pending.active_until > now for pending in state.pending.values()
    ):
        _ask(state, limits.stretch_s, now, out)
    elif state.pending and now >= state.next_glance:
        state.next_glance = now + limits.slow_s
        if state.listen_until < now + limits.glance_s:
            _ask(state, limits.glance_s, now, out)


def _ask(state: CompletionState, seconds: float, now: float, out: list[Effect]) -> None:
    state.listen_until = now + seconds
    out.append(Listen(seconds))


def _agrees(known: object, claimed: object) -> bool:
    return known is None or known == claimed
