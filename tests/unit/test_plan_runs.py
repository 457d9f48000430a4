"""How few runs the planner needs for the layouts that matter."""

import msgspec
import numpy as np
import pytest

from kvflow.dataplane.plan import BlockTable, PairPlan
from kvflow.errors import PeerError, TransferError
from kvflow.messages import KvGeometry, KvGroup, KvSegment, KvView

LAYERS, BLOCKS, TOKENS, HEADS, ROW = 4, 32, 8, 2, 16
BLOCK_BYTES = TOKENS * HEADS * ROW


def cache(*, together: bool = False, token_major: bool = False, window: int = 0, atom_tokens: int = 1) -> KvGeometry:
    """Return a cache with one array per layer, or with all layers of a block together."""
    views = tuple(
        KvView(
            layer=f"l{layer}", part="kv", group=0, segment=0,
            offset=layer * BLOCK_BYTES * (1 if together else BLOCKS),
            blocks=BLOCKS, block_tokens=TOKENS, heads=HEADS, head_start=0, total_heads=HEADS, row_bytes=ROW,
            block_stride=BLOCK_BYTES * (LAYERS if together else 1),
            head_stride=ROW if token_major else TOKENS * ROW, token_stride=HEADS * ROW if token_major else ROW,
            atom_tokens=atom_tokens,
        )
        for layer in range(LAYERS)
    )  # fmt: skip
    group = KvGroup(block_tokens=TOKENS, kind="window" if window else "full", window_tokens=window)
    return KvGeometry(dtype="bf16", num_blocks=BLOCKS, groups=(group,), views=views)


def transposed(*, tokens: int = TOKENS) -> KvGeometry:
    """Return a cache whose blocks hold, for each head, all keys transposed and then all values."""
    half, blocks = ROW // 2, BLOCKS * TOKENS // tokens
    views = []
    for layer in range(LAYERS):
        start = layer * BLOCKS * BLOCK_BYTES
        common = KvView(
            layer=f"l{layer}", part="k", group=0, segment=0, offset=start, blocks=blocks, block_tokens=tokens,
            heads=HEADS, head_start=0, total_heads=HEADS, row_bytes=2, block_stride=tokens * HEADS * ROW,
            head_stride=tokens * ROW, token_stride=2, channels=half // 2, channel_stride=tokens * 2,
        )  # fmt: skip
        value = msgspec.structs.replace(
            common, part="v", offset=start + half * tokens, row_bytes=half, token_stride=half, channels=1,
            channel_stride=0,
        )  # fmt: skip
        views += [common, value]
    return KvGeometry(dtype="bf16", num_blocks=blocks, groups=(KvGroup(block_tokens=tokens),), views=tuple(views))


SEGMENTS = (KvSegment(address=1 << 20, length=LAYERS * BLOCKS * BLOCK_BYTES),)


def table(*ids: int, first: int = 0) -> list[BlockTable]:
    return [BlockTable(first, np.array(ids, dtype=np.uint32))]


def plan(source: KvGeometry, target: KvGeometry) -> PairPlan:
    return PairPlan(source, SEGMENTS, target, SEGMENTS)


def test_one_run_per_layer_and_stretch_of_block_pairs() -> None:
    runs = plan(cache(), cache()).runs(table(3, 4, 5, 9), table(7, 8, 9, 1), 0, 4 * TOKENS)
    assert sorted(runs.length.tolist()) == [BLOCK_BYTES] * LAYERS + [3 * BLOCK_BYTES] * LAYERS
    assert runs.total_bytes == 4 * LAYERS * BLOCK_BYTES


def test_tables_that_run_downwards_merge_as_well() -> None:
    runs = plan(cache(), cache()).runs(table(9, 8, 7), table(20, 19, 18), 0, 3 * TOKENS)
    assert runs.length.tolist() == [3 * BLOCK_BYTES] * LAYERS


def test_a_stretch_on_one_side_only_does_not_merge() -> None:
    runs = plan(cache(), cache()).runs(table(1, 2), table(5, 9), 0, 2 * TOKENS)
    assert runs.length.tolist() == [BLOCK_BYTES] * LAYERS * 2


def test_layers_that_are_stored_together_are_one_run_per_block() -> None:
    together = cache(together=True)
    runs = plan(together, together).runs(table(1, 2, 9), table(5, 6, 3), 0, 3 * TOKENS)
    assert sorted(runs.length.tolist()) == [LAYERS * BLOCK_BYTES, 2 * LAYERS * BLOCK_BYTES]


def test_layers_together_on_one_side_only_are_one_run_each() -> None:
    runs = plan(cache(together=True), cache()).runs(table(1, 2), table(5, 6), 0, 2 * TOKENS)
    assert runs.length.tolist() == [BLOCK_BYTES] * LAYERS * 2


def test_views_in_neighbouring_segments_are_never_one_run() -> None:
    base = cache().views[0]
    views = tuple(
        msgspec.structs.replace(base, layer=f"l{layer}", segment=layer, offset=0, blocks=1) for layer in range(2)
    )
    single = KvGeometry(dtype="bf16", num_blocks=1, groups=(KvGroup(block_tokens=TOKENS),), views=views)
    segments = [KvSegment(address=4096 + layer * BLOCK_BYTES, length=BLOCK_BYTES) for layer in range(2)]
    runs = PairPlan(single, segments, single, segments).runs(table(0), table(0), 0, TOKENS)
    assert runs.length.tolist() == [BLOCK_BYTES] * 2


