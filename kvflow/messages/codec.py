"""Encode and decode messages: MessagePack, tagged by type and version."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import WireError
from kvflow.messages.attach import Attached, AttachEngine, AttachRefused
from kvflow.messages.base import Message
from kvflow.messages.engine import EngineCard
from kvflow.messages.events import EngineEvent, TransferEvent
from kvflow.messages.source import SourceClosed, SourceOpened, SourceProgress, SourceReleased
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

MESSAGE_TYPES: tuple[type[Message], ...] = (
    EngineCard, SourceOpened, SourceClosed, SourceProgress, SourceReleased, TargetRegistered, TargetCancelled,
    TransferCompleted, TransferFailed, TransferBound, TransferRevoked, TransferStarted, TransferQuiesced,
    TransferDelivered, TransferErrored, RankDelivered, PeerHello, TransferEvent, EngineEvent, AttachEngine, Attached,
    AttachRefused,
)  # fmt: skip

AnyMessage = (
    EngineCard | SourceOpened | SourceClosed | SourceProgress | SourceReleased | TargetRegistered | TargetCancelled
    | TransferCompleted | TransferFailed | TransferBound | TransferRevoked | TransferStarted | TransferQuiesced
    | TransferDelivered | TransferErrored | RankDelivered | PeerHello | TransferEvent | EngineEvent | AttachEngine
    | Attached | AttachRefused
)  # fmt: skip

MAX_MESSAGE_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Encode a message to MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Decode one message; raise WireError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a kvflow message: {error}") from error


def pack_blocks(blocks: "NDArray[np.unsignedinteger] | list[int]") -> bytes:
    """Pack block ids as little-endian u32."""
    return np.asarray(blocks, dtype="<u4").tobytes()


def unpack_blocks(data: bytes) -> NDArray[np.uint32]:
    """Unpack little-endian u32 block ids (read-only view); raise WireError when the length is not a multiple of four."""
    if len(data) % 4:
        raise WireError(f"block table of {len(data)} bytes is not a whole number of u32")
    return np.frombuffer(data, dtype="<u4")
