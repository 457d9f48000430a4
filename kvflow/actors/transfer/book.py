"""What a transfer actor keeps: sources, bindings, pieces in flight, peers, and a bounded memory of ended keys."""

from collections import OrderedDict
from typing import TypeVar

from kvflow.actors.transfer.model import (
    Binding,
    BindingKey,
    Ended,
    Lane,
    Limits,
    PeerUnknown,
    Piece,
    RankReport,
    Source,
    SourceKey,
)
from kvflow.messages import EngineRef, KvGeometry

K = TypeVar("K")


class TransferState:
    """Hold the state of one source rank's transfer actor; the reducer in `state.py` is its only writer."""

    def __init__(self, me: EngineRef, rank: int, geometry: KvGeometry, limits: Limits | None = None) -> None:
        self.me = me
        self.rank = rank
        self.limits = limits or Limits()
        self.block_tokens = tuple(group.block_tokens for group in geometry.groups)
        self.num_blocks = geometry.num_blocks
        self.sources: dict[SourceKey, Source] = {}
        self.bindings: dict[BindingKey, Binding] = {}
        self.by_source: dict[SourceKey, dict[BindingKey, None]] = {}
        self.by_target: dict[EngineRef, dict[BindingKey, None]] = {}
        self.pieces: dict[int, Piece] = {}
        # None while the driver looks for the engine.
        self.peers: dict[EngineRef, tuple[Lane, ...] | None] = {}
        self.refused: dict[EngineRef, PeerUnknown] = {}
        self.ended_sources: OrderedDict[SourceKey, float] = OrderedDict()
        self.ended_bindings: OrderedDict[BindingKey, Ended] = OrderedDict()
        self.ignored = 0
        self._next_piece = 0

    @property
    def live(self) -> bool:
        """Return whether anything is kept that time will change: without it, ticks are not needed."""
        return bool(self.sources or self.bindings or self.ended_sources or self.ended_bindings)

    def new_piece(self, piece: Piece) -> int:
        """Draw a number for a piece and remember it as in flight."""
        self._next_piece += 1
        self.pieces[self._next_piece] = piece
        return self._next_piece

    def add_binding(self, binding: Binding) -> None:
        """Keep a binding and index it."""
        self.bindings[binding.key] = binding
        self.by_source.setdefault(binding.source_key, {})[binding.key] = None
        self.by_target.setdefault(binding.message.target, {})[binding.key] = None

    def end_binding(self, binding: Binding, report: RankReport | None, now: float) -> None:
        """Forget a binding, remembering for a while how it ended."""
        del self.bindings[binding.key]
        _unindex(self.by_source, binding.source_key, binding.key)
        _unindex(self.by_target, binding.message.target, binding.key)
        self.remember(binding.key, report, now)

    def remember(self, key: BindingKey, report: RankReport | None, now: float) -> None:
        """Remember how a binding ended, within the bound on such memories."""
        self.ended_bindings.pop(key, None)
        self.ended_bindings[key] = Ended(report=report, forget_at=now + self.limits.memory_s)
        if len(self.ended_bindings) > self.limits.tombstones:
            self.ended_bindings.popitem(last=False)

    def end_source(self, key: SourceKey, now: float) -> None:
        """Forget a source attempt and refuse late messages about it for a while."""
        self.sources.pop(key, None)
        self.ended_sources.pop(key, None)
        self.ended_sources[key] = now + self.limits.memory_s
        if len(self.ended_sources) > self.limits.tombstones:
            self.ended_sources.popitem(last=False)

    def expire_memories(self, now: float) -> None:
        """Forget ended keys whose time is over."""
        while self.ended_sources and next(iter(self.ended_sources.values())) <= now:
            self.ended_sources.popitem(last=False)
        while self.ended_bindings and next(iter(self.ended_bindings.values())).forget_at <= now:
            self.ended_bindings.popitem(last=False)

    def bindings_of(self, key: SourceKey) -> list[Binding]:
        """Return the live bindings of a source attempt."""
        return [self.bindings[binding] for binding in self.by_source.get(key, ())]

    def bindings_to(self, target: EngineRef) -> list[Binding]:
        """Return the live bindings to a target engine."""
        return [self.bindings[binding] for binding in self.by_target.get(target, ())]


def _unindex(index: dict[K, dict[BindingKey, None]], key: K, binding: BindingKey) -> None:
    entries = index.get(key)
    if entries is not None:
        entries.pop(binding, None)
        if not entries:
            del index[key]
