"""Match the views of two ranks once, and sort the pairs so that a plan can treat many of them as one.

Pairs that differ only in where they start form a *bundle*. Inside a block a pair has the dimensions head, token and
channel; those that follow each other without gaps on both sides are folded into longer runs, and the others are spread
into starts of their own. Where both sides have blocks of equal size and dense tokens, the copies of whole blocks are
folded further, across pairs: K and V side by side, or all layers of a block, become one run.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.dataplane.compat import Share, ViewPair, by_layer, match_views
from kvflow.errors import PeerError
from kvflow.messages import KvGeometry, KvSegment

Ints = NDArray[np.int64]


class Pace(NamedTuple):
    """Hold what decides how a token range is cut: the groups, tokens per block of the views, tokens per atom."""

    source_group: int
    target_group: int
    source_tokens: int
    target_tokens: int
    atom: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Hold what moves stretches of tokens of all pairs of one shape; sizes and strides in bytes.

    Starts are absolute addresses of block 0, token 0, one for each pair and each head and channel that stands alone.
    `unit` is what one token contributes to a run, and `tokens_dense` says whether those of a block follow each other.
    `in_blocks` says that whole blocks are in `Blocks`, so that only others are left to the bundle.
    """

    pace: Pace
    source_block: int
    source_token: int
    target_block: int
    target_token: int
    unit: int
    tokens_dense: bool
    in_blocks: bool
    source_starts: Ints
    target_starts: Ints


@dataclass(frozen=True, slots=True)
class Blocks:
    """Hold what moves whole blocks: (source starts, target starts, bytes of each), where starts lie in block 0."""

    pace: Pace
    source_block: int
    target_block: int
    chunks: tuple[tuple[Ints, Ints, int], ...]


class _Dim(NamedTuple):
    """Hold a dimension of a block: its size, and its strides on both sides."""

    size: int
    source: int
    target: int


class _Shape(NamedTuple):
    """Hold everything but the start that two matched views have in common with others."""

    pace: Pace
    source_block: int
    target_block: int
    row: int
    head: _Dim
    channel: _Dim
    source_token: int
    target_token: int


class _Start(NamedTuple):
    """Locate one pair: its segments, and the absolute addresses of block 0, first common head, token 0."""

    source_segment: int
    target_segment: int
    source: int
    target: int


_Chunk = tuple[list[_Start], Sequence[_Dim], int]


def bundle_views(
    source: KvGeometry,
    source_segments: Sequence[KvSegment],
    target: KvGeometry,
    target_segments: Sequence[KvSegment],
    share: Share | None,
) -> tuple[tuple[Bundle, ...], tuple[Blocks, ...]]:
    """Match views by layer and part, and fold them; raise PeerError when two that match mean different things.

    `share` limits what is written, by layer and part of the target.
    """
    bundles: list[Bundle] = []
    chunks: dict[tuple[Pace, int, int], list[_Chunk]] = defaultdict(list)
    found = _match(source, source_segments, target, target_segments, share)
    for shape, starts in sorted(found.items()):
        pace = shape.pace
        unit, dims = _fold(shape.row, (shape.head, shape.channel))
        dense = shape.source_token == unit == shape.target_token
        in_blocks = dense and pace.source_tokens == pace.target_tokens
        if in_blocks:
            size, outer = _fold(unit * pace.source_tokens, dims)
            chunks[pace, shape.source_block, shape.target_block].append((starts, outer, size))
        table = _table(starts, dims)
        bundles.append(
            Bundle(
                pace=pace, source_block=shape.source_block, source_token=shape.source_token,
                target_block=shape.target_block, target_token=shape.target_token, unit=unit, tokens_dense=dense,
                in_blocks=in_blocks, source_starts=table[:, 2].copy(), target_starts=table[:, 3].copy(),
            )
        )  # fmt: skip
    blocks = tuple(Blocks(*key, chunks=_merge(members)) for key, members in chunks.items())
    return tuple(bundles), blocks


