"""Let engines, actors and the network do anything in any order, and check the invariants all the time."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.messages import CloseReason, EngineRef, TargetCancelled, TargetRegistered
from matching_world import World, cancelled, closed, opened, registered

TRANSFERS = st.sampled_from(["a", "b"])
SOURCES = st.sampled_from(["p", "q"])
TARGETS = st.sampled_from(["d", "e"])
REQUESTS = st.sampled_from(["r1", "r2"])
REASONS: st.SearchStrategy[CloseReason] = st.sampled_from(["finished", "finished", "aborted", "preempted", "error"])
DUPLICATES_WITHIN_S = 10.0  # tombstones live longer than this
PICK = st.integers(0, 1000)


class MatchingWorld(RuleBasedStateMachine):
    """Invariants I1, I2, I3, I4, I6, I7 and I8 under every interleaving that the rules can make."""

    @initialize(ranks=st.tuples(*[st.integers(1, 2)] * 4))
    def begin(self, ranks: tuple[int, int, int, int]) -> None:
        self.world = World(dict(zip(("p", "q", "d", "e"), ranks, strict=True)))
        self.sources: dict[tuple[EngineRef, str], tuple[int, bool]] = {}  # attempt, open
        self.targets: dict[tuple[str, EngineRef, str], int] = {}
        self.door: list[TargetRegistered | TargetCancelled] = []

    @rule(name=SOURCES, transfer=TRANSFERS, expected=st.integers(1, 2))
    def open_source(self, name: str, transfer: str, expected: int) -> None:
        me = self.world.engines[name]
        attempt, is_open = self.sources.get((me, transfer), (0, False))
        if not is_open:
            self.sources[me, transfer] = (attempt + 1, True)
            self.world.send(opened(transfer, me, attempt + 1, self.world.ranks[name], expected))

    @rule(name=SOURCES, transfer=TRANSFERS, reason=REASONS)
    def close_source(self, name: str, transfer: str, reason: CloseReason) -> None:
        me = self.world.engines[name]
        attempt, is_open = self.sources.get((me, transfer), (0, False))
        if is_open:
            self.sources[me, transfer] = (attempt, False)
            self.world.send(closed(transfer, me, attempt, reason))

    @rule(name=TARGETS, transfer=TRANSFERS, request_id=REQUESTS, start=st.sampled_from([0, 16, 39]))
    def register(self, name: str, transfer: str, request_id: str, start: int) -> None:
        me = self.world.engines[name]
        attempt = self.targets.get((transfer, me, request_id), 0) + 1
        self.targets[transfer, me, request_id] = attempt
        self.door.append(registered(transfer, me, attempt, self.world.ranks[name], request_id=request_id, start=start))

    @rule(name=TARGETS, transfer=TRANSFERS, request_id=REQUESTS)
    def cancel(self, name: str, transfer: str, request_id: str) -> None:
        me = self.world.engines[name]
        attempt = self.targets.get((transfer, me, request_id))
        if attempt is not None:
            self.door.append(cancelled(transfer, me, attempt, request_id=request_id))

    @rule(name=SOURCES, receiver=TARGETS, transfer=TRANSFERS, request_id=REQUESTS)
    def both_legs(self, name: str, receiver: str, transfer: str, request_id: str) -> None:
        self.register(receiver, transfer, request_id, 0)
        self.open_source(name, transfer, 1)
        self.pass_the_door(-1)
        self.close_source(name, transfer, "finished")

    @precondition(lambda self: self.door)
    @rule(pick=PICK)
    def pass_the_door(self, pick: int) -> None:
        self.world.send(self.door.pop(pick % len(self.door)))

    @rule(count=st.integers(1, 20))
    def match(self, count: int) -> None:
        self.world.match(count)

    @rule(pick=PICK, count=st.integers(1, 10))
    def actor_hears(self, pick: int, count: int) -> None:
        for _ in range(count):
            busy = [who for who, actor in self.world.actors.items() if actor.inbox]
            if busy:
                self.world.hear(*busy[pick % len(busy)])

    @rule(pick=PICK)
    def actor_delivers(self, pick: int) -> None:
        ready = self.world.deliverable()
        if ready:
            self.world.deliver(*ready[pick % len(ready)])

    @rule(pick=PICK)
    def actor_errs(self, pick: int) -> None:
        ready = self.world.deliverable()
        if ready and pick % 4 == 0:
            self.world.error(*ready[pick % len(ready)])

    @rule()
    def all_goes_well(self) -> None:
        world = self.world
        while self.door:
            self.pass_the_door(0)
        for _ in range(3):
            world.match(len(world.log))
            for who, actor in world.actors.items():
                while actor.inbox:
                    world.hear(*who)
            for ready in world.deliverable():
                world.deliver(*ready)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=st.sampled_from(["p", "q", "d", "e"]), pick=PICK)
    def engine_dies(self, name: str, pick: int) -> None:
        if pick % 5 == 0:
            self.world.crash(name)

    @precondition(lambda self: self.world.history)
    @rule(pick=PICK)
    def message_comes_again(self, pick: int) -> None:
        message, sent = self.world.history[-1 - pick % min(len(self.world.history), 12)]
        if self.world.now - sent < DUPLICATES_WITHIN_S:
            self.world.log.append(message)

    @rule(pick=PICK)
    def matching_dies(self, pick: int) -> None:
        if pick % 8 == 0:
            self.world.take_over()

    @invariant()
    def one_writer(self) -> None:
        if hasattr(self, "world"):
            self.world.check_one_writer()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for message in self.door:
                self.world.send(message)
            self.world.wind_down()


TestMatchingWorld = MatchingWorld.TestCase
TestMatchingWorld.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
