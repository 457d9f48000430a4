"""A model of everything around the matching reducer: engines, transfer actors, completion, the control stream.

It performs the reducer's effects with delays and in any order, and checks the invariants whenever blocks change hands.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from kvflow.actors.matching.effects import Bind, Effect, Emit, Fail, Release, Revoke
from kvflow.actors.matching.inputs import EngineGone, EngineJoined, Received, Tick
from kvflow.actors.matching.model import Limits, State
from kvflow.actors.matching.state import resync, step
from kvflow.messages import (
    CloseReason,
    EngineRef,
    Message,
    SourceClosed,
    SourceOpened,
    SourceReleased,
    TargetCancelled,
    TargetRegistered,
    TransferBound,
    TransferCompleted,
    TransferDelivered,
    TransferErrored,
    TransferQuiesced,
    TransferRevoked,
    pack_blocks,
)

LIMITS = Limits(
    source_lease_s=6.0,
    compute_wait_s=20.0,
    quarantine_s=5.0,
    quiesce_wait_s=10.0,
    engine_grace_s=12.0,
    tombstone_s=15.0,
)
WAITS = (8.0, 20.0, 8.0)
PROMPT = 40
MAX_DELAY_S = 3.0  # actors answer within this time, far below quiesce_wait_s

RegistrationKey = tuple[str, EngineRef, str, int]


def engine(name: str, incarnation: int = 1) -> EngineRef:
    return EngineRef(engine_id=name, incarnation=str(incarnation))


def opened(transfer: str, source: EngineRef, attempt: int = 1, ranks: int = 1, expected: int = 1) -> SourceOpened:
    return SourceOpened(
        transfer_id=transfer, attempt=attempt, source=source, request_id=f"src-{transfer}", tokens=PROMPT, ranks=ranks,
        prompt_digest=b"digest", expected_targets=expected,
    )  # fmt: skip


def closed(transfer: str, source: EngineRef, attempt: int = 1, reason: CloseReason = "finished") -> SourceClosed:
    return SourceClosed(
        transfer_id=transfer, attempt=attempt, source=source, request_id=f"src-{transfer}", reason=reason
    )


def registered(
    transfer: str, target: EngineRef, attempt: int = 1, ranks: int = 1, *, request_id: str = "r", start: int = 0,
    end: int = PROMPT - 1, tokens: int = PROMPT, digest: bytes = b"digest", waits: tuple[float, float, float] = WAITS,
) -> TargetRegistered:  # fmt: skip
    return TargetRegistered(
        transfer_id=transfer, attempt=attempt, target=target, request_id=request_id, prompt_tokens=tokens, start=start,
        end=end, ranks=ranks, prompt_digest=digest, first_blocks=(start // 16,),
        blocks=(pack_blocks([7, 8, attempt % 1000]),), source_wait_s=waits[0],
        compute_wait_s=waits[1], transfer_wait_s=waits[2],
    )  # fmt: skip


def cancelled(transfer: str, target: EngineRef, attempt: int = 1, *, request_id: str = "r") -> TargetCancelled:
    return TargetCancelled(transfer_id=transfer, attempt=attempt, target=target, request_id=request_id)


def delivered(transfer: str, binding: int, source: EngineRef, rank: int = 0) -> TransferDelivered:
    return TransferDelivered(
        transfer_id=transfer, binding=binding, source=source, rank=rank, bytes_total=1, bytes_early=0, descriptors=1,
        pieces=1, bound_to_first_post_s=0.0, last_progress_to_done_s=0.0, posting_s=0.0, planning_s=0.0,
    )  # fmt: skip


def completed(bound: TransferBound, rank: int = 0) -> TransferCompleted:
    return TransferCompleted(
        transfer_id=bound.transfer_id, binding=bound.binding, target=bound.target, target_attempt=bound.target_attempt,
        request_id=bound.request_id, rank=rank,
    )  # fmt: skip


def key_of(message: TransferBound) -> RegistrationKey:
    return message.transfer_id, message.target, message.request_id, message.target_attempt


@dataclass
class Actor:
    """One source rank's transfer actor. A binding is active from when it is heard until it is over."""

    inbox: deque[tuple[float, Message]] = field(default_factory=deque)
    attempts: dict[str, tuple[int, str]] = field(default_factory=dict)
    bindings: dict[int, tuple[str, TransferBound | None]] = field(default_factory=dict)

    def writing(self) -> list[TransferBound]:
        found = [bound for status, bound in self.bindings.values() if status == "active" and bound is not None]
        coming = [message for _, message in self.inbox if isinstance(message, TransferBound)]
        return found + [bound for bound in coming if bound.binding not in self.bindings]


