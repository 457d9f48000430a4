"""What an engine rank tells about itself: its card, its KV geometry and its model fingerprint."""

from typing import Literal

import msgspec

from kvflow.messages.base import EngineRef, Message, Role

MemoryKind = Literal["DRAM", "VRAM"]
Placement = Literal["process", "engine"]
GroupKind = Literal["full", "window"]


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one KV cache group: the layers that share a block table."""

    block_tokens: int
    kind: GroupKind = "full"
    window_tokens: int = 0


class KvView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one strided view of one layer over registered memory.

    Byte x of (block b, local head h, token-in-block t, channel c) lies at `segment base + offset + b*block_stride +
    h*head_stride + t*token_stride + c*channel_stride + x`, with x < row_bytes. All in bytes. Where the content of a
    token and head is contiguous, it counts as one channel; a cache that keeps channels outside tokens has as many as
    elements, of `row_bytes` each.
    `part` is "kv" when K and V are packed in the innermost dimension, else "k", "v" or "latent".
    `head_start` is the first global KV head that this rank holds; `total_heads` is the model's number of KV heads.
    `atom_tokens` > 1 says that a kernel interleaves that many consecutive tokens (aligned in their block) in a way of its
    own: they are only ever moved together, between views of equal atoms, and token strides inside one mean nothing.
    """

    layer: str
    part: str
    group: int
    segment: int
    offset: int
    blocks: int
    block_tokens: int
    heads: int
    head_start: int
    total_heads: int
    row_bytes: int
    block_stride: int
    head_stride: int
    token_stride: int
    atom_tokens: int = 1
    channels: int = 1
    channel_stride: int = 0

    @property
    def content_bytes(self) -> int:
        """Return the bytes of one token and head, wherever they lie."""
        return self.channels * self.row_bytes


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a rank's whole KV cache: `num_blocks` block ids per group, and views that give their bytes."""

    dtype: str
    num_blocks: int
    groups: tuple[KvGroup, ...]
    views: tuple[KvView, ...]


class KvSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Locate one contiguous registered memory range in the process that owns the NIXL agent."""

    address: int
    length: int
    memory: MemoryKind = "DRAM"
    device: int = 0


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Name everything that must be equal for KV bytes to mean the same; `fields` are sorted (name, value) pairs."""

    fields: tuple[tuple[str, str], ...]


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Describe an engine rank as its worker knows it, before any NIXL agent exists."""

    engine: EngineRef
    rank: int
    ranks: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    roles: tuple[Role, ...]
    host: str
    model: str
    geometry: KvGeometry
    fingerprint: ModelFingerprint
    api_url: str = ""
    software: tuple[tuple[str, str], ...] = ()


class EngineCard(Message, frozen=True, kw_only=True, tag="kvflow.engine_card.v1"):
    """Announce a live engine rank in the directory; refreshed while the engine lives."""

    profile: EngineProfile
    agent: str
    nixl_metadata: bytes
    segments: tuple[KvSegment, ...]
    placement: Placement

    @property
    def engine(self) -> EngineRef:
        """Return the engine that this card belongs to."""
        return self.profile.engine

    @property
    def rank(self) -> int:
        """Return the rank that this card belongs to."""
        return self.profile.rank
