"""The target side of a scheduler half: registers blocks for KV that comes from elsewhere, and cancels."""

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvflow.connector.bounds import load_bound_s
from kvflow.connector.desk import BlockTable, Desk
from kvflow.connector.digest import pack_u32, prompt_digest
from kvflow.connector.params import Wish
from kvflow.connector.questions import Questions
from kvflow.connector.step import LoadStart
from kvflow.messages import TargetCancelled, TargetRegistered

# What is left of a bus message of 1 MB after everything but the block tables.
MAX_TABLE_BYTES = 900_000


class Phase(Enum):
    """Say how far a target is."""

    WANTED = "wanted"  # not allocated yet
    WAITING = "waiting"  # registered, no answer yet
    ENDED = "ended"  # loaded, failed, or computed here


@dataclass(slots=True)
class Target:
    """Follow one request whose KV comes from elsewhere; `gone` once it has finished while its load was pending."""

    request_id: str
    transfer_id: str
    prompt: Sequence[int]
    salt: str
    attempt: int
    computed: int = 0
    phase: Phase = Phase.WANTED
    gone: bool = False

    @property
    def tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt)


class Targets:
    """Keep the live targets of one engine."""

    def __init__(self, desk: Desk, clock: Callable[[], float]) -> None:
        self._desk = desk
        self._clock = clock
        self._by_request: dict[str, Target] = {}
        self._loads: list[LoadStart] = []
        # Registrations and cancels whose load has not ended: the bus, or an actor that was away, may have lost either.
        self._questions = Questions()
        self._load_bound_s = load_bound_s(desk.settings)

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def waiting(self) -> bool:
        """Return whether any load has not ended yet."""
        return bool(self._questions)

    def add(self, request_id: str, wish: Wish, prompt: Sequence[int], salt: str) -> None:
        """Take a target in; it is registered once its blocks are allocated."""
        desk = self._desk
        if "target" not in desk.roles:
            desk.compute_locally(request_id, "wrong_role", "this engine is not a target")
            return
        if 4 * sum(len(prompt) // group.block_tokens + 1 for group in desk.groups) > MAX_TABLE_BYTES:
            desk.compute_locally(request_id, "too_long", "the block table does not fit one message")
            return
        self._by_request[request_id] = Target(request_id, wish.transfer_id, prompt, salt, desk.next_attempt())

    def matched(self, request_id: str, computed: int) -> int:
        """Return how many tokens past `computed` a transfer will bring."""
        target = self._by_request.get(request_id)
        if target is None or target.phase is not Phase.WANTED:
            return 0
        target.computed = computed
        return self._missing(target) if self._desk.usable else 0

    def allocated(self, request_id: str, blocks: BlockTable, external: int) -> None:
        """Register the blocks for `external` tokens, or an empty range when nothing is to be loaded."""
        target = self._by_request.get(request_id)
        if target is None or target.phase is not Phase.WANTED:
            return
        if external <= 0:
            target.phase = Phase.ENDED
            if self._missing(target):
                self._desk.compute_locally(request_id, "unavailable", "the node or the bus cannot be reached")
            self._register_nothing(target)
            return
        target.phase = Phase.WAITING
        self._desk.counters["registered"] += 1
        self._loads.append(LoadStart(request_id, target.transfer_id, target.attempt, self._load_bound_s))
        self._register(target, target.computed, target.computed + external, blocks)

    def take_loads(self) -> tuple[LoadStart, ...]:
        """Return the loads that have begun since the last call."""
        if not self._loads:
            return ()
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def ask_again(self) -> None:
        """Post again what has had no answer for a while; matching takes no notice, or answers once more."""
        now = self._clock()
        if not self._questions.is_due(now) or not self._desk.usable:
            return
        for letter in self._questions.due(now):
            self._desk.counters["asked_again"] += 1
            self._desk.tell_registration(letter)

    def finish(self, request_id: str) -> None:
        """End a target; a pending load is cancelled and followed until the workers report its end."""
        target = self._by_request.get(request_id)
        if target is None:
            return
        if target.phase is not Phase.WAITING:
            del self._by_request[request_id]
            if target.phase is Phase.WANTED:
                self._register_nothing(target)
        elif not target.gone:
            target.gone = True
            self._cancel(target)

    def ended(self, received: AbstractSet[str], failed: AbstractSet[str]) -> None:
        """Learn which loads the workers reported as ended."""
        for request_id in received:
            target = self._by_request.get(request_id)
            if target is None or target.phase is not Phase.WAITING:
                continue
            target.phase = Phase.ENDED
            self._questions.answered(request_id)
            self._desk.counters["load_failed" if request_id in failed else "loaded"] += 1
            if target.gone:
                del self._by_request[request_id]

    def clear(self) -> None:
        """Forget everything."""
        self._by_request.clear()
        self._loads.clear()
        self._questions.clear()

    def _missing(self, target: Target) -> int:
        """Return how many tokens' KV can come from elsewhere: not the last one's, which vLLM samples from."""
        if target.computed % self._desk.atom_tokens:
            return 0  # a block that others may use as well, and that could only be written whole
        missing = target.tokens - 1 - target.computed
        # A few tokens are computed in the step that has to compute the last one anyway: nothing to wait for.
        return missing if missing >= self._desk.settings.min_load_tokens else 0

    def _register(self, target: Target, start: int, end: int, blocks: BlockTable) -> None:
        desk = self._desk
        engine, ranks = desk.identity()
        first: list[int] = []
        packed: list[bytes] = []
        for group, ids in zip(desk.groups, blocks, strict=False):
            begin = start // group.block_tokens
            first.append(begin)
            packed.append(pack_u32(ids[begin : -(-end // group.block_tokens)]) if start < end else b"")
        settings = desk.settings

        @functools.cache  # it is asked again, and a digest of a long prompt takes milliseconds
        def made() -> TargetRegistered:
            return TargetRegistered(
                transfer_id=target.transfer_id, attempt=target.attempt, target=engine, request_id=target.request_id,
                prompt_tokens=target.tokens, start=start, end=end, ranks=ranks,
                prompt_digest=prompt_digest(target.prompt, target.salt),
                first_blocks=tuple(first), blocks=tuple(packed), source_wait_s=settings.source_wait_s,
                compute_wait_s=settings.compute_wait_s, transfer_wait_s=settings.transfer_wait_s,
            )  # fmt: skip

        if start == end:
            desk.tell_registration(made)
            return

        def registered() -> TargetRegistered | None:
            # Once the load has ended its blocks are others': a letter that waited for the bus must not offer them.
            return made() if target.phase is Phase.WAITING else None

        def again() -> TargetRegistered | None:
            pending = target.phase is Phase.WAITING and not target.gone
            return msgspec.structs.replace(made(), repeated=True) if pending else None

        desk.tell_registration(registered)
        self._questions.ask(target.request_id, again, self._clock())

    def _register_nothing(self, target: Target) -> None:
        """Register an empty range, so that the source can let go at once."""
        if not self._desk.usable:
            return  # nobody to tell: the source's lease will end it
        self._desk.counters["registered_empty"] += 1
        at = max(target.tokens - 1, 0)
        self._register(target, at, at, [()] * len(self._desk.groups))

    def _cancel(self, target: Target) -> None:
        desk = self._desk
        desk.counters["cancelled"] += 1
        engine, _ = desk.identity()
        cancelled = TargetCancelled(
            transfer_id=target.transfer_id, attempt=target.attempt, target=engine, request_id=target.request_id,
            detail="the request ended before its KV arrived",
        )  # fmt: skip
        desk.tell_registration(cancelled)
        self._questions.ask(target.request_id, cancelled, self._clock())
