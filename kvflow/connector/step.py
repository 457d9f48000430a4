"""What passes between an engine and the two halves, and between the halves: one small record per engine step."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvflow.messages import CloseReason

NOBODY: frozenset[str] = frozenset()


def _no_table(_request_id: str) -> tuple[list[int], ...]:
    return ()


@dataclass(frozen=True, slots=True)
class StepView:
    """Show the scheduler half what the engine scheduled.

    `scheduled[r]` is how many tokens of request r are computed once this step has run; `block_table(r)` gives its block
    ids per KV cache group; `preempted` names requests that lost their blocks since the last step (one of them may be
    scheduled again in this very step).
    """

    scheduled: Mapping[str, int] = field(default_factory=dict)
    block_table: Callable[[str], tuple[list[int], ...]] = _no_table
    preempted: AbstractSet[str] = NOBODY


@dataclass(frozen=True, slots=True)
class LoadStart:
    """Tell the workers that a request waits for its KV, and for how long it may at most (seconds)."""

    request_id: str
    transfer_id: str
    attempt: int
    bound_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Tell the workers what the step makes final of one source; `blocks` are packed little-endian u32 per group."""

    request_id: str
    transfer_id: str
    attempt: int
    tokens_final: int
    first_blocks: tuple[int, ...]
    blocks: tuple[bytes, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """Tell the workers that an ended source is held until its release, for how long at most (s), and how it ended."""

    request_id: str
    transfer_id: str
    attempt: int
    bound_s: float
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Carry one step's news from the scheduler half to every worker half; picklable, and the same object when empty."""

    loads: tuple[LoadStart, ...] = ()
    progress: tuple[Progress, ...] = ()
    held: tuple[Hold, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.progress or self.held)


EMPTY_STEP = StepMeta()


@dataclass(frozen=True, slots=True)
class StepResults:
    """Report requests whose blocks may go (`sent`), whose load has ended (`received`), and which of those failed."""

    sent: AbstractSet[str] = NOBODY
    received: AbstractSet[str] = NOBODY
    failed: AbstractSet[str] = NOBODY


NO_RESULTS = StepResults()
