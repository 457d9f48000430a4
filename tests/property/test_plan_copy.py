"""The planner against a naive model: random caches, ranks, block tables and ranges, compared byte by byte."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.dataplane.compat import check_compatible, shares_for, targets_of, writers_for
from kvflow.dataplane.geometry import check_geometry, check_runs, locate
from kvflow.dataplane.plan import BlockTable, PairPlan
from kvflow.dataplane.port import Runs
from kvflow.errors import TransferError
from kvflow.messages import EngineProfile, EngineRef, KvGeometry, KvGroup, KvSegment, KvView, ModelFingerprint

Bytes = NDArray[np.uint8]
DIMENSIONS = ("layer", "part", "block", "head", "token", "channel")
USUAL_ORDERS = (
    DIMENSIONS,  # one array per layer and part, heads outside tokens
    ("layer", "part", "block", "token", "head", "channel"),
    ("layer", "block", "part", "head", "token", "channel"),
    ("block", "layer", "part", "head", "token", "channel"),  # all layers of a block together
    ("block", "layer", "part", "token", "head", "channel"),
    ("layer", "block", "head", "part", "channel", "token"),  # channels outside tokens, as CPU attention keeps keys
    ("layer", "part", "block", "head", "channel", "token"),
)


@dataclass(frozen=True)
class Model:
    """What two engines have in common."""

    layer_groups: tuple[int, ...]
    windows: tuple[int, ...]
    heads: int
    channels: int
    element: int
    latent: bool
    tokens: int

    @property
    def row(self) -> int:
        """Return the bytes of K of one token and head; V has as many."""
        return self.channels * self.element


@dataclass(frozen=True)
class Cache:
    """One engine's way to store a model's KV cache."""

    ranks: int
    packed: bool
    strided: frozenset[str]  # the parts whose channels are a dimension; those of others are contiguous and innermost
    split_segments: bool
    order: tuple[str, ...]
    padding: tuple[int, ...]
    block_tokens: tuple[int, ...]
    view_tokens: tuple[int, ...]
    spare_blocks: int
    seed: int


@dataclass
class Rank:
    profile: EngineProfile
    segments: tuple[KvSegment, ...]
    memory: list[Bytes]


@dataclass
class Engine:
    ranks: list[Rank]
    tables: list[BlockTable]

    @property
    def profiles(self) -> list[EngineProfile]:
        return [rank.profile for rank in self.ranks]


PARTS_STRIDED = st.sampled_from([frozenset(), frozenset({"k"}), frozenset({"k", "v", "kv", "latent"})])


@st.composite
def models(draw: st.DrawFn) -> Model:
    groups = draw(st.integers(1, 2))
    return Model(
        layer_groups=tuple(draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=3))),
        windows=tuple(draw(st.sampled_from([0, 0, 3, 7])) for _ in range(groups)),
        heads=draw(st.sampled_from([1, 2, 4])),
        channels=draw(st.integers(1, 3)),
        element=draw(st.integers(1, 2)),
        latent=draw(st.booleans()),
        tokens=draw(st.integers(1, 30)),
    )


@st.composite
def caches(draw: st.DrawFn, model: Model) -> Cache:
    blocks = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in model.windows)
    return Cache(
        ranks=draw(st.sampled_from([1, 2, 4])),
        packed=draw(st.booleans()),
        strided=draw(PARTS_STRIDED),
        split_segments=draw(st.booleans()),
        order=tuple(draw(st.one_of(st.sampled_from(USUAL_ORDERS), st.permutations(DIMENSIONS)))),
        padding=draw(st.one_of(st.just((0,) * 6), st.tuples(*[st.sampled_from([0, 0, 1, 5])] * 6))),
        block_tokens=blocks,
        view_tokens=tuple(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in blocks),
        spare_blocks=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def relatives(draw: st.DrawFn, cache: Cache) -> Cache:
    """Draw a cache with the same blocks, but another arrangement: what whole-block copies must tell apart."""
    return replace(
        cache,
        order=draw(st.sampled_from(USUAL_ORDERS)),
        strided=draw(st.one_of(st.just(cache.strided), PARTS_STRIDED)),
        padding=(0,) * 6,
        split_segments=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def head_range(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    if ranks <= heads:
        share = heads // ranks
        return rank * share, share
    return rank * heads // ranks, 1  # replicated, as engines with more ranks than KV heads do


def build_engine(name: str, model: Model, cache: Cache) -> Engine:
    """Lay the cache out and draw block tables that cover all tokens."""
    random = np.random.default_rng(cache.seed)
    counts = [-(-model.tokens // size) for size in cache.block_tokens]
    num_blocks = sum(counts) + cache.spare_blocks
    ids = random.permutation(num_blocks)
    if cache.seed % 3 == 0:
        ids = np.sort(ids)
    if cache.seed % 3 == 1:
        ids = np.sort(ids)[::-1]
    edges = np.cumsum([0, *counts])
    tables = [BlockTable(0, ids[low:high].astype(np.uint32)) for low, high in pairwise(edges)]
    return Engine([_build_rank(name, model, cache, rank, num_blocks, random) for rank in range(cache.ranks)], tables)


def _build_rank(name: str, model: Model, cache: Cache, rank: int, num_blocks: int, random: np.random.Generator) -> Rank:
    total = 1 if model.latent else model.heads
    first, heads = (0, 1) if model.latent else head_range(model.heads, rank, cache.ranks)
    parts = ("latent",) if model.latent else ("kv",) if cache.packed else ("k", "v")
    channels = model.channels if parts == ("k", "v") else model.channels * 2
    views: list[KvView] = []
    lengths: list[int] = []
    for group in range(len(model.windows)):
        layers = [layer for layer, owner in enumerate(model.layer_groups) if owner == group]
        if not layers:
            continue
        tokens = cache.view_tokens[group]
        sizes = {
            "layer": 1 if cache.split_segments else len(layers), "part": len(parts), "head": heads, "token": tokens,
            "block": num_blocks * (cache.block_tokens[group] // tokens), "channel": channels,
        }  # fmt: skip
        strides, extent = lay_out(model, cache, parts, sizes)
        for place, layer in enumerate(layers):
            if cache.split_segments or place == 0:
                lengths.append(extent)
            views.extend(
                KvView(
                    layer=f"layer{layer}", part=part, group=group, segment=len(lengths) - 1,
                    offset=number * strides[part]["part"]
                    + (0 if cache.split_segments else place * strides[part]["layer"]),
                    blocks=sizes["block"], block_tokens=tokens, heads=heads, head_start=first, total_heads=total,
                    row_bytes=model.element if part in cache.strided else channels * model.element,
                    block_stride=strides[part]["block"], head_stride=strides[part]["head"],
                    token_stride=strides[part]["token"],
                    channels=channels if part in cache.strided else 1, channel_stride=strides[part]["channel"],
                )
                for number, part in enumerate(parts)
            )  # fmt: skip
    # Segments touch each other, so that a run merged across two of them would go unnoticed by its address alone.
    bases = 4096 + np.cumsum([0, *lengths])
    segments = tuple(KvSegment(address=int(base), length=size) for base, size in zip(bases, lengths, strict=False))
    groups = tuple(
        KvGroup(block_tokens=size, kind="window" if window else "full", window_tokens=window)
        for size, window in zip(cache.block_tokens, model.windows, strict=True)
    )
    geometry = KvGeometry(dtype="bf16", num_blocks=num_blocks, groups=groups, views=tuple(views))
    profile = EngineProfile(
        engine=EngineRef(engine_id=name, incarnation="1"), rank=rank, ranks=cache.ranks, tp_rank=rank,
        tp_size=cache.ranks, pp_rank=0, pp_size=1, roles=("source", "target"), host="h", model="m",
        geometry=geometry, fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip
    check_geometry(geometry, segments)
    return Rank(profile, segments, [random.integers(0, 256, size, dtype=np.uint8) for size in lengths])


def lay_out(
    model: Model, cache: Cache, parts: tuple[str, ...], sizes: dict[str, int]
) -> tuple[dict[str, dict[str, int]], int]:
    """Return each part's strides and the bytes of all; where parts differ inside, the larger one makes the room."""
    order = list(cache.order)
    strided = [part for part in parts if part in cache.strided]
    if 0 < len(strided) < len(parts) and order.index("channel") < order.index("part"):
        # Only where K and V lie apart can they differ inside.
        order.remove("channel")
        order.insert(order.index("part") + 1, "channel")
    strides: dict[str, dict[str, int]] = {part: {} for part in parts}
    extents = dict.fromkeys(parts, model.element)
    for part in parts:
        if part not in strided:
            strides[part]["channel"] = model.element
            extents[part] *= sizes["channel"]
    for dimension, padding in zip(reversed(order), cache.padding, strict=True):
        if dimension == "part":
            extents = dict.fromkeys(parts, max(extents.values()))
        for part in parts:
            if dimension not in strides[part]:
                strides[part][dimension] = extents[part] + padding
                extents[part] = strides[part][dimension] * sizes[dimension]
    return strides, max(extents.values())


