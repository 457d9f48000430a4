"""Check KV geometries, which come from peers, and check byte runs against registered segments."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvflow.dataplane.port import Runs
from kvflow.errors import PeerError, TransferError
from kvflow.messages import KvGeometry, KvGroup, KvSegment, KvView

# Everything is computed in int64: no address, offset or stride of a sane peer comes near this.
_LIMIT = 1 << 62
_MAX_VIEWS = 1 << 16
_MAX_GROUPS = 1 << 10
_MAX_BLOCKS = 1 << 31

PARTS = ("kv", "k", "v", "latent")


def check_geometry(geometry: KvGeometry, segments: Sequence[KvSegment], *, owner: str = "engine") -> None:
    """Raise PeerError unless every byte that a block id can address lies inside its segment.

    `owner` names the engine in the error.
    """
    check_segments(segments, owner)
    if not 1 <= geometry.num_blocks <= _MAX_BLOCKS:
        raise PeerError(f"{owner}: {geometry.num_blocks} blocks are not a valid cache size")
    if not 1 <= len(geometry.groups) <= _MAX_GROUPS:
        raise PeerError(f"{owner}: {len(geometry.groups)} KV cache groups are not supported")
    if not 1 <= len(geometry.views) <= _MAX_VIEWS:
        raise PeerError(f"{owner}: {len(geometry.views)} KV views are not supported")
    for number, group in enumerate(geometry.groups):
        _check_group(group, f"{owner}: group {number}")
    seen: set[tuple[str, str]] = set()
    for view in geometry.views:
        where = f"{owner}: view {view.layer}/{view.part}"
        if (view.layer, view.part) in seen:
            raise PeerError(f"{where} is listed twice")
        seen.add((view.layer, view.part))
        _check_view(view, geometry, segments, where)


def view_extent(view: KvView) -> int:
    """Return how many bytes lie between the first and the last byte of a view."""
    return (
        (view.blocks - 1) * view.block_stride
        + (view.heads - 1) * view.head_stride
        + (view.block_tokens - 1) * view.token_stride
        + (view.channels - 1) * view.channel_stride
        + view.row_bytes
    )


def check_segments(segments: Sequence[KvSegment], owner: str) -> None:
    """Raise PeerError unless every segment is a range that can be addressed without overflow."""
    for number, segment in enumerate(segments):
        if segment.address <= 0 or segment.length <= 0 or segment.address + segment.length > _LIMIT:
            raise PeerError(
                f"{owner}: segment {number} at {segment.address:#x} of {segment.length} bytes is not addressable"
            )


def _check_group(group: KvGroup, where: str) -> None:
    if not 1 <= group.block_tokens <= _MAX_BLOCKS:
        raise PeerError(f"{where}: blocks of {group.block_tokens} tokens are not supported")
    if group.window_tokens < 0 or (group.kind == "window") != (group.window_tokens > 0):
        raise PeerError(f"{where}: kind {group.kind!r} does not fit a window of {group.window_tokens} tokens")


def _check_view(view: KvView, geometry: KvGeometry, segments: Sequence[KvSegment], where: str) -> None:
    if view.part not in PARTS:
        raise PeerError(f"{where}: unknown part, expected one of {', '.join(PARTS)}")
    if not 0 <= view.group < len(geometry.groups):
        raise PeerError(f"{where}: group {view.group} does not exist")
    if not 0 <= view.segment < len(segments):
        raise PeerError(f"{where}: segment {view.segment} does not exist")
    sizes = {
        "blocks": view.blocks, "block_tokens": view.block_tokens, "heads": view.heads, "row_bytes": view.row_bytes,
        "block_stride": view.block_stride, "head_stride": view.head_stride, "token_stride": view.token_stride,
        "atom_tokens": view.atom_tokens, "channels": view.channels,
        "channel_stride": view.channel_stride if view.channels > 1 else 1,
    }  # fmt: skip
    for name, value in sizes.items():
        if not 1 <= value <= _LIMIT:
            raise PeerError(f"{where}: {name} is {value}, which is not a positive size")
    if view.head_start < 0 or view.head_start + view.heads > view.total_heads:
        raise PeerError(
            f"{where}: heads {view.head_start} to {view.head_start + view.heads} do not fit "
            f"{view.total_heads} heads in all"
        )
    group_tokens = geometry.groups[view.group].block_tokens
    if group_tokens % view.block_tokens:
        raise PeerError(f"{where}: its blocks of {view.block_tokens} tokens do not divide the group's {group_tokens}")
    if view.block_tokens % view.atom_tokens:
        raise PeerError(f"{where}: atoms of {view.atom_tokens} tokens do not divide blocks of {view.block_tokens}")
    needed = geometry.num_blocks * (group_tokens // view.block_tokens)
    if view.blocks < needed:
        raise PeerError(f"{where}: holds {view.blocks} blocks, but block ids reach {needed}")
    _check_disjoint(view, where)
    length = segments[view.segment].length
    if view.offset < 0 or view.offset + view_extent(view) > length:
        raise PeerError(f"{where}: reaches byte {view.offset + view_extent(view)} of a segment of {length} bytes")


def _check_disjoint(view: KvView, where: str) -> None:
    """Raise PeerError when two (block, head, token, channel) rows of a view could share bytes."""
    dimensions = sorted(
        (stride, size)
        for stride, size in (
            (view.block_stride, view.blocks), (view.head_stride, view.heads), (view.token_stride, view.block_tokens),
            (view.channel_stride, view.channels),
        )
        if size > 1
    )  # fmt: skip
    covered = view.row_bytes
    for stride, size in dimensions:
        if stride < covered:
            raise PeerError(f"{where}: rows overlap: a stride of {stride} bytes steps over {covered} bytes")
        covered += stride * (size - 1)


def locate(
    addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], segments: Sequence[KvSegment], *, side: str
) -> NDArray[np.intp]:
    """Return the index of the segment that holds each run; raise TransferError when one leaves all of them."""
    bases = np.array([segment.address for segment in segments], dtype=np.uint64)
    order = np.argsort(bases, kind="stable")
    ends = bases + np.array([segment.length for segment in segments], dtype=np.uint64)
    if len(order) == 0:
        raise TransferError(f"{side} memory has no registered segment")
    slot = np.searchsorted(bases[order], addresses, side="right") - 1
    index: NDArray[np.intp] = order[np.maximum(slot, 0)]
    # Subtract instead of adding: address + length of a hostile run could wrap around.
    room = ends[index] - addresses
    outside = (slot < 0) | (addresses >= ends[index]) | (lengths > room)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise TransferError(
            f"{side} run of {int(lengths[first])} bytes at {int(addresses[first]):#x} leaves the registered memory"
        )
    return index


def check_runs(runs: Runs) -> None:
    """Raise TransferError unless the three arrays of a plan belong together."""
    if not len(runs.local) == len(runs.remote) == len(runs.length):
        raise TransferError(
            f"a plan of {len(runs.local)} local, {len(runs.remote)} remote and {len(runs.length)} lengths is malformed"
        )
    if len(runs) and not runs.length.all():
        raise TransferError("a plan holds an empty run")
