"""The block tables of one source attempt, grown by deltas that name their position."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import TransferError, WireError
from kvflow.messages import unpack_blocks

# No table of a real engine comes near: 1 Mi blocks of 16 tokens are a prompt of 16 Mi tokens.
MAX_ENTRIES = 1 << 20


class BlockTables:
    """Hold one growing table of block ids per KV cache group.

    Views that `snapshot` returned stay valid and unchanged while the tables grow: entries are only ever appended.
    """

    def __init__(self, block_tokens: Sequence[int], num_blocks: int) -> None:
        self._block_tokens = tuple(block_tokens)
        self._num_blocks = num_blocks
        self._entries = [np.empty(0, dtype=np.uint32) for _ in self._block_tokens]
        self._used = [0] * len(self._block_tokens)

    @property
    def covered_tokens(self) -> int:
        """Return the number of tokens whose blocks are known in every group."""
        return min((n * tokens for n, tokens in zip(self._used, self._block_tokens, strict=True)), default=0)

    @property
    def granule(self) -> int:
        """Return the number of tokens that is a whole number of blocks in every group."""
        return math.lcm(*self._block_tokens)

    def extend(self, first_blocks: Sequence[int], blocks: Sequence[bytes]) -> None:
        """Append one delta per group, taking what is already known only when it is equal.

        Raises TransferError for a gap, for entries that differ from known ones and for ids out of range. After an
        error the tables must not be used.
        """
        if not len(first_blocks) == len(blocks) == len(self._block_tokens):
            raise TransferError(
                f"block tables for {len(blocks)} groups at {len(first_blocks)} positions, "
                f"but this rank has {len(self._block_tokens)} groups"
            )
        for group, (first, packed) in enumerate(zip(first_blocks, blocks, strict=True)):
            try:
                ids = unpack_blocks(packed)
            except WireError as error:
                raise TransferError(f"group {group}: {error}") from error
            self._extend_group(group, first, ids)

    def _extend_group(self, group: int, first: int, ids: NDArray[np.uint32]) -> None:
        used = self._used[group]
        if not 0 <= first <= used:
            raise TransferError(f"group {group}: block table continues at position {first}, but {used} are known")
        if first + len(ids) > MAX_ENTRIES:
            raise TransferError(f"group {group}: block table of {first + len(ids)} entries exceeds {MAX_ENTRIES}")
        if len(ids) and int(ids.max()) >= self._num_blocks:
            raise TransferError(f"group {group}: block {int(ids.max())} of {self._num_blocks} does not exist")
        known = min(used - first, len(ids))
        if not np.array_equal(self._entries[group][first : first + known], ids[:known]):
            raise TransferError(f"group {group}: block table differs from what is known at {first}..{first + known}")
        fresh = ids[known:]
        if len(fresh):
            self._append(group, used, fresh)

    def _append(self, group: int, used: int, fresh: NDArray[np.uint32]) -> None:
        needed = used + len(fresh)
        if needed > len(self._entries[group]):
            grown = np.empty(max(needed, 2 * len(self._entries[group]), 64), dtype=np.uint32)
            grown[:used] = self._entries[group][:used]
            self._entries[group] = grown
        self._entries[group][used:needed] = fresh
        self._used[group] = needed

    def snapshot(self) -> tuple[NDArray[np.uint32], ...]:
        """Return the tables as they are now, without copying them."""
        return tuple(entries[:used] for entries, used in zip(self._entries, self._used, strict=True))