def test_a_partial_block_is_one_run_per_head_or_one_when_tokens_are_outside() -> None:
    runs = plan(cache(), cache()).runs(table(1), table(2), 3, 5)
    assert runs.length.tolist() == [2 * ROW] * LAYERS * HEADS
    token_major = cache(token_major=True)
    runs = plan(token_major, token_major).runs(table(1), table(2), 3, 5)
    assert runs.length.tolist() == [2 * ROW * HEADS] * LAYERS


def test_heads_inside_against_heads_outside_is_row_by_row() -> None:
    runs = plan(cache(), cache(token_major=True)).runs(table(1), table(2), 0, TOKENS)
    assert runs.length.tolist() == [ROW] * LAYERS * HEADS * TOKENS


def test_whole_blocks_of_keys_and_values_that_lie_side_by_side_are_one_run() -> None:
    runs = plan(transposed(), transposed()).runs(table(3, 4, 9), table(7, 8, 1), 0, 3 * TOKENS)
    assert sorted(runs.length.tolist()) == [BLOCK_BYTES] * LAYERS + [2 * BLOCK_BYTES] * LAYERS


def test_part_of_a_block_is_one_run_per_channel_and_stretch_of_tokens() -> None:
    channels, half = ROW // 4, ROW // 2
    runs = plan(transposed(), transposed()).runs(table(3), table(7), 2, 5)
    assert sorted(runs.length.tolist()) == [3 * 2] * LAYERS * HEADS * channels + [3 * half] * LAYERS * HEADS
    runs = plan(transposed(), transposed(tokens=TOKENS // 2)).runs(table(3), table(7, 8), 0, TOKENS)
    assert sorted(runs.length.tolist())[: LAYERS * HEADS * channels * 2] == [TOKENS] * LAYERS * HEADS * channels * 2


def test_transposed_keys_against_packed_rows_go_by_element() -> None:
    runs = plan(transposed(), cache()).runs(table(3), table(7), 0, 1)
    assert sorted(runs.length.tolist()) == [2] * LAYERS * HEADS * (ROW // 4) + [ROW // 2] * LAYERS * HEADS


def test_i6_blocks_are_paired_by_position() -> None:
    source, target = table(10, 11, 12, 13), table(20, 21, first=2)
    runs = plan(cache(), cache()).runs(source, target, 2 * TOKENS, 4 * TOKENS)
    base = SEGMENTS[0].address
    assert int(runs.local[0]) == base + 12 * BLOCK_BYTES
    assert int(runs.remote[0]) == base + 20 * BLOCK_BYTES
    with pytest.raises(TransferError, match="the table holds 2 from 2"):
        plan(cache(), cache()).runs(source, target, TOKENS, 4 * TOKENS)


def test_a_window_needs_only_its_last_blocks_whatever_the_piece() -> None:
    window = cache(window=5)
    pair = plan(window, window)
    assert len(pair.runs(table(1, 2), table(3, 4), 0, TOKENS, range_end=2 * TOKENS)) == 0
    runs = pair.runs(table(1, 2), table(3, 4), 0, 2 * TOKENS, range_end=2 * TOKENS)
    assert runs.length.tolist() == [BLOCK_BYTES] * LAYERS
    # The blocks before the window may be gone on both sides.
    assert len(pair.runs(table(2, first=1), table(4, first=1), 0, 2 * TOKENS)) == len(runs)
    # One token more and the window reaches into the block before.
    assert len(pair.runs(table(1, 2), table(3, 9), 0, TOKENS + 4)) > len(runs)


def test_an_empty_range_needs_nothing() -> None:
    runs = plan(cache(), cache()).runs(table(), table(), 5, 5)
    assert len(runs) == 0
    assert runs.total_bytes == 0


def test_a_share_limits_what_is_written() -> None:
    share = {(f"l{layer}", "kv"): ((1, 2),) for layer in range(2)}
    pair = PairPlan(cache(), SEGMENTS, cache(), SEGMENTS, share=share)
    runs = pair.runs(table(1), table(2), 0, TOKENS)
    assert runs.length.tolist() == [TOKENS * ROW] * 2


def test_caches_without_a_common_layer_are_refused() -> None:
    with pytest.raises(PeerError, match="nothing that the target"):
        PairPlan(cache(), SEGMENTS, cache(), SEGMENTS, share={})


def test_windows_that_differ_are_refused() -> None:
    with pytest.raises(PeerError, match="window 5"):
        plan(cache(window=5), cache())


def test_i6_the_last_atom_is_copied_whole_and_nothing_beyond_it() -> None:
    atoms = cache(atom_tokens=TOKENS // 2)
    pair = plan(atoms, atoms)
    assert pair.runs(table(1, 2), table(5, 9), 0, TOKENS + 1).total_bytes == LAYERS * BLOCK_BYTES * 3 // 2
    assert pair.runs(table(1, 2), table(5, 9), TOKENS, TOKENS + TOKENS // 2).total_bytes == LAYERS * BLOCK_BYTES // 2
    assert pair.runs(table(1), table(5), 0, 0).total_bytes == 0


def test_i6_a_range_that_begins_inside_an_atom_is_refused() -> None:
    atoms = cache(atom_tokens=TOKENS)
    with pytest.raises(TransferError, match="inside an atom of 8 tokens"):
        plan(atoms, atoms).runs(table(1), table(5), 1, TOKENS)


def test_caches_of_different_atoms_cannot_be_matched() -> None:
    with pytest.raises(PeerError):
        plan(cache(atom_tokens=TOKENS), cache())
