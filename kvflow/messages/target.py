"""What a target engine says about a transfer. Block tables are packed little-endian u32, one per KV cache group."""

from kvflow.messages.base import EngineRef, FailureReason, Message


class TargetRegistered(Message, frozen=True, kw_only=True, tag="kvflow.target_registered.v1"):
    """Offer destination blocks for the prompt tokens [start, end) (scheduler → registration → matching).

    `blocks[g]` are the block ids of group g from position `first_blocks[g]` on. An empty range (start == end) asks for
    nothing and only lets the source go. The three bounds are durations in seconds, counted where they arrive.
    `repeated`: the same was sent before and may have been bound, so only matching may say that it has ended.
    """

    transfer_id: str
    attempt: int
    target: EngineRef
    request_id: str
    prompt_tokens: int
    start: int
    end: int
    ranks: int
    prompt_digest: bytes
    first_blocks: tuple[int, ...]
    blocks: tuple[bytes, ...]
    source_wait_s: float
    compute_wait_s: float
    transfer_wait_s: float
    repeated: bool = False


class TargetCancelled(Message, frozen=True, kw_only=True, tag="kvflow.target_cancelled.v1"):
    """Give a registration up; always answered with a TransferFailed or a TransferCompleted."""

    transfer_id: str
    attempt: int
    target: EngineRef
    request_id: str
    detail: str = ""


class TransferCompleted(Message, frozen=True, kw_only=True, tag="kvflow.transfer_completed.v1"):
    """Say that every byte of the range has arrived on one target rank (completion → worker, matching)."""

    transfer_id: str
    binding: int
    target: EngineRef
    target_attempt: int
    request_id: str
    rank: int


class TransferFailed(Message, frozen=True, kw_only=True, tag="kvflow.transfer_failed.v1"):
    """Say that a registration ended without its bytes, and that no WRITE into it can land any more."""

    transfer_id: str
    target: EngineRef
    target_attempt: int
    request_id: str
    reason: FailureReason
    detail: str = ""
