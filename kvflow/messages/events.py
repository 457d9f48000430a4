"""Lifecycle events for monitors: one record per step of a transfer's or an engine's life.

`at` is wall-clock time in seconds since the epoch on the sender's host: for display, never for decisions.
"""

from typing import Literal

from kvflow.messages.base import EngineRef, Message

TransferEventKind = Literal[
    "opened", "sealed", "closed", "registered", "rejected", "bound", "progress", "started", "delivered",
    "completed", "failed", "cancelled", "revoked", "quiesced", "released", "expired",
]  # fmt: skip
EngineEventKind = Literal["joined", "left", "lost"]


class TransferEvent(Message, frozen=True, kw_only=True, tag="kvflow.transfer_event.v1"):
    """Record one step in the life of a transfer; fields that a kind does not use keep their defaults."""

    kind: TransferEventKind
    transfer_id: str
    at: float
    actor: str
    binding: int = 0
    attempt: int = 0
    request_id: str = ""
    source: EngineRef | None = None
    target: EngineRef | None = None
    rank: int = 0
    tokens: int = 0
    tokens_total: int = 0
    bytes_done: int = 0
    bytes_early: int = 0
    descriptors: int = 0
    pieces: int = 0
    reason: str = ""
    detail: str = ""
    bound_to_first_post_s: float = 0.0
    last_progress_to_done_s: float = 0.0
    posting_s: float = 0.0
    planning_s: float = 0.0


class EngineEvent(Message, frozen=True, kw_only=True, tag="kvflow.engine_event.v1"):
    """Record that an engine joined, left or was lost."""

    kind: EngineEventKind
    at: float
    engine: EngineRef
    rank: int = 0
    roles: tuple[str, ...] = ()
    detail: str = ""
