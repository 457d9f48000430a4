"""Plan the byte runs that copy a token range from one rank's KV cache into another's.

A rank's cache is a set of strided views. `PairPlan` matches the views of two ranks once (`bundles.py`). For each piece
of a transfer it cuts the range into stretches of tokens that lie in one block on both sides. Stretches that are whole
blocks of both sides are copied without looking at their inside where that is dense, so equal layouts cost one run per
contiguous stretch of block pairs. Everything else (partial blocks, other block sizes, strides or head shares) goes
through the same arithmetic at a finer grain: runs are computed once per bundle, relative to where its views start,
and spread over them with one outer sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.dataplane.bundles import Blocks, Bundle, Ints, Pace, bundle_views
from kvflow.dataplane.compat import Share
from kvflow.dataplane.geometry import check_geometry
from kvflow.dataplane.port import Runs
from kvflow.errors import PeerError, TransferError
from kvflow.messages import KvGeometry, KvGroup, KvSegment

_Part = tuple[Ints, Ints, Ints]  # source addresses, target addresses, lengths


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Hold one group's block ids: `ids[i]` is the block at position `first + i`."""

    first: int
    ids: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Spans:
    """Hold stretches of tokens that lie in one block on both sides: the blocks, the first token in each, the count."""

    source_block: Ints
    source_token: Ints
    target_block: Ints
    target_token: Ints
    count: Ints

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> "_Spans":
        """Return the chosen stretches, in the order chosen."""
        return _Spans(
            self.source_block[chosen], self.source_token[chosen], self.target_block[chosen],
            self.target_token[chosen], self.count[chosen],
        )  # fmt: skip


_NO_SPANS = _Spans(*[np.empty(0, dtype=np.int64)] * 5)


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Hold a piece's stretches: those that are a whole block on both sides, by source block, and the others."""

    whole: _Spans
    partial: _Spans


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
        self._bundles, self._blocks = bundle_views(source, source_segments, target, target_segments, share)
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
        stretches = {
            pace: self._stretches(
                pace, source_tables, target_tables, start, end, end if range_end is None else range_end
            )
            for pace in dict.fromkeys(bundle.pace for bundle in self._bundles)
        }
        parts: list[_Part] = []
        for blocks in self._blocks:
            parts.extend(_whole_runs(blocks, stretches[blocks.pace].whole))
        for bundle in self._bundles:
            found = stretches[bundle.pace]
            left = (found.partial,) if bundle.in_blocks else (found.whole, found.partial)
            parts.extend(_fine_runs(bundle, spans) for spans in left if len(spans.count))
        return _gather(parts)

    def _stretches(
        self,
        pace: Pace,
        source_tables: Sequence[BlockTable],
        target_tables: Sequence[BlockTable],
        start: int,
        end: int,
        range_end: int,
    ) -> "_Stretches":
        """Cut the part of a piece that a group needs, and sort out what is whole blocks on both sides."""
        first = _first_needed(self._target.groups[pace.target_group], start, range_end)
        stop = _whole_atoms(first, end, pace.atom)
        if first >= stop:
            return _Stretches(_NO_SPANS, _NO_SPANS)
        spans = self._spans(pace, source_tables, target_tables, first, stop)
        if pace.source_tokens != pace.target_tokens:
            return _Stretches(_NO_SPANS, spans)
        whole = spans.count == pace.source_tokens
        full = spans.select(whole)
        # Tables often run downwards (freed blocks come back in reverse): sorting lets those merge as well.
        return _Stretches(full.select(np.argsort(full.source_block, kind="stable")), spans.select(~whole))

    def _spans(
        self,
        pace: Pace,
        source_tables: Sequence[BlockTable],
        target_tables: Sequence[BlockTable],
        start: int,
        end: int,
    ) -> _Spans:
        # Before anything is allocated: a range from a peer may be absurdly long, a table of ours is not.
        _check_cover(source_tables[pace.source_group], self._source.groups[pace.source_group], start, end, "source")
        _check_cover(target_tables[pace.target_group], self._target.groups[pace.target_group], start, end, "target")
        cuts = _cuts(start, end, pace.source_tokens, pace.target_tokens)
        tokens = cuts[:-1]
        source_block, source_token = _find(
            tokens, source_tables[pace.source_group], self._source.groups[pace.source_group],
            pace.source_tokens, self._source.num_blocks, "source",
        )  # fmt: skip
        target_block, target_token = _find(
            tokens, target_tables[pace.target_group], self._target.groups[pace.target_group],
            pace.target_tokens, self._target.num_blocks, "target",
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


def _whole_runs(blocks: Blocks, spans: _Spans) -> list[_Part]:
    """Return the runs of whole blocks."""
    if not len(spans.count):
        return []
    source = spans.source_block * blocks.source_block
    target = spans.target_block * blocks.target_block
    return [
        _spread(source_starts, target_starts, _coalesce(source, target, np.full(len(source), size, dtype=np.int64)))
        for source_starts, target_starts, size in blocks.chunks
    ]


def _fine_runs(bundle: Bundle, spans: _Spans) -> _Part:
    """Return the runs of stretches at the bundle's grain: one for each, or one for each of its tokens."""
    source = spans.source_block * bundle.source_block + spans.source_token * bundle.source_token
    target = spans.target_block * bundle.target_block + spans.target_token * bundle.target_token
    if bundle.tokens_dense:
        length = spans.count * bundle.unit
    else:
        owner = np.repeat(np.arange(len(spans.count)), spans.count)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(spans.count) - spans.count, spans.count)
        source = source[owner] + step * bundle.source_token
        target = target[owner] + step * bundle.target_token
        length = np.full(len(owner), bundle.unit, dtype=np.int64)
    return _spread(bundle.source_starts, bundle.target_starts, _coalesce(source, target, length))


def _coalesce(source: Ints, target: Ints, length: Ints) -> _Part:
    """Merge neighbours in the list that follow each other on both sides."""
    if len(length) < 2:
        return source, target, length
    ends = length[:-1]
    broken = (source[1:] != source[:-1] + ends) | (target[1:] != target[:-1] + ends)
    first = np.concatenate([[0], np.flatnonzero(broken) + 1])
    if len(first) == len(length):
        return source, target, length
    return source[first], target[first], np.add.reduceat(length, first)


def _spread(source_starts: Ints, target_starts: Ints, runs: _Part) -> _Part:
    """Repeat relative runs at every start."""
    source, target, length = runs
    return (
        (source_starts[:, None] + source).ravel(),
        (target_starts[:, None] + target).ravel(),
        np.tile(length, len(source_starts)),
    )


def _gather(parts: list[_Part]) -> Runs:
    if not parts:
        empty = np.empty(0, dtype=np.uint64)
        return Runs(local=empty, remote=empty, length=empty)
    columns = [np.concatenate(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)]
    local, remote, length = (column.view(np.uint64) for column in columns)
    return Runs(local=local, remote=remote, length=length)