def _match(
    source: KvGeometry,
    source_segments: Sequence[KvSegment],
    target: KvGeometry,
    target_segments: Sequence[KvSegment],
    share: Share | None,
) -> dict[_Shape, list[_Start]]:
    starts: dict[_Shape, list[_Start]] = defaultdict(list)
    source_layers, target_layers = by_layer(source), by_layer(target)
    for view in target.views:
        ranges = None if share is None else share.get((view.layer, view.part), ())
        for pair in match_views(source_layers.get(view.layer, ()), view, target_layers[view.layer]):
            _check_groups(pair, source, target)
            ours, theirs = pair.source, pair.target
            ours_at = source_segments[ours.segment].address + ours.offset
            theirs_at = target_segments[theirs.segment].address + theirs.offset
            for low, high in _heads(pair, ranges):
                start = _Start(
                    ours.segment, theirs.segment,
                    ours_at + (low - ours.head_start) * ours.head_stride,
                    theirs_at + (low - theirs.head_start) * theirs.head_stride,
                )  # fmt: skip
                starts[_shape(pair, high - low)].append(start)
    return starts


def _heads(pair: ViewPair, ranges: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Return the global head ranges that both views hold, within `ranges` when given."""
    low = max(pair.source.head_start, pair.target.head_start)
    high = min(pair.source.head_start + pair.source.heads, pair.target.head_start + pair.target.heads)
    wanted = [(low, high)] if ranges is None else [(max(low, first), min(high, end)) for first, end in ranges]
    return [(first, end) for first, end in wanted if first < end]


def _check_groups(pair: ViewPair, source: KvGeometry, target: KvGeometry) -> None:
    ours, theirs = source.groups[pair.source.group], target.groups[pair.target.group]
    if (ours.kind, ours.window_tokens) != (theirs.kind, theirs.window_tokens):
        raise PeerError(
            f"layer {pair.source.layer}: {ours.kind} attention (window {ours.window_tokens}) on the source, "
            f"{theirs.kind} (window {theirs.window_tokens}) on the target"
        )
    if pair.source.total_heads != pair.target.total_heads:
        raise PeerError(
            f"layer {pair.source.layer}: {pair.source.total_heads} KV heads on the source, "
            f"{pair.target.total_heads} on the target"
        )


def _shape(pair: ViewPair, heads: int) -> _Shape:
    source, target = pair.source, pair.target
    return _Shape(
        pace=Pace(
            source.group, target.group, source.block_tokens, target.block_tokens,
            math.lcm(source.atom_tokens, target.atom_tokens),
        ),
        source_block=source.block_stride, target_block=target.block_stride, row=source.row_bytes,
        head=_dim(heads, source.head_stride, target.head_stride),
        channel=_dim(source.channels, source.channel_stride, target.channel_stride),
        source_token=source.token_stride, target_token=target.token_stride,
    )  # fmt: skip


def _dim(size: int, source: int, target: int) -> _Dim:
    """Return a dimension; the strides of a single one mean nothing and must not keep shapes apart."""
    return _Dim(size, source, target) if size > 1 else _Dim(1, 0, 0)


def _fold(size: int, dims: Iterable[_Dim]) -> tuple[int, list[_Dim]]:
    """Grow a run of `size` bytes over the dimensions that follow it on both sides; return its bytes and the others."""
    left = [dim for dim in dims if dim.size > 1]
    while (dense := next((dim for dim in left if dim.source == size == dim.target), None)) is not None:
        left.remove(dense)
        size *= dense.size
    return size, left


def _table(starts: Iterable[_Start], dims: Iterable[_Dim]) -> Ints:
    """Return sorted starts, repeated over the dimensions, as rows of a table of four columns."""
    table = np.array(sorted(starts), dtype=np.int64)
    for dim in dims:
        steps = np.zeros((dim.size, 4), dtype=np.int64)
        steps[:, 2] = np.arange(dim.size) * dim.source
        steps[:, 3] = np.arange(dim.size) * dim.target
        table = (table[:, None] + steps).reshape(-1, 4)
    return table


def _merge(members: Iterable[_Chunk]) -> tuple[tuple[Ints, Ints, int], ...]:
    """Join what lies side by side in a block on both sides, and sort it by size."""
    tables = [(_table(starts, dims), size) for starts, dims, size in members]
    table = np.concatenate([found for found, _ in tables])
    length = np.concatenate([np.full(len(found), size, dtype=np.int64) for found, size in tables])
    order = np.lexsort(table.T[::-1])
    table, length = table[order], length[order]
    step = np.diff(table, axis=0)
    joined = (step[:, :2] == 0).all(axis=1) & (step[:, 2:] == length[:-1, None]).all(axis=1)
    first = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    starts, total = table[first], np.add.reduceat(length, first)
    return tuple(
        (starts[total == size, 2].copy(), starts[total == size, 3].copy(), int(size)) for size in np.unique(total)
    )
