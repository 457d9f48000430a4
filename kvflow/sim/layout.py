"""Describe the paged cache of a simulated engine, and cut it into the shares of its ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from kvflow.errors import ConfigError
from kvflow.messages import KvGeometry, KvGroup, KvView, ModelFingerprint

WORD_BYTES = 8

Count = Annotated[int, msgspec.Meta(ge=1)]


class SimLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the shape of a simulated model's cache; `head_bytes` are the bytes of one K (or V) row of one head.

    `order` HND keeps a head's tokens together, NHD a token's heads. `packed` puts K and V of a head side by side in one
    row, else each has an array of its own. More TP ranks than heads replicate heads, as grouped-query models do.
    """

    layers: Count = 8
    heads: Count = 2
    head_bytes: Annotated[int, msgspec.Meta(ge=WORD_BYTES, multiple_of=WORD_BYTES)] = 64
    block_tokens: Count = 32
    blocks: Count = 512
    order: Literal["HND", "NHD"] = "HND"
    packed: bool = True
    tp_size: Count = 1
    pp_size: Count = 1
    model: str = "simulated"

    @property
    def ranks(self) -> int:
        """Return the number of workers."""
        return self.tp_size * self.pp_size

    def fingerprint(self) -> ModelFingerprint:
        """Return what two engines must share for their bytes to mean the same."""
        fields = {
            "model": self.model, "layers": str(self.layers), "heads": str(self.heads),
            "head_bytes": str(self.head_bytes), "kv_dtype": "uint8",
        }  # fmt: skip
        return ModelFingerprint(fields=tuple(sorted(fields.items())))

    def share(self, rank: int) -> "RankShare":
        """Return what one rank holds; raise ConfigError when the cache does not divide."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"rank {rank} does not exist among {self.ranks}")
        if self.layers % self.pp_size:
            raise ConfigError(f"{self.layers} layers do not divide over {self.pp_size} stages")
        if max(self.heads, self.tp_size) % min(self.heads, self.tp_size):
            raise ConfigError(f"{self.heads} heads do not divide over {self.tp_size} ranks")
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        layers = self.layers // self.pp_size
        return RankShare(
            layout=self, rank=rank, tp_rank=tp_rank, pp_rank=pp_rank,
            layer_start=pp_rank * layers, layers=layers,
            head_start=tp_rank * self.heads // self.tp_size, heads=max(1, self.heads // self.tp_size),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankShare:
    """Hold one rank's part of the cache: some layers, some heads, all tokens."""

    layout: SimLayout
    rank: int
    tp_rank: int
    pp_rank: int
    layer_start: int
    layers: int
    head_start: int
    heads: int

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the arrays of one layer."""
        return ("kv",) if self.layout.packed else ("k", "v")

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token and head in one array."""
        return self.layout.head_bytes * (2 if self.layout.packed else 1)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape in memory, in words: arrays, blocks, then heads and tokens in the layout's order, row."""
        inner = (self.heads, self.layout.block_tokens)
        if self.layout.order == "NHD":
            inner = (inner[1], inner[0])
        return (self.layers * len(self.parts), self.layout.blocks, *inner, self.row_bytes // WORD_BYTES)

    @property
    def total_bytes(self) -> int:
        """Return the size of this rank's cache."""
        arrays, blocks, first, second, words = self.shape
        return arrays * blocks * first * second * words * WORD_BYTES

    def geometry(self) -> KvGeometry:
        """Return the geometry that the rank announces: one group, one segment, a view per layer and part."""
        row, tokens = self.row_bytes, self.layout.block_tokens
        hnd = self.layout.order == "HND"
        block_stride = row * tokens * self.heads
        views = [
            KvView(
                layer=f"layers.{self.layer_start + layer}", part=part, group=0, segment=0,
                offset=(layer * len(self.parts) + number) * self.layout.blocks * block_stride,
                blocks=self.layout.blocks, block_tokens=tokens, heads=self.heads, head_start=self.head_start,
                total_heads=self.layout.heads, row_bytes=row, block_stride=block_stride,
                head_stride=row * tokens if hnd else row, token_stride=row if hnd else row * self.heads,
            )
            for layer in range(self.layers)
            for number, part in enumerate(self.parts)
        ]  # fmt: skip
        groups = (KvGroup(block_tokens=tokens),)
        return KvGeometry(dtype="uint8", num_blocks=self.layout.blocks, groups=groups, views=tuple(views))
