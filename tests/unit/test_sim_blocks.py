"""The block pool: counting, prefix hits, and the moments at which blocks lose their content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.sim.blocks import BlockPool
from kvflow.sim.contract import SimContractError


def test_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    blocks = pool.allocate(4)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    pool.free(blocks)
    assert pool.used == 0


def test_freeing_twice_is_a_contract_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(SimContractError, match="nobody holds"):
        pool.free(blocks)


def test_cached_blocks_are_found_shared_and_evicted_last() -> None:
    emptied: list[int] = []
    pool = BlockPool(3, on_empty=emptied.extend)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.remember(blocks[0], 111)
    pool.free(blocks)
    assert emptied == [blocks[1]]
    assert pool.find([111, 222]) == [blocks[0]]
    assert pool.find([111]) == [blocks[0]]
    pool.free([blocks[0]])
    assert pool.used == 1
    pool.free([blocks[0]])
    assert pool.used == 0
    assert pool.allocate(3) is not None
    assert emptied == [blocks[1], blocks[0]]
    assert pool.find([111]) == []


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, caching=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.remember(blocks[0], 5)
    pool.free(blocks)
    assert pool.find([5]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free", "find", "drop"]), st.integers(0, 9)), max_size=60))
def test_blocks_are_never_lost_nor_handed_out_twice(actions: list[tuple[str, int]]) -> None:
    empty: set[int] = set(range(8))
    pool = BlockPool(8, on_empty=empty.update, on_take=empty.difference_update)
    held: list[list[int]] = []
    content: dict[int, int] = {}
    for action, number in actions:
        if action == "take":
            blocks = pool.allocate(number)
            if blocks is not None:
                assert not {b for own in held for b in own} & set(blocks)
                for block in blocks:
                    pool.remember(block, number)
                    content[block] = number
                held.append(blocks)
        elif action == "free" and held:
            pool.free(held.pop(number % len(held)))
        elif action == "find":
            found = pool.find([number])
            assert all(content[block] == number and block not in empty for block in found)
            held.append(found)
        elif action == "drop":
            pool.drop_cached()
        assert pool.used == len({b for own in held for b in own})
        assert set(pool.unheld()) == empty
    for own in held:
        pool.free(own)
    assert pool.used == 0