def rows_of(model: Model, engine: Engine, rank: Rank, view: KvView, token: int) -> list[tuple[int, int, slice]]:
    """Return (global head, byte offset in the view's segment, bytes of the model's row) of each piece of a token."""
    group = rank.profile.geometry.groups[view.group]
    block = int(engine.tables[view.group].ids[token // group.block_tokens])
    inside = token % group.block_tokens
    block = block * (group.block_tokens // view.block_tokens) + inside // view.block_tokens
    start = view.offset + block * view.block_stride + inside % view.block_tokens * view.token_stride
    shift = model.row if view.part == "v" else 0
    return [
        (
            view.head_start + head,
            start + head * view.head_stride + channel * view.channel_stride,
            slice(shift + channel * view.row_bytes, shift + (channel + 1) * view.row_bytes),
        )
        for head in range(view.heads)
        for channel in range(view.channels)
    ]


def fill(model: Model, engine: Engine, truth: NDArray[np.uint8], first: dict[int, int], start: int, end: int) -> None:
    """Write the truth of [start, end) into every rank, row by row; `first` clamps by group."""
    for rank in engine.ranks:
        for view in rank.profile.geometry.views:
            layer = int(view.layer.removeprefix("layer"))
            for token in range(max(start, first.get(view.group, 0)), end):
                for head, offset, content in rows_of(model, engine, rank, view, token):
                    rank.memory[view.segment][offset : offset + view.row_bytes] = truth[layer, token, head, content]


def apply(runs: Runs, source: Rank, target: Rank, written: list[NDArray[np.int64]]) -> None:
    check_runs(runs)
    origins = locate(runs.local, runs.length, source.segments, side="local")
    places = locate(runs.remote, runs.length, target.segments, side="remote")
    for local, remote, length, origin, place in zip(runs.local, runs.remote, runs.length, origins, places, strict=True):
        read = int(local) - source.segments[origin].address
        write = int(remote) - target.segments[place].address
        size = int(length)
        target.memory[place][write : write + size] = source.memory[origin][read : read + size]
        written[place][write : write + size] += 1


def copy_all(
    model: Model, source: Engine, target: Engine, pieces: list[tuple[int, int]], end: int
) -> list[list[NDArray[np.int64]]]:
    """Copy with the planner from every source rank; return how often each target byte was written."""
    counts = []
    for rank in target.ranks:
        written = [np.zeros(len(memory), dtype=np.int64) for memory in rank.memory]
        shares = shares_for(rank.profile, source.profiles)
        assert sorted(shares) == writers_for(rank.profile, source.profiles)
        for number, share in shares.items():
            origin = source.ranks[number]
            assert rank.profile.rank in targets_of(origin.profile, target.profiles, source.profiles)
            plan = PairPlan(
                origin.profile.geometry, origin.segments, rank.profile.geometry, rank.segments, share=share
            )  # fmt: skip
            for low, high in pieces:
                apply(plan.runs(source.tables, target.tables, low, high, range_end=end), origin, rank, written)
        counts.append(written)
    return counts


@given(st.data())
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_i5_i6_i7_plans_copy_exactly_the_range_between_any_two_layouts(data: st.DataObject) -> None:
    model = data.draw(models())
    layout = data.draw(caches(model))
    source = build_engine("source", model, layout)
    target = build_engine("target", model, data.draw(st.one_of(st.just(layout), relatives(layout), caches(model))))
    assert check_compatible(source.profiles, target.profiles) is None
    start = data.draw(st.integers(0, model.tokens))
    end = data.draw(st.integers(start, model.tokens))
    cuts = sorted({start, end, *data.draw(st.lists(st.integers(start, end), max_size=3))})
    pieces = list(pairwise(cuts)) or [(start, end)]
    random = np.random.default_rng(7)
    truth = random.integers(0, 256, (len(model.layer_groups), model.tokens, model.heads, 2 * model.row), dtype=np.uint8)
    fill(model, source, truth, {}, 0, model.tokens)
    before = [[memory.copy() for memory in rank.memory] for rank in target.ranks]
    counts = copy_all(model, source, target, pieces, end)
    after = [rank.memory for rank in target.ranks]
    sizes = [group.block_tokens for group in target.ranks[0].profile.geometry.groups]
    first = {
        group: max(0, end - window + 1) // sizes[group] * sizes[group]
        for group, window in enumerate(model.windows)
        if window
    }
    for rank, memory in zip(target.ranks, before, strict=True):
        rank.memory = memory
    fill(model, target, truth, first, start, end)
    for rank, memories, written in zip(target.ranks, after, counts, strict=True):
        for expected, actual, times in zip(rank.memory, memories, written, strict=True):
            np.testing.assert_array_equal(actual, expected)
            assert times.max(initial=0) <= 1


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_i7_bad_block_tables_and_ranges_raise_before_anything_is_planned(data: st.DataObject) -> None:
    model = data.draw(models())
    source = build_engine("source", model, data.draw(caches(model)))
    target = build_engine("target", model, data.draw(caches(model)))
    here, there = source.ranks[0], target.ranks[0]
    plan = PairPlan(here.profile.geometry, here.segments, there.profile.geometry, there.segments)
    used = {view.group for view in there.profile.geometry.views}
    group = data.draw(st.sampled_from(sorted(used)))
    victim = target.tables[group]
    kind = data.draw(st.sampled_from(["id", "short", "late", "range", "tables", "huge"]))
    tables, start, end = list(target.tables), 0, model.tokens
    if kind == "id":
        bad = victim.ids.copy()
        bad[-1] = data.draw(st.integers(there.profile.geometry.num_blocks, 2**32 - 1))
        tables[group] = BlockTable(0, bad)
    elif kind == "short":
        tables[group] = BlockTable(0, victim.ids[:-1])
    elif kind == "late":
        last = (model.tokens - 1) // there.profile.geometry.groups[group].block_tokens
        tables[group] = BlockTable(data.draw(st.integers(last + 1, 2**64)), victim.ids)
    elif kind == "range":
        start, end = data.draw(st.sampled_from([(-1, model.tokens), (model.tokens, 0)]))
    elif kind == "tables":
        tables = tables[:-1]
    else:
        end = data.draw(st.integers(2**33, 2**64))
    with pytest.raises(TransferError):
        plan.runs(source.tables, tables, start, end)
