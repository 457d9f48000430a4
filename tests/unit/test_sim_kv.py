"""The fake KV: every byte is checked, wherever the layout puts it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.errors import ConfigError
from kvflow.sim.kv import GUARD_BYTE, FakeKv, PrefixHashes
from kvflow.sim.layout import RankShare, SimLayout

PROMPT = [7, 7, 7, 12, 500, 3, 3, 9, 1, 0, 2, 2, 44]
BLOCKS = [5, 1, 8, 0]


def layout(**changes: object) -> SimLayout:
    base: dict[str, object] = {"layers": 4, "heads": 4, "head_bytes": 16, "block_tokens": 4, "blocks": 10}
    return SimLayout(**(base | changes))  # type: ignore[arg-type]


def rank_cache(share: RankShare) -> tuple[FakeKv, NDArray[np.uint8]]:
    memory = np.zeros(share.total_bytes, dtype=np.uint8)
    cache = FakeKv(share, memory)
    cache.guard_all()
    return cache, memory


def rows(share: RankShare, memory: NDArray[np.uint8], token: int) -> dict[tuple[str, str, int], bytes]:
    """Read one token's rows by the announced geometry alone."""
    found = {}
    for view in share.geometry().views:
        for head in range(view.heads):
            start = (
                view.offset
                + BLOCKS[token // view.block_tokens] * view.block_stride
                + head * view.head_stride
                + token % view.block_tokens * view.token_stride
            )
            found[view.layer, view.part, view.head_start + head] = memory[start : start + view.row_bytes].tobytes()
    return found


def model_rows(shape: SimLayout, token: int) -> dict[tuple[str, int], bytes]:
    """Write the prompt on every rank, and read one token's K and V of all layers and heads through the geometries."""
    merged: dict[tuple[str, int], bytes] = {}
    hashes = PrefixHashes(PROMPT).values
    for rank in range(shape.ranks):
        share = shape.share(rank)
        cache, memory = rank_cache(share)
        cache.write(hashes, BLOCKS, 0, len(PROMPT))
        found = rows(share, memory, token)
        for layer, _, head in found:
            packed = found.get((layer, "kv", head))
            merged[layer, head] = packed if packed is not None else found[layer, "k", head] + found[layer, "v", head]
    return merged


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 4)])
def test_every_layout_holds_the_same_words(order: str, packed: bool, tp_size: int, pp_size: int) -> None:
    plain = model_rows(layout(), token=6)
    assert len(plain) == 16
    assert model_rows(layout(order=order, packed=packed, tp_size=tp_size, pp_size=pp_size), token=6) == plain


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("packed", [True, False])
def test_views_cover_the_memory_without_overlap(order: str, packed: bool) -> None:
    share = layout(order=order, packed=packed, tp_size=2).share(1)
    touched = np.zeros(share.total_bytes, dtype=np.uint8)
    for view in share.geometry().views:
        grid = (
            view.offset
            + np.arange(view.blocks)[:, None, None, None] * view.block_stride
            + np.arange(view.heads)[:, None, None] * view.head_stride
            + np.arange(view.block_tokens)[:, None] * view.token_stride
            + np.arange(view.row_bytes)
        )
        np.add.at(touched, grid.ravel(), 1)
    assert (touched == 1).all()


def test_i5_one_wrong_byte_anywhere_is_counted() -> None:
    share = layout().share(0)
    cache, memory = rank_cache(share)
    hashes = PrefixHashes(PROMPT).values
    cache.write(hashes, BLOCKS, 0, len(PROMPT))
    clean = cache.check(hashes, BLOCKS, 0, len(PROMPT))
    assert clean.checked == len(PROMPT) * 4 * 4 * 32
    assert clean.mismatched == 0
    used = np.flatnonzero(memory != GUARD_BYTE)
    for place in np.random.default_rng(1).choice(used, 50):
        memory[place] ^= 0x10
        assert cache.check(hashes, BLOCKS, 0, len(PROMPT)).mismatched == 1
        memory[place] ^= 0x10


def test_i6_tokens_in_swapped_places_are_wrong_in_nearly_every_byte() -> None:
    share = layout().share(0)
    cache, _ = rank_cache(share)
    hashes = PrefixHashes(PROMPT).values
    cache.write(hashes, BLOCKS, 0, len(PROMPT))
    swapped = [BLOCKS[1], BLOCKS[0], *BLOCKS[2:]]
    check = cache.check(hashes, swapped, 0, 8)
    assert check.mismatched > 0.95 * check.checked


def test_a_prompt_that_differs_early_differs_ever_after() -> None:
    other = [PROMPT[0] + 1, *PROMPT[1:]]
    assert not np.isin(PrefixHashes(PROMPT).values, PrefixHashes(other).values).any()
    exchanged = [PROMPT[3], *PROMPT[1:3], PROMPT[0], *PROMPT[4:]]
    assert PrefixHashes(PROMPT).at(6) != PrefixHashes(exchanged).at(6)


def test_hashes_do_not_depend_on_how_the_prompt_was_cut() -> None:
    grown = PrefixHashes(PROMPT[:1])
    for token in PROMPT[1:]:
        grown.extend([token])
    assert (grown.values == PrefixHashes(PROMPT).values).all()
    assert len(grown) == len(PROMPT)


def test_a_write_changes_nothing_outside_its_tokens() -> None:
    share = layout(order="NHD").share(0)
    cache, memory = rank_cache(share)
    hashes = PrefixHashes(PROMPT).values
    cache.write(hashes, BLOCKS, 2, 9)
    assert cache.check_tail(BLOCKS, 9).stray == 0
    assert cache.check_guard([b for b in range(10) if b not in BLOCKS[:3]]).stray == 0
    written = 7 * 4 * 4 * 32
    assert written * 0.98 < np.count_nonzero(memory != GUARD_BYTE) <= written


def test_stray_bytes_are_counted_and_guarding_restores() -> None:
    share = layout().share(0)
    cache, memory = rank_cache(share)
    memory[3] = 0
    assert cache.check_guard([0]).stray == 1
    cache.guard_blocks([0])
    assert cache.check_guard(range(10)).stray == 0


def test_a_cache_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads"):
        layout(tp_size=3).share(0)
    with pytest.raises(ConfigError, match="stages"):
        layout(pp_size=3).share(0)
    with pytest.raises(ConfigError, match="rank 2"):
        layout(tp_size=2).share(2)
