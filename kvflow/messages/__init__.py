"""All messages, their codec and their subjects. Imports nothing of kvflow but errors."""

from kvflow.messages.attach import Attached, AttachEngine, AttachRefused
from kvflow.messages.base import CloseReason, Direction, EngineRef, FailureReason, Message, Role
from kvflow.messages.codec import MESSAGE_TYPES, AnyMessage, decode, encode, pack_blocks, unpack_blocks
from kvflow.messages.engine import (
    EngineCard,
    EngineProfile,
    KvGeometry,
    KvGroup,
    KvSegment,
    KvView,
    ModelFingerprint,
    Placement,
)
from kvflow.messages.events import EngineEvent, TransferEvent
from kvflow.messages.source import SourceClosed, SourceOpened, SourceProgress, SourceReleased
from kvflow.messages.subjects import Subjects, shard_of
from kvflow.messages.target import TargetCancelled, TargetRegistered, TransferCompleted, TransferFailed
from kvflow.messages.transfer import (
    PeerHello,
    RankDelivered,
    TransferBound,
    TransferDelivered,
    TransferErrored,
    TransferQuiesced,
    TransferRevoked,
    TransferStarted,
)

__all__ = [
    "MESSAGE_TYPES", "AnyMessage", "AttachEngine", "AttachRefused", "Attached", "CloseReason", "Direction",
    "EngineCard", "EngineEvent", "EngineProfile", "EngineRef", "FailureReason", "KvGeometry", "KvGroup", "KvSegment",
    "KvView", "Message", "ModelFingerprint", "PeerHello", "Placement", "RankDelivered", "Role", "SourceClosed",
    "SourceOpened", "SourceProgress", "SourceReleased", "Subjects", "TargetCancelled", "TargetRegistered",
    "TransferBound", "TransferCompleted", "TransferDelivered", "TransferErrored", "TransferEvent", "TransferFailed",
    "TransferQuiesced", "TransferRevoked", "TransferStarted", "decode", "encode", "pack_blocks", "shard_of",
    "unpack_blocks",
]  # fmt: skip