@dataclass
class World:
    """The reducer under test with its surroundings. `log` is the control stream; `cursor` is what matching has read."""

    ranks: dict[str, int]
    now: float = 100.0
    state: State = field(default_factory=lambda: State(limits=LIMITS))
    log: list[Message] = field(default_factory=list)
    history: list[tuple[Message, float]] = field(default_factory=list)
    cursor: int = 0
    engines: dict[str, EngineRef] = field(default_factory=dict)
    actors: dict[tuple[EngineRef, int], Actor] = field(default_factory=dict)
    ghosts: list[tuple[float, TransferBound]] = field(default_factory=list)
    arrivals: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    offers: dict[RegistrationKey, TargetRegistered] = field(default_factory=dict)
    endings: dict[RegistrationKey, list[str]] = field(default_factory=lambda: defaultdict(list))
    freed: set[RegistrationKey] = field(default_factory=set)
    released: dict[tuple[str, EngineRef, int], int] = field(default_factory=lambda: defaultdict(int))
    numbers: dict[int, TransferBound] = field(default_factory=dict)
    taken_over: int = 0

    def __post_init__(self) -> None:
        for name in self.ranks:
            self.join(name)

    # --- engines ------------------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        previous = self.engines.get(name)
        me = engine(name, int(previous.incarnation) + 1 if previous else 1)
        self.engines[name] = me
        for rank in range(self.ranks[name]):
            self.actors[me, rank] = Actor()
        self.feed(EngineJoined(self.now, me, self.ranks[name]))

    def crash(self, name: str) -> None:
        me = self.engines[name]
        for rank in range(self.ranks[name]):
            actor = self.actors.pop((me, rank))
            self.ghosts += [(self.now + LIMITS.quarantine_s, bound) for bound in actor.writing()]
        self.feed(EngineGone(self.now, me, "lost"))
        self.join(name)

    def send(self, message: Message) -> None:
        self.log.append(message)
        self.history.append((message, self.now))
        if isinstance(message, SourceOpened | SourceClosed):
            self.tell(message.source, message)
        if isinstance(message, TargetRegistered):
            self.offers.setdefault((message.transfer_id, message.target, message.request_id, message.attempt), message)

    def tell(self, source: EngineRef, message: Message) -> None:
        for (owner, _), actor in self.actors.items():
            if owner == source:
                actor.inbox.append((self.now, message))

    # --- matching -----------------------------------------------------------------------------------------------------

    def feed(self, event: EngineJoined | EngineGone | Received | Tick) -> None:
        self.perform(step(self.state, event))

    def match(self, count: int = 1) -> None:
        for message in self.log[self.cursor : self.cursor + count]:
            self.cursor += 1
            self.feed(Received(self.now, message))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while True:  # actors are alive: nothing waits for long
            late = [
                (owner, rank)
                for (owner, rank), actor in self.actors.items()
                if actor.inbox and actor.inbox[0][0] + MAX_DELAY_S <= self.now
            ]
            if not late:
                break
            for who in late:
                self.hear(*who)
            self.match(len(self.log))
        self.ghosts = [(until, bound) for until, bound in self.ghosts if until > self.now]
        self.feed(Tick(self.now))

    def take_over(self) -> None:
        """Lose the matching actor; another one replays the stream and takes over."""
        self.taken_over += 1
        fresh = State(limits=LIMITS, next_binding=1_000_000 * self.taken_over, following=True)
        for message in self.log:
            assert step(fresh, Received(self.now, message)) == []
        for name, me in self.engines.items():
            step(fresh, EngineJoined(self.now, me, self.ranks[name]))
        self.cursor = len(self.log)
        self.state = fresh
        self.perform(resync(fresh, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                event = effect.event
                if event.kind in ("completed", "failed", "cancelled", "rejected") and event.target is not None:
                    key = (event.transfer_id, event.target, event.request_id, event.attempt)
                    self.endings[key].append(event.kind)
                continue
            self.log.append(effect.message)
            if isinstance(effect, Bind):
                self._bind(effect.message)
            elif isinstance(effect, Revoke):
                self.tell(effect.message.source, effect.message)
            elif isinstance(effect, Fail):
                failed = effect.message
                key = (failed.transfer_id, failed.target, failed.request_id, failed.target_attempt)
                self.endings[key].append("told")
                self.free(key)
            elif isinstance(effect, Release):
                self._release(effect.message)
        self.check_one_writer()

    def _bind(self, bound: TransferBound) -> None:
        known = self.numbers.setdefault(bound.binding, bound)
        assert known == bound, "a binding number must mean one pair only"
        offer = self.offers[key_of(bound)]
        ours = (bound.start, bound.end, bound.first_blocks, bound.blocks)
        assert ours == (offer.start, offer.end, offer.first_blocks, offer.blocks), "I6: positions must be passed on"
        self.tell(bound.source, bound)

    def _release(self, message: SourceReleased) -> None:
        self.released[message.transfer_id, message.source, message.attempt] += 1
        for bound in self.writers(alive_only=True):
            mine = (bound.transfer_id, bound.source, bound.source_attempt)
            assert mine != (message.transfer_id, message.source, message.attempt), "I3: still read"
        self.tell(message.source, message)

    # --- checks -------------------------------------------------------------------------------------------------------

    def writers(self, *, alive_only: bool = False) -> list[TransferBound]:
        found = [bound for actor in self.actors.values() for bound in actor.writing()]
        return found if alive_only else found + [bound for _, bound in self.ghosts]

    def check_one_writer(self) -> None:
        writing: dict[RegistrationKey, set[tuple[EngineRef, int]]] = defaultdict(set)
        for bound in self.writers():
            writing[key_of(bound)].add((bound.source, bound.source_attempt))
        for key, attempts in writing.items():
            assert len(attempts) == 1, f"I1: {attempts} write into {key}"
            assert key not in self.freed, f"I2: {attempts} write into freed {key}"

    def free(self, key: RegistrationKey) -> None:
        """Give a registration's blocks back to its engine."""
        self.freed.add(key)
        self.check_one_writer()

    # --- transfer actors and completion -------------------------------------------------------------------------------

    def hear(self, owner: EngineRef, rank: int) -> None:
        actor = self.actors[owner, rank]
        _, message = actor.inbox.popleft()
        if isinstance(message, SourceOpened):
            if message.attempt > actor.attempts.get(message.transfer_id, (0, ""))[0]:
                actor.attempts[message.transfer_id] = (message.attempt, "open")
        elif isinstance(message, SourceClosed):
            if actor.attempts.get(message.transfer_id) == (message.attempt, "open"):
                actor.attempts[message.transfer_id] = (message.attempt, message.reason)
        elif isinstance(message, SourceReleased):
            if message.attempt >= actor.attempts.get(message.transfer_id, (0, ""))[0]:
                actor.attempts[message.transfer_id] = (message.attempt, "released")
        elif isinstance(message, TransferBound):
            if message.binding not in actor.bindings:
                attempt, status = actor.attempts.get(message.transfer_id, (0, ""))
                usable = attempt == message.source_attempt and status in ("open", "finished")
                actor.bindings[message.binding] = ("active" if usable else "over", message)
                if not usable:
                    self.error(owner, rank, message)
        elif isinstance(message, TransferRevoked):
            status, bound = actor.bindings.get(message.binding, ("", None))
            actor.bindings[message.binding] = ("over" if status != "delivered" else status, bound)
            self.log.append(
                TransferQuiesced(transfer_id=message.transfer_id, binding=message.binding, source=owner, rank=rank)
            )

    def error(self, owner: EngineRef, rank: int, bound: TransferBound) -> None:
        self.actors[owner, rank].bindings[bound.binding] = ("over", bound)
        self.log.append(
            TransferErrored(
                transfer_id=bound.transfer_id, binding=bound.binding, source=owner, rank=rank, reason="transfer_error",
                detail="model",
            )
        )  # fmt: skip

    def deliverable(self) -> list[tuple[EngineRef, int, TransferBound]]:
        return [
            (owner, rank, bound)
            for (owner, rank), actor in self.actors.items()
            for status, bound in actor.bindings.values()
            if status == "active"
            and bound is not None
            and actor.attempts.get(bound.transfer_id) == (bound.source_attempt, "finished")
        ]

    def deliver(self, owner: EngineRef, rank: int, bound: TransferBound) -> None:
        """Finish one rank's WRITEs; the target's ranks report when every source rank has."""
        self.actors[owner, rank].bindings[bound.binding] = ("delivered", bound)
        self.log.append(delivered(bound.transfer_id, bound.binding, owner, rank))
        self.arrivals[bound.binding].add(rank)
        name = bound.target.engine_id
        if len(self.arrivals[bound.binding]) == self.ranks[owner.engine_id] and self.engines[name] == bound.target:
            if key_of(bound) not in self.freed:
                self.free(key_of(bound))
            self.endings[key_of(bound)].append("told")  # by its completion actors
            for target_rank in range(self.ranks[name]):
                self.log.append(completed(bound, target_rank))

    # --- the end ------------------------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Send nothing new, let time pass, and check that everything has ended and nothing is left."""
        for _ in range(400):
            self.advance(1.0)
            self.match(len(self.log))
        for key in self.offers:
            endings = [kind for kind in self.endings[key] if kind not in ("rejected", "told")]
            assert self.endings[key], f"I4: {key} never ended"
            assert len(endings) <= 1 or self.taken_over, f"I4: {key} ended as {endings}"
        state = self.state
        assert (state.live, state.transfers, state.by_engine, state.gone, state.suspects) == (0, {}, {}, {}, {}), "I8"
        assert not state.tombstones
        assert len(state.timers) == 0
        assert state.timers.next is None
