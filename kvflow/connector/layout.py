"""Describe a layer's KV tensor as strided views, from its shape and strides alone; no torch needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvflow.errors import ConfigError
from kvflow.messages import KvView

# The dimensions of blocks, of heads (None: a single one without a dimension) and of tokens in a block.
_Axes = tuple[int, int | None, int]


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """Hold where a layer's tensor lies: shape, strides and offset in bytes of `segment`, bytes per element."""

    layer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerRole:
    """Hold what the tensor means: its group, the group's tokens per block, and its KV heads among the model's."""

    group: int
    group_tokens: int
    heads: int
    head_start: int
    total_heads: int
    latent: bool = False


def views_of(tensor: LayerTensor, role: LayerRole, num_blocks: int) -> tuple[KvView, ...]:
    """Return the views of one layer; raise ConfigError for a layout that is not known.

    Known: (blocks, heads, tokens, content) with K and V packed in the content; (2, blocks, tokens, heads, channels) and
    (blocks, 2, tokens, heads, channels) in either order of tokens and heads; (blocks, tokens, latent) and
    (blocks, 1, tokens, latent).
    """
    if tensor.strides[-1] != tensor.item_bytes:
        raise _unknown(tensor, "its innermost dimension is not contiguous")
    rank = len(tensor.shape)
    if role.latent and rank == 3:
        return (_view(tensor, role, num_blocks, part="latent", axes=(0, None, 1)),)
    if rank == 4:
        part = "latent" if role.latent else "kv"
        return (_view(tensor, role, num_blocks, part=part, axes=(0, 1, 2)),)
    if rank == 5 and not role.latent:
        if tensor.shape[0] == 2 and tensor.shape[1] % num_blocks == 0:
            pair, block = 0, 1
        elif tensor.shape[1] == 2:
            pair, block = 1, 0
        else:
            raise _unknown(tensor, "no dimension separates K from V")
        head, token = (3, 2) if tensor.shape[3] == role.heads else (2, 3)
        return tuple(
            _view(tensor, role, num_blocks, part=part, axes=(block, head, token), shift=at * tensor.strides[pair])
            for at, part in enumerate(("k", "v"))
        )
    raise _unknown(tensor, f"{rank} dimensions are not known")


def _view(
    tensor: LayerTensor,
    role: LayerRole,
    num_blocks: int,
    *,
    part: str,
    axes: tuple[int, int | None, int],
    shift: int = 0,
) -> KvView:
    block_axis, head_axis, token_axis = axes
    blocks, tokens = tensor.shape[block_axis], tensor.shape[token_axis]
    heads = 1 if head_axis is None else tensor.shape[head_axis]
    if heads != role.heads:
        raise _unknown(tensor, f"it has {heads} head slots for {role.heads} KV heads")
    if tokens <= 0 or role.group_tokens % tokens or blocks != num_blocks * (role.group_tokens // tokens):
        raise _unknown(tensor, f"{blocks} blocks of {tokens} tokens do not make {num_blocks} of {role.group_tokens}")
    row = tensor.shape[-1] * tensor.item_bytes
    token_stride = tensor.strides[token_axis]
    return KvView(
        layer=tensor.layer, part=part, group=role.group, segment=tensor.segment, offset=tensor.offset + shift,
        blocks=blocks, block_tokens=tokens, heads=heads, head_start=role.head_start, total_heads=role.total_heads,
        row_bytes=row, block_stride=tensor.strides[block_axis],
        # The stride of a single head means nothing; tensors may carry anything there.
        head_stride=row if head_axis is None or heads == 1 else tensor.strides[head_axis], token_stride=token_stride,
    )  # fmt: skip


def transposed_keys(packed: KvView, item_bytes: int) -> tuple[KvView, KvView]:
    """Return the K and the V view of blocks that hold, for each head, all keys transposed and then all values.

    `packed` describes the same bytes as if K and V of a token lay side by side, in `block_tokens` dense rows.
    """
    half = packed.row_bytes // 2
    key = msgspec.structs.replace(
        packed, part="k", row_bytes=item_bytes, token_stride=item_bytes,
        channels=half // item_bytes, channel_stride=packed.block_tokens * item_bytes,
    )  # fmt: skip
    value = msgspec.structs.replace(
        packed, part="v", row_bytes=half, token_stride=half, offset=packed.offset + packed.block_tokens * half
    )
    return key, value


def head_share(heads: int, total_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return (first global head, global heads) of a layer of which this rank holds `heads`.

    With more ranks than heads, consecutive ranks hold the same head; otherwise the heads are split over all ranks.
    """
    if total_heads and total_heads < tp_size and heads == 1:
        return tp_rank * total_heads // tp_size, total_heads
    return tp_rank * heads, heads * tp_size


def dims(values: Sequence[int]) -> tuple[int, ...]:
    """Return a shape or stride as plain whole numbers."""
    return tuple(int(value) for value in values)


def _unknown(tensor: LayerTensor, why: str) -> ConfigError:
    return ConfigError(
        f"the KV cache layout of layer {tensor.layer!r} cannot be mapped: {why} (shape {tensor.shape})",
        remedy="choose another attention backend or block size, or run this engine without kvflow",
    )
