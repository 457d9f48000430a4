"""What matching and the transfer actors say to each other about a binding of one source to one target."""

from kvflow.messages.base import Direction, EngineRef, FailureReason, Message


class TransferBound(Message, frozen=True, kw_only=True, tag="kvflow.transfer_bound.v1"):
    """Pair a source attempt with a registration (matching → every source rank's transfer actor).

    `binding` grows with every binding of the transfer: it keys all that follows. The target fields repeat the registration.
    """

    transfer_id: str
    binding: int
    source: EngineRef
    source_attempt: int
    target: EngineRef
    target_attempt: int
    request_id: str
    start: int
    end: int
    first_blocks: tuple[int, ...]
    blocks: tuple[bytes, ...]
    direction: Direction = "write"


class TransferRevoked(Message, frozen=True, kw_only=True, tag="kvflow.transfer_revoked.v1"):
    """Take a binding back; answered with TransferQuiesced once no WRITE of it can land any more."""

    transfer_id: str
    binding: int
    source: EngineRef
    reason: FailureReason


class TransferStarted(Message, frozen=True, kw_only=True, tag="kvflow.transfer_started.v1"):
    """Say that WRITEs are about to be posted (transfer → the target rank's completion actor, which then polls)."""

    transfer_id: str
    binding: int
    source: EngineRef
    rank: int
    target: EngineRef
    target_rank: int


class TransferQuiesced(Message, frozen=True, kw_only=True, tag="kvflow.transfer_quiesced.v1"):
    """Say that a revoked binding has no WRITE in flight on this rank, and never will (transfer → matching)."""

    transfer_id: str
    binding: int
    source: EngineRef
    rank: int


class TransferDelivered(Message, frozen=True, kw_only=True, tag="kvflow.transfer_delivered.v1"):
    """Say that this source rank has written its whole share and notified the target (transfer → matching, events).

    Durations are seconds on the sender's clock. `bytes_early` were done before the source said `last`.
    """

    transfer_id: str
    binding: int
    source: EngineRef
    rank: int
    bytes_total: int
    bytes_early: int
    descriptors: int
    pieces: int
    bound_to_first_post_s: float
    last_progress_to_done_s: float
    posting_s: float
    planning_s: float


class TransferErrored(Message, frozen=True, kw_only=True, tag="kvflow.transfer_errored.v1"):
    """Say that this source rank could not write its share, and that none of its WRITEs is in flight any more."""

    transfer_id: str
    binding: int
    source: EngineRef
    rank: int
    reason: FailureReason
    detail: str


class RankDelivered(Message, frozen=True, kw_only=True, tag="kvflow.rank_delivered.v1"):
    """Travel as the NIXL notification behind the last WRITE: one of `writers` source ranks is done with this target rank."""

    transfer_id: str
    binding: int
    source: EngineRef
    source_attempt: int
    source_rank: int
    writers: int
    target: EngineRef
    target_attempt: int
    target_rank: int
    request_id: str


class PeerHello(Message, frozen=True, kw_only=True, tag="kvflow.peer_hello.v1"):
    """Ask a target rank's completion actor to poll for a while, since a source rank is about to connect."""

    source: EngineRef
    rank: int
    target: EngineRef
    target_rank: int
    poll_s: float = 2.0
