"""Turn changes of the directory into what the reducer wants to know: whole engines, and pairs that cannot be mapped."""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import structlog

from kvflow.actors.matching.inputs import EngineGone, EngineJoined, PairIncompatible
from kvflow.directory import Joined, Left
from kvflow.errors import KvflowError
from kvflow.messages import EngineCard, EngineRef

MAX_VERDICTS = 4096

FleetEvent = EngineJoined | EngineGone | PairIncompatible
Shape = tuple[bytes, ...]  # what decides compatibility, of every rank

log = structlog.get_logger()


class Fleet:
    """Track which engines are complete. Engines of one shape share their compatibility verdicts."""

    def __init__(self) -> None:
        self._cards: dict[EngineRef, dict[int, EngineCard]] = {}
        self._complete: dict[EngineRef, Shape] = {}
        self._verdicts: OrderedDict[tuple[Shape, Shape], str | None] = OrderedDict()

    def learn(self, change: Joined | Left, now: float) -> Iterator[FleetEvent]:
        """Apply one change and yield what follows from it."""
        if isinstance(change, Joined):
            yield from self._joined(change.card, now)
        else:
            yield from self._left(change.engine, change.rank, change.reason, now)

    def _joined(self, card: EngineCard, now: float) -> Iterator[FleetEvent]:
        engine = card.engine
        cards = self._cards.setdefault(engine, {})
        previous = cards.get(card.rank)
        cards[card.rank] = card
        if previous is not None and previous.agent != card.agent and engine in self._complete:
            # The rank's actors are new: what the old ones had in flight and in mind is lost.
            del self._complete[engine]
            yield EngineGone(now, engine, f"the actors of rank {card.rank} restarted")
        if len(cards) == card.profile.ranks and engine not in self._complete:
            shape = tuple(_shape(cards[rank]) for rank in sorted(cards))
            self._complete[engine] = shape
            yield EngineJoined(now, engine, card.profile.ranks)
            yield from self._pairs(engine, now)

    def _left(self, engine: EngineRef, rank: int, reason: str, now: float) -> Iterator[FleetEvent]:
        cards = self._cards.get(engine)
        if cards is None or cards.pop(rank, None) is None:
            return
        if not cards:
            del self._cards[engine]
        if self._complete.pop(engine, None) is not None:
            yield EngineGone(now, engine, f"rank {rank}: {reason}")

    def _pairs(self, engine: EngineRef, now: float) -> Iterator[FleetEvent]:
        for other in self._complete:
            for source, target in {(engine, other), (other, engine)}:
                if self._plays(source, "source") and self._plays(target, "target"):
                    reason = self._verdict(source, target)
                    if reason is not None:
                        yield PairIncompatible(now, source, target, reason)

    def _plays(self, engine: EngineRef, role: str) -> bool:
        return any(role in card.profile.roles for card in self._cards[engine].values())

    def _verdict(self, source: EngineRef, target: EngineRef) -> str | None:
        key = (self._complete[source], self._complete[target])
        if key not in self._verdicts:
            self._verdicts[key] = _check(self._ordered(source), self._ordered(target))
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return self._verdicts[key]

    def _ordered(self, engine: EngineRef) -> list[EngineCard]:
        cards = self._cards[engine]
        return [cards[rank] for rank in sorted(cards)]


def _shape(card: EngineCard) -> bytes:
    profile = card.profile
    sizes = [(segment.length, segment.memory) for segment in card.segments]
    return msgspec.msgpack.encode((profile.geometry, profile.fingerprint, profile.tp_rank, profile.pp_rank, sizes))


def _check(source: list[EngineCard], target: list[EngineCard]) -> str | None:
    # Imported late: it brings numpy, which the reducer does without.
    from kvflow.dataplane.compat import check_compatible
    from kvflow.dataplane.geometry import check_geometry

    try:
        for card in (*source, *target):
            check_geometry(card.profile.geometry, card.segments, owner=f"{card.engine} rank {card.rank}")
        return check_compatible([card.profile for card in source], [card.profile for card in target])
    except (KvflowError, ValueError, ArithmeticError, LookupError) as error:
        # Cards come from other processes: one that cannot even be checked must not be written to.
        log.warning("pair_not_checkable", source=str(source[0].engine), target=str(target[0].engine), error=str(error))
        return f"the two caches cannot be compared: {error}"
