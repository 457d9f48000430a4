"""Content-addressed fake KV: every byte of a cache follows from the tokens before it, so any byte can be checked.

The word of (token position, array, head, lane) mixes the hash of all tokens up to that position with a constant of the
array, head and lane. Two prompts that differ anywhere before a position differ in (nearly) every byte at that position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.sim.layout import WORD_BYTES, RankShare

Words = NDArray[np.uint64]

GUARD_BYTE = 0xA5
_GUARD_WORD = np.uint64(int.from_bytes(bytes([GUARD_BYTE]) * WORD_BYTES, "little"))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
# Tokens that one pass writes or checks: bounds the temporary arrays whatever the length of the prompt.
_CHUNK_TOKENS = 512


def mix(values: Words) -> Words:
    """Scramble 64-bit words so that every output bit depends on every input bit."""
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


class PrefixHashes:
    """Hash every prefix of a growing token sequence; `values[t]` stands for tokens 0..t."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._values: Words = np.empty(0, dtype=np.uint64)
        self._sum = np.uint64(0)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if not len(tokens):
            return
        start = len(self._values)
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        # A running sum of (position, token) hashes names a prefix, and needs no Python loop.
        items = mix(np.asarray(tokens, dtype=np.uint64) ^ mix(positions))
        sums = np.cumsum(items, dtype=np.uint64) + self._sum
        self._sum = sums[-1]
        self._values = np.concatenate([self._values, mix(sums)])

    @property
    def values(self) -> Words:
        """Return one hash per position."""
        return self._values

    def at(self, position: int) -> int:
        """Return the hash of tokens 0..position."""
        return int(self._values[position])

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class KvCheck:
    """Count bytes: compared with what they should be, different from it, and written where nothing belongs."""

    checked: int = 0
    mismatched: int = 0
    stray: int = 0

    def add(self, other: "KvCheck") -> None:
        """Add another count to this one."""
        self.checked += other.checked
        self.mismatched += other.mismatched
        self.stray += other.stray


class FakeKv:
    """Write and check one rank's cache. `memory` are its `share.total_bytes` bytes, writable."""

    def __init__(self, share: RankShare, memory: NDArray[np.uint8]) -> None:
        self.share = share
        array: Words = memory.view(np.uint64).reshape(share.shape)
        # One order of dimensions for all layouts: array, block, head, token, lane.
        self._cache: Words | None = array if share.layout.order == "HND" else array.transpose(0, 1, 3, 2, 4)
        self._constants = _lane_constants(share)
        self._tokens = share.layout.block_tokens

    def close(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self._cache = None

    @property
    def cache(self) -> Words:
        """Return the cache as words of shape (arrays, blocks, heads, block tokens, lanes)."""
        if self._cache is None:
            raise ValueError("the cache has been closed")
        return self._cache

    def guard_all(self) -> None:
        """Fill the whole cache with the guard pattern."""
        self.cache[...] = _GUARD_WORD

    def guard_blocks(self, blocks: Sequence[int]) -> None:
        """Fill blocks with the guard pattern."""
        if blocks:
            self.cache[:, np.asarray(blocks)] = _GUARD_WORD

    def write(self, hashes: Words, blocks: Sequence[int], start: int, end: int) -> None:
        """Compute the KV of token positions [start, end) of a request that owns `blocks`."""
        table = np.asarray(blocks, dtype=np.int64)
        for first in range(start, end, _CHUNK_TOKENS):
            positions = np.arange(first, min(end, first + _CHUNK_TOKENS))
            rows = table[positions // self._tokens], positions % self._tokens
            self.cache[:, rows[0], :, rows[1], :] = self._expected(hashes[positions])

    def check(self, hashes: Words, blocks: Sequence[int], start: int, end: int) -> KvCheck:
        """Compare every byte of token positions [start, end) with what it should be."""
        table = np.asarray(blocks, dtype=np.int64)
        result = KvCheck()
        for first in range(start, end, _CHUNK_TOKENS):
            positions = np.arange(first, min(end, first + _CHUNK_TOKENS))
            found = self.cache[:, table[positions // self._tokens], :, positions % self._tokens, :]
            difference = found ^ self._expected(hashes[positions])
            result.checked += difference.nbytes
            if difference.any():
                result.mismatched += int(np.count_nonzero(difference.view(np.uint8)))
        return result

    def check_tail(self, blocks: Sequence[int], end: int) -> KvCheck:
        """Count the bytes at token positions from `end` to the end of the last block that are not the guard pattern."""
        table = np.asarray(blocks, dtype=np.int64)
        positions = np.arange(end, len(table) * self._tokens)
        found = self.cache[:, table[positions // self._tokens], :, positions % self._tokens, :]
        return _stray(found)

    def check_guard(self, blocks: Sequence[int]) -> KvCheck:
        """Count the bytes of whole blocks that are not the guard pattern."""
        total = KvCheck()
        for first in range(0, len(blocks), 32):
            total.add(_stray(self.cache[:, np.asarray(blocks[first : first + 32])]))
        return total

    def _expected(self, hashes: Words) -> Words:
        # Shape (tokens, arrays, heads, lanes): where numpy puts the two index arrays of `write` and `check`.
        words = hashes[:, None, None, None] ^ self._constants[None]
        words *= _FIRST
        words ^= words >> np.uint64(32)
        return words


def _stray(found: Words) -> KvCheck:
    difference = found ^ _GUARD_WORD
    stray = int(np.count_nonzero(np.ascontiguousarray(difference).view(np.uint8))) if difference.any() else 0
    return KvCheck(checked=difference.nbytes, stray=stray)


def _lane_constants(share: RankShare) -> Words:
    """Draw a constant for each (layer and part, head, lane) by its place in the whole model, not on this rank.

    A packed row is K's lanes and then V's, and a separate pair of arrays is the same lanes cut in two, so that engines
    with different layouts agree on every word.
    """
    lanes = share.layout.head_bytes // WORD_BYTES
    layers = np.arange(share.layer_start, share.layer_start + share.layers, dtype=np.uint64)
    heads = np.arange(share.head_start, share.head_start + share.heads, dtype=np.uint64)
    lane = np.arange(2 * lanes, dtype=np.uint64)
    number = (layers[:, None, None] << np.uint64(40)) | (heads[None, :, None] << np.uint64(20)) | lane[None, None, :]
    constants = mix(mix(number))
    if not share.layout.packed:
        halves = constants.reshape(share.layers, share.heads, 2, lanes).transpose(0, 2, 1, 3)
        constants = np.ascontiguousarray(halves).reshape(share.layers * 2, share.heads, lanes)
    return constants
