"""Plan the byte runs that copy a token range from one rank's KV cache into another's.

A rank's cache is a set of strided views. `PairPlan` matches the views of two ranks once and sorts the pairs into
*bundles*: pairs that differ only in where they start. For each piece of a transfer a bundle computes its runs once,
relative to the views' starts, and spreads them over its members with one outer sum. Whole blocks that are dense in both
caches are copied without looking at their inside, so equal layouts cost one run per view and contiguous stretch of
block pairs. Everything else (partial blocks, other block sizes, strides or head shares) goes through the same
arithmetic at a finer grain.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.dataplane.compat import Share, ViewPair, by_layer, match_views
from kvflow.dataplane.geometry import check_geometry
from kvflow.dataplane.port import Runs
from kvflow.errors import PeerError, TransferError
from kvflow.messages import KvGeometry, KvGroup, KvSegment

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Hold one group's block ids: `ids[i]` is the block at position `first + i`."""

    first: int
    ids: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    """Hold everything but the start that two matched views have in common with others. Strides and sizes in bytes.

    `source_tokens` and `target_tokens` are tokens per block of the views; group block sizes are looked up by number.
    """

    source_group: int
    target_group: int
    source_tokens: int
    target_tokens: int
    heads: int
    row: int
    source_block: int
    source_head: int
    source_token: int
    target_block: int
    target_head: int
    target_token: int
    atom: int

    @property
    def heads_dense(self) -> bool:
        """Return whether the heads of one token lie side by side on both sides."""
        return self.heads == 1 or (self.source_head == self.row == self.target_head)

    @property
    def unit(self) -> int:
        """Return the bytes that one token contributes to one run."""
        return self.row * self.heads if self.heads_dense else self.row

    @property
    def tokens_dense(self) -> bool:
        """Return whether the tokens of a block follow each other without gaps on both sides."""
        return self.source_token == self.unit == self.target_token

    @property
    def dense_block(self) -> int:
        """Return the bytes of one block that can be copied as one run, or 0 when there is no such run."""
        if self.source_tokens != self.target_tokens or not self.tokens_dense:
            return 0
        size = self.source_tokens * self.unit
        if self.heads_dense:
            return size
        return size * self.heads if self.source_head == size == self.target_head else 0


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Hold the starts of all view pairs of one shape: absolute addresses of block 0, first head, token 0.

    `chains` are (starts, starts, bytes per block): neighbouring views whose blocks lie side by side count as one there.
    """

    shape: _Shape
    source_starts: Ints
    target_starts: Ints
    chains: tuple[tuple[Ints, Ints, int], ...]


@dataclass(frozen=True, slots=True)
class _Spans:
    """Hold stretches of tokens that lie in one block on both sides: the blocks, the first token in each, the count."""

    source_block: Ints
    source_token: Ints
    target_block: Ints
    target_token: Ints
    count: Ints

    def select(self, chosen: NDArray[np.bool_]) -> "_Spans":
        """Return the chosen stretches."""
        return _Spans(
            self.source_block[chosen], self.source_token[chosen], self.target_block[chosen],
            self.target_token[chosen], self.count[chosen],
        )  # fmt: skip


class PairPlan:
    """Plan copies from one source rank into one target rank; built once per pair of geometries."""

    def __init__(
        self,
        source: KvGeometry,
        source_segments: Sequence[KvSegment],
        target: KvGeometry,
        target_segments: Sequence[KvSegment],
        *,
        share: Share | None = None,
    ) -> None:
        """Match the views; raise PeerError when a geometry is invalid or nothing in it can be matched.

        `share` limits what this source rank writes, by layer and part of the target (see `compat.shares_for`);
        None means everything that both sides hold.
        """
        check_geometry(source, source_segments, owner="source")
        check_geometry(target, target_segments, owner="target")
        self._source = source
        self._target = target
        self._bundles = _bundle(source, source_segments, target, target_segments, share)
        if not self._bundles:
            raise PeerError("the source rank holds nothing that the target rank needs")

    def runs(
        self,
        source_tables: Sequence[BlockTable],
        target_tables: Sequence[BlockTable],
        start: int,
        end: int,
        *,
        range_end: int | None = None,
    ) -> Runs:
        """Return the runs that copy the tokens [start, end); raise TransferError when a block table does not fit.

        Tables are per group of each side. `range_end` is where the whole transfer ends (default `end`): layers of a
        window group need only the blocks of the last tokens before it, whatever piece is asked for. Views with atoms
        must be asked for from an atom's first token on; the last atom is copied whole.
        """
        if not 0 <= start <= end:
            raise TransferError(f"token range [{start}, {end}) is malformed")
        _check_tables(source_tables, self._source, "source")
        _check_tables(target_tables, self._target, "target")
        parts: list[tuple[Ints, Ints, Ints]] = []
        spans_of: dict[tuple[int, ...], _Spans | None] = {}
        for bundle in self._bundles:
            shape = bundle.shape
            key = (shape.source_group, shape.target_group, shape.source_tokens, shape.target_tokens, shape.atom)
            if key not in spans_of:
                group = self._target.groups[shape.target_group]
                first = _first_needed(group, start, end if range_end is None else range_end)
                stop = _whole_atoms(first, end, shape.atom)
                spans_of[key] = self._spans(shape, source_tables, target_tables, first, stop) if first < stop else None
            spans = spans_of[key]
            if spans is not None:
                parts.extend(_bundle_runs(bundle, spans))
        return _gather(parts)

    def _spans(
        self,
        shape: _Shape,
        source_tables: Sequence[BlockTable],
        target_tables: Sequence[BlockTable],
        start: int,
        end: int,
    ) -> _Spans:
        # Before anything is allocated: a range from a peer may be absurdly long, a table of ours is not.
        _check_cover(source_tables[shape.source_group], self._source.groups[shape.source_group], start, end, "source")
        _check_cover(target_tables[shape.target_group], self._target.groups[shape.target_group], start, end, "target")
        cuts = _cuts(start, end, shape.source_tokens, shape.target_tokens)
        tokens = cuts[:-1]
        source_block, source_token = _find(
            tokens, source_tables[shape.source_group], self._source.groups[shape.source_group],
            shape.source_tokens, self._source.num_blocks, "source",
        )  # fmt: skip
        target_block, target_token = _find(
            tokens, target_tables[shape.target_group], self._target.groups[shape.target_group],
            shape.target_tokens, self._target.num_blocks, "target",
        )  # fmt: skip
        return _Spans(source_block, source_token, target_block, target_token, np.diff(cuts))


def _whole_atoms(start: int, end: int, atom: int) -> int:
    """Return `end` rounded up to whole atoms; raise TransferError when the range begins inside one."""
    if start < end and start % atom:
        raise TransferError(f"tokens [{start}, {end}) begin inside an atom of {atom} tokens, which moves as a whole")
    return end + -end % atom


def _first_needed(group: KvGroup, start: int, range_end: int) -> int:
    """Return the first token of a piece that its group needs: the next token attends to `window_tokens` with itself.

    Rounded down to a whole target block, which is allocated as a whole and may hold its tokens in any order inside.
    """
    if group.kind != "window":
        return start
    needed = max(0, range_end - group.window_tokens + 1)
    return max(start, needed - needed % group.block_tokens)


def _check_tables(tables: Sequence[BlockTable], geometry: KvGeometry, side: str) -> None:
    if len(tables) != len(geometry.groups):
        raise TransferError(f"{side}: {len(tables)} block tables for {len(geometry.groups)} groups")


def _check_cover(table: BlockTable, group: KvGroup, start: int, end: int, side: str) -> None:
    first, last = start // group.block_tokens, (end - 1) // group.block_tokens
    if first < table.first or last >= table.first + len(table.ids):
        raise TransferError(
            f"{side}: tokens [{start}, {end}) need block positions {first} to {last}, "
            f"the table holds {len(table.ids)} from {table.first}"
        )


def _cuts(start: int, end: int, source_tokens: int, target_tokens: int) -> Ints:
    """Return start, end and every block boundary of either side between them, ascending."""
    inner = [_multiples(start, end, source_tokens)]
    if source_tokens != target_tokens:
        inner.append(_multiples(start, end, target_tokens))
    return np.unique(np.concatenate([np.array([start, end], dtype=np.int64), *inner]))


def _multiples(start: int, end: int, step: int) -> Ints:
    return np.arange((start // step + 1) * step, end, step, dtype=np.int64)


def _find(
    tokens: Ints, table: BlockTable, group: KvGroup, view_tokens: int, num_blocks: int, side: str
) -> tuple[Ints, Ints]:
    """Return (view block, token in it) of each token; raise TransferError when a block id is out of range."""
    position = tokens // group.block_tokens - table.first
    block = table.ids[position].astype(np.int64)
    if int(block.max()) >= num_blocks:
        raise TransferError(f"{side}: block {int(block.max())} is outside the cache of {num_blocks} blocks")
    ratio = group.block_tokens // view_tokens
    if ratio > 1:
        block = block * ratio + tokens % group.block_tokens // view_tokens
    return block, tokens % view_tokens


def _bundle_runs(bundle: _Bundle, spans: _Spans) -> list[tuple[Ints, Ints, Ints]]:
    shape = bundle.shape
    parts: list[tuple[Ints, Ints, Ints]] = []
    if shape.dense_block:
        whole = spans.count == shape.source_tokens
        full = spans.select(whole)
        spans = spans.select(~whole)
        if len(full.count):
            # Tables often run downwards (freed blocks come back in reverse): sorting lets those merge as well.
            order = np.argsort(full.source_block, kind="stable")
            source = full.source_block[order] * shape.source_block
            target = full.target_block[order] * shape.target_block
            for source_starts, target_starts, size in bundle.chains:
                merged = _coalesce(source, target, np.full(len(source), size, dtype=np.int64))
                parts.append(_spread(source_starts, target_starts, merged))
    if len(spans.count):
        parts.append(_spread(bundle.source_starts, bundle.target_starts, _coalesce(*_fine(shape, spans))))
    return parts


def _fine(shape: _Shape, spans: _Spans) -> tuple[Ints, Ints, Ints]:
    """Return relative runs of stretches that are not whole dense blocks: per stretch, token or head as needed."""
    source = spans.source_block * shape.source_block + spans.source_token * shape.source_token
    target = spans.target_block * shape.target_block + spans.target_token * shape.target_token
    if shape.tokens_dense:
        length = spans.count * shape.unit
    else:
        owner = np.repeat(np.arange(len(spans.count)), spans.count)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(spans.count) - spans.count, spans.count)
        source = source[owner] + step * shape.source_token
        target = target[owner] + step * shape.target_token
        length = np.full(len(owner), shape.unit, dtype=np.int64)
    if shape.heads_dense:
        return source, target, length
    head = np.arange(shape.heads, dtype=np.int64)
    return (
        (source[:, None] + head * shape.source_head).ravel(),
        (target[:, None] + head * shape.target_head).ravel(),
        np.repeat(length, shape.heads),
    )


def _coalesce(source: Ints, target: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge neighbours in the list that follow each other on both sides."""
    if len(length) < 2:
        return source, target, length
    ends = length[:-1]
    broken = (source[1:] != source[:-1] + ends) | (target[1:] != target[:-1] + ends)
    first = np.concatenate([[0], np.flatnonzero(broken) + 1])
    if len(first) == len(length):
        return source, target, length
    return source[first], target[first], np.add.reduceat(length, first)


