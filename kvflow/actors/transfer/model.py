"""The records of the transfer actor: facts that come in, effects that go out, and what is kept between the two."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvflow.actors.transfer.tables import BlockTables
from kvflow.dataplane.port import PieceDone, PieceFailed
from kvflow.messages import (
    EngineRef,
    FailureReason,
    RankDelivered,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    TransferBound,
    TransferDelivered,
    TransferErrored,
    TransferEvent,
    TransferQuiesced,
    TransferRevoked,
    TransferStarted,
)

SourceKey = tuple[str, int]
BindingKey = tuple[str, int]
Tables = tuple[NDArray[np.uint32], ...]
RankReport = TransferQuiesced | TransferDelivered | TransferErrored


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Lane:
    """Name a target rank that this source rank writes to, and how many source ranks write to it in all."""

    rank: int
    writers: int


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Say that all agents of a target engine that this rank writes to are known (none: it has nothing to write)."""

    target: EngineRef
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class PeerUnknown:
    """Say that a target engine cannot be reached; `final` when trying again would give the same answer."""

    target: EngineRef
    reason: FailureReason
    detail: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Say that a target engine has left, or that one of its agents was replaced; pieces in flight to it will fail."""

    target: EngineRef
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeliveryFailed:
    """Say that a notification could not be sent."""

    delivered: RankDelivered
    detail: str


@dataclass(frozen=True, slots=True)
class CardLapsed:
    """Say that this rank's card may have expired: matching may count its WRITEs as over, and lets others write."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Say that time has passed."""


Input = (
    SourceOpened | SourceClosed | SourceProgress | SourceReleased | TransferBound | TransferRevoked
    | PieceDone | PieceFailed | DeliveryFailed | PeerReady | PeerUnknown | PeerLost
    | CardLapsed | Tick
)  # fmt: skip


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartPeer:
    """Find a target engine and make its agents known; answered with PeerReady or PeerUnknown."""

    target: EngineRef


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Cut the connections to a target engine, so that its pieces fail within a known time; answered with PeerLost."""

    target: EngineRef
    detail: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Ask the target rank's completion actor to poll, since WRITEs are under way."""

    message: TransferStarted


@dataclass(frozen=True, slots=True)
class PostPiece:
    """Write the tokens [start, stop) of a binding whose range ends at `end` to one target rank.

    `source_tables[g]` are the source's block ids from position 0 on, `target_tables[g]` the target's from position
    `target_first[g]` on. `notification` reaches the target after the bytes.
    """

    piece: int
    target: EngineRef
    target_rank: int
    start: int
    stop: int
    end: int
    source_tables: Tables
    target_first: tuple[int, ...]
    target_tables: Tables
    notification: RankDelivered | None = None


@dataclass(frozen=True, slots=True)
class SendNotification:
    """Tell a target rank that all pieces of this rank have been written."""

    delivered: RankDelivered


@dataclass(frozen=True, slots=True)
class Report:
    """Tell matching."""

    message: RankReport


@dataclass(frozen=True, slots=True)
class Emit:
    """Publish a lifecycle event; the driver stamps its wall-clock time."""

    event: TransferEvent


Effect = StartPeer | DropPeer | Wake | PostPiece | SendNotification | Report | Emit


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what the actor keeps. Durations are seconds.

    `orphan_s` is how long a binding may wait for a source that is unknown here, or that was sealed without its last
    progress; `stale_s` how long anything may be kept without hearing of it; `memory_s` how long ended keys are
    remembered; `wake_s` how often a target is asked to go on polling while pieces are under way; `settle_s` how long
    the pieces of a binding that posts nothing more may take before their target is cut off.
    """

    sources: int = 100_000
    bindings: int = 100_000
    tombstones: int = 100_000
    piece_tokens: int = 16_384
    orphan_s: float = 5.0
    stale_s: float = 900.0
    memory_s: float = 120.0
    wake_s: float = 1.0
    settle_s: float = 30.0


@dataclass(slots=True)
class Source:
    """Keep one attempt of a source: its block tables and how much of it is final."""

    tables: BlockTables
    touched: float
    tokens_final: int = 0
    sealed: bool = False
    last_at: float | None = None
    broken: str = ""


@dataclass(slots=True)
class LaneState:
    """Keep how far one target rank of a binding has got."""

    rank: int
    writers: int
    in_flight: int = 0
    tokens_done: int = 0
    woken_at: float | None = None
    notified: bool = False


@dataclass(slots=True)
class Fence:
    """Say since when and why a binding posts nothing more; a reason of None means that its source was released.

    `last_at` is when a source that has been forgotten since said that its prompt is computed.
    """

    reason: FailureReason | None
    since: float
    detail: str = ""
    revoked: bool = False
    failed: bool = False
    last_at: float | None = None


@dataclass(slots=True)
class Totals:
    """Add up what a binding's pieces did. Durations are seconds."""

    bytes_total: int = 0
    bytes_early: int = 0
    descriptors: int = 0
    pieces: int = 0
    planning_s: float = 0.0
    posting_s: float = 0.0


@dataclass(slots=True)
class Binding:
    """Keep one binding: the target's tables, the lanes to its ranks and the pieces in flight."""

    message: TransferBound
    tables: Tables
    bound_at: float
    touched: float
    posted: int
    lanes: tuple[LaneState, ...] | None = None
    in_flight: int = 0
    first_post_at: float | None = None
    fence: Fence | None = None
    totals: Totals = field(default_factory=Totals)

    @property
    def key(self) -> BindingKey:
        """Return what names the binding."""
        return self.message.transfer_id, self.message.binding

    @property
    def source_key(self) -> SourceKey:
        """Return what names the source attempt."""
        return self.message.transfer_id, self.message.source_attempt


@dataclass(frozen=True, slots=True)
class Piece:
    """Remember what a posted piece belongs to."""

    binding: BindingKey
    lane: LaneState
    tokens: int


@dataclass(slots=True)
class Ended:
    """Remember how a binding ended, to answer repeated messages about it in the same way."""

    report: RankReport | None
    forget_at: float
    notify_failures: int = 0
