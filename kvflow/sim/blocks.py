"""Hand out cache blocks, count their users, and remember the content of freed ones for prefix hits."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvflow.sim.contract import SimContractError


class BlockPool:
    """Count references to blocks. A cached block whose count falls to zero stays findable until it is needed.

    With `caching` off no block is ever found again. `on_empty` is called with blocks that have just lost their content,
    before anybody can get them again; `on_take` with empty blocks that are about to be handed out.
    """

    def __init__(
        self,
        blocks: int,
        *,
        caching: bool = True,
        on_empty: Callable[[Sequence[int]], None] | None = None,
        on_take: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.size = blocks
        self._caching = caching
        self._on_empty = on_empty
        self._on_take = on_take
        self._users = [0] * blocks
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        # Oldest first. Freed blocks are reused last-in first-out among the uncached, so that a late WRITE into a freed
        # block soon meets another request's data: that is the fault the simulation must show.
        self._free: list[int] = list(range(blocks - 1, -1, -1))
        self._cached_free: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Return how many blocks can be allocated now."""
        return len(self._free) + len(self._cached_free)

    @property
    def used(self) -> int:
        """Return how many blocks requests hold."""
        return self.size - self.available

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, dropping cached content when needed; None when there are too few."""
        if count > self.available:
            return None
        missing = count - len(self._free)
        if missing > 0:
            self._evict(missing)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        if self._on_take is not None and taken:
            self._on_take(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block; raise SimContractError when one has none."""
        emptied: list[int] = []
        for block in blocks:
            if self._users[block] <= 0:
                raise SimContractError(f"block {block} is freed but nobody holds it")
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._hash_of:
                self._cached_free[block] = None
            else:
                emptied.append(block)
        self._empty(emptied)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest run of block hashes, taking one use of each."""
        found: list[int] = []
        for value in hashes if self._caching else ():
            block = self._block_of.get(value)
            if block is None:
                break
            self._cached_free.pop(block, None)
            self._users[block] += 1
            found.append(block)
        return found

    def remember(self, block: int, value: int) -> None:
        """Make a full block findable by its hash, unless its content is known already."""
        if self._caching and value not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = value
            self._block_of[value] = block

    def drop_cached(self) -> None:
        """Forget the content of all blocks that nobody holds."""
        self._evict(len(self._cached_free))

    def unheld(self) -> list[int]:
        """Return the blocks that nobody holds and that hold nothing."""
        return list(self._free)

    def _evict(self, count: int) -> None:
        blocks = [self._cached_free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            del self._block_of[self._hash_of.pop(block)]
        self._empty(blocks)

    def _empty(self, blocks: list[int]) -> None:
        if self._on_empty is not None and blocks:
            self._on_empty(blocks)
        self._free.extend(blocks)