def _spread(source_starts: Ints, target_starts: Ints, runs: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """Repeat relative runs at every start."""
    source, target, length = runs
    return (
        (source_starts[:, None] + source).ravel(),
        (target_starts[:, None] + target).ravel(),
        np.tile(length, len(source_starts)),
    )


def _gather(parts: list[tuple[Ints, Ints, Ints]]) -> Runs:
    if not parts:
        empty = np.empty(0, dtype=np.uint64)
        return Runs(local=empty, remote=empty, length=empty)
    columns = [np.concatenate(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)]
    local, remote, length = (column.view(np.uint64) for column in columns)
    return Runs(local=local, remote=remote, length=length)


def _bundle(
    source: KvGeometry,
    source_segments: Sequence[KvSegment],
    target: KvGeometry,
    target_segments: Sequence[KvSegment],
    share: Share | None,
) -> tuple[_Bundle, ...]:
    """Match views by layer and part, and group the pairs by shape."""
    starts: dict[_Shape, list[tuple[int, int, int, int]]] = defaultdict(list)
    source_layers, target_layers = by_layer(source), by_layer(target)
    for view in target.views:
        pairs = match_views(source_layers.get(view.layer, ()), view, target_layers[view.layer])
        ranges = None if share is None else share.get((view.layer, view.part), ())
        for pair in pairs:
            _check_groups(pair, source, target)
            for low, high in _heads(pair, ranges):
                ours, theirs = pair.source, pair.target
                starts[_shape(pair, high - low)].append((
                    ours.segment,
                    theirs.segment,
                    source_segments[ours.segment].address + ours.offset + (low - ours.head_start) * ours.head_stride,
                    target_segments[theirs.segment].address + theirs.offset
                    + (low - theirs.head_start) * theirs.head_stride,
                ))  # fmt: skip
    return tuple(_make_bundle(shape, members) for shape, members in sorted(starts.items()))


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
        source_group=source.group, target_group=target.group, heads=heads, row=source.row_bytes,
        source_tokens=source.block_tokens, target_tokens=target.block_tokens,
        source_block=source.block_stride, source_head=source.head_stride, source_token=source.token_stride,
        target_block=target.block_stride, target_head=target.head_stride, target_token=target.token_stride,
        atom=math.lcm(source.atom_tokens, target.atom_tokens),
    )  # fmt: skip


def _make_bundle(shape: _Shape, members: list[tuple[int, int, int, int]]) -> _Bundle:
    """Sort the members by segments and start, and chain those whose blocks lie side by side on both sides.

    In a cache that keeps all layers of a block together, a whole block is then one run instead of one per layer.
    """
    table = np.array(sorted(members), dtype=np.int64)
    chains: tuple[tuple[Ints, Ints, int], ...] = ()
    size = shape.dense_block
    if size:
        step = np.diff(table, axis=0)
        linked = (step[:, 0] == 0) & (step[:, 1] == 0) & (step[:, 2] == size) & (step[:, 3] == size)
        first = np.concatenate([[0], np.flatnonzero(~linked) + 1])
        counts = np.diff(np.concatenate([first, [len(table)]]))
        chains = tuple(
            (table[first[counts == count], 2], table[first[counts == count], 3], int(count) * size)
            for count in np.unique(counts)
        )
    return _Bundle(shape=shape, source_starts=table[:, 2].copy(), target_starts=table[:, 3].copy(), chains=chains)
