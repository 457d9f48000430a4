"""What a source engine says about a transfer. Block tables are packed little-endian u32, one per KV cache group."""

from kvflow.messages.base import CloseReason, EngineRef, Message


class SourceOpened(Message, frozen=True, kw_only=True, tag="kvflow.source_opened.v1"):
    """Say that a source has admitted the prompt of a transfer (scheduler → matching, transfer actors).

    `tokens` is the prompt length; `ranks` the number of source ranks; `expected_targets` the number of registrations
    after which the source may be released; `prompt_digest` identifies the prompt's tokens.
    """

    transfer_id: str
    attempt: int
    source: EngineRef
    request_id: str
    tokens: int
    ranks: int
    prompt_digest: bytes
    expected_targets: int = 1


class SourceClosed(Message, frozen=True, kw_only=True, tag="kvflow.source_closed.v1"):
    """Say that a source attempt ended (scheduler → matching, transfer actors).

    `finished` seals the source: its KV is complete and its blocks are held until `SourceReleased`.
    """

    transfer_id: str
    attempt: int
    source: EngineRef
    request_id: str
    reason: CloseReason
    detail: str = ""


class SourceProgress(Message, frozen=True, kw_only=True, tag="kvflow.source_progress.v1"):
    """Say how many prompt tokens of KV are final on one rank (worker → its transfer actor).

    `blocks[g]` are the block ids of group g at positions `first_blocks[g]`, `first_blocks[g] + 1`, …: new entries only.
    `last` is true when `tokens_final` covers the whole prompt.
    """

    transfer_id: str
    attempt: int
    source: EngineRef
    rank: int
    tokens_final: int
    first_blocks: tuple[int, ...]
    blocks: tuple[bytes, ...]
    last: bool = False


class SourceReleased(Message, frozen=True, kw_only=True, tag="kvflow.source_released.v1"):
    """Give a source its blocks back: no WRITE reads them any more (matching → source workers, transfer actors)."""

    transfer_id: str
    attempt: int
    source: EngineRef
    request_id: str
    outcome: str = "delivered"
