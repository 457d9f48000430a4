"""The targets of one source rank: who has joined, what can be written to them, and the agents that reach them.

Connections are made when engines meet, before the first request needs them, and again on demand. All results go to the
reducer as facts; the plans stay here, by target rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import structlog

from kvflow.actors.outbox import Outbox
from kvflow.actors.transfer.model import Input, Lane, PeerLost, PeerReady, PeerUnknown
from kvflow.dataplane.compat import check_compatible, shares_for
from kvflow.dataplane.geometry import check_geometry
from kvflow.dataplane.plan import PairPlan
from kvflow.dataplane.port import TransferAgent
from kvflow.directory import Directory, DirectoryChange, Joined, Left
from kvflow.errors import KvflowError, PeerError
from kvflow.messages import EngineCard, EngineProfile, EngineRef, PeerHello, Subjects, encode

CARD_WAIT_S = 5.0
CONNECT_WAIT_S = 10.0
MAX_CONNECTING = 4

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Tie:
    """Hold what it takes to write to one target rank."""

    card: EngineCard
    peer: str
    plan: PairPlan
    writers: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """Hold a planned tie whose agent is not known yet."""

    card: EngineCard
    plan: PairPlan
    writers: int


class Peers:
    """Keep this source rank's ties to all target engines."""

    def __init__(
        self,
        profile: EngineProfile,
        agent: TransferAgent,
        directory: Directory,
        outbox: Outbox,
        subjects: Subjects,
        tell: Callable[[Input], object],
    ) -> None:
        self._profile = profile
        self._agent = agent
        self._directory = directory
        self._outbox = outbox
        self._subjects = subjects
        self._tell = tell
        self._ties: dict[EngineRef, dict[int, Tie]] = {}
        self._connecting: set[EngineRef] = set()
        self._changed = anyio.Event()
        self._limiter = anyio.CapacityLimiter(MAX_CONNECTING)
        self._tasks: anyio.abc.TaskGroup | None = None

    def attach(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """Run connections in this task group from now on; None ends that, and changes are only noted."""
        self._tasks = tasks

    def tie(self, target: EngineRef, rank: int) -> Tie | None:
        """Return the tie to a target rank, None when it is not (or no longer) connected."""
        return self._ties.get(target, {}).get(rank)

    def on_change(self, change: DirectoryChange) -> None:
        """Take a change of the directory: connect to who has joined, retire who has left."""
        self._changed.set()
        self._changed = anyio.Event()
        if isinstance(change, Left):
            self._retire(change.engine, f"rank {change.rank} of {change.engine} has {change.reason}")
        elif isinstance(change, Joined):
            self._joined(change.card)

    def want(self, target: EngineRef) -> None:
        """Connect to a target engine; the answer comes as PeerReady or PeerUnknown."""
        if self._tasks is not None and target not in self._connecting:
            self._connecting.add(target)
            self._tasks.start_soon(self._connect, target)

    def drop(self, target: EngineRef, detail: str) -> None:
        """Cut the connections to a target engine; the next binding to it connects anew."""
        log.warning("target_cut_off", target=str(target), reason=detail)
        self._retire(target, detail)

    def _joined(self, card: EngineCard) -> None:
        engine = card.engine
        if engine == self._profile.engine:
            # Now that this source has one more rank known, targets that waited for it may be complete.
            for target, cards in self._directory.engines().items():
                self._greet(target, cards)
            return
        tie = self.tie(engine, card.rank)
        if tie is not None and (tie.card.agent, tie.card.nixl_metadata) != (card.agent, card.nixl_metadata):
            self._retire(engine, f"the agent of rank {card.rank} of {engine} was replaced")
        self._greet(engine, self._cards_of(engine))

    def _greet(self, target: EngineRef, cards: tuple[EngineCard, ...] | None) -> None:
        if cards is None or target == self._profile.engine or target in self._ties:
            return
        if "target" in cards[0].profile.roles and self._siblings() is not None:
            self.want(target)

    def _retire(self, target: EngineRef, detail: str) -> None:
        ties = self._ties.pop(target, {})
        self._tell(PeerLost(target, detail))
        # Pieces that are in flight to these agents fail now, which is what their bindings wait for.
        self._forget([tie.peer for tie in ties.values()])

    def _forget(self, names: Sequence[str]) -> None:
        if names and self._tasks is not None:
            self._tasks.start_soon(self._remove, names)

    async def _connect(self, target: EngineRef) -> None:
        try:
            async with self._limiter:
                fact = await self._connected(target)
        finally:
            self._connecting.discard(target)
        if isinstance(fact, PeerReady) and target not in self._ties:
            fact = PeerUnknown(target, "target_lost", f"{target} left while this rank connected to it")
        self._tell(fact)

    async def _connected(self, target: EngineRef) -> PeerReady | PeerUnknown:
        if target in self._ties:
            return self._ready(target)
        cards = await self._wait_for_cards(target)
        siblings = self._siblings()
        if cards is None or siblings is None:
            missing = "all ranks of its own engine" if siblings is None else f"all ranks of {target}"
            return PeerUnknown(target, "unknown_engine", f"the directory does not know {missing}")
        try:
            drafts = await anyio.to_thread.run_sync(self._draft, siblings, cards)
        except KvflowError as error:
            log.warning("target_incompatible", target=str(target), reason=str(error))
            return PeerUnknown(target, "incompatible", str(error), final=True)
        except Exception:  # foreign cards go through a lot of arithmetic: none of them may end the actor
            log.exception("target_card_unusable", target=str(target))
            return PeerUnknown(target, "incompatible", f"the cards of {target} cannot be used", final=True)
        ties: dict[int, Tie] = {}
        try:
            with anyio.fail_after(CONNECT_WAIT_S):
                for draft in drafts:
                    ties[draft.card.rank] = await self._tie_up(draft)
        except (KvflowError, TimeoutError) as error:
            detail = str(error) or f"no connection within {CONNECT_WAIT_S:g} s"
            log.warning("target_unreachable", target=str(target), reason=detail)
            self._forget([tie.peer for tie in ties.values()])
            return PeerUnknown(target, "transfer_error", f"cannot reach {target}: {detail}")
        if self._cards_of(target) != cards:
            self._forget([tie.peer for tie in ties.values()])
            return PeerUnknown(target, "target_lost", f"{target} changed while this rank connected to it")
        self._ties[target] = ties
        log.info("target_connected", target=str(target), ranks=sorted(ties))
        return self._ready(target)

    def _ready(self, target: EngineRef) -> PeerReady:
        ties = self._ties[target]
        return PeerReady(target, tuple(Lane(rank, tie.writers) for rank, tie in sorted(ties.items())))

    async def _wait_for_cards(self, target: EngineRef) -> tuple[EngineCard, ...] | None:
        with anyio.move_on_after(CARD_WAIT_S):
            while self._cards_of(target) is None or self._siblings() is None:
                await self._changed.wait()
        return self._cards_of(target)

    def _cards_of(self, engine: EngineRef) -> tuple[EngineCard, ...] | None:
        """Return the cards of all ranks of an engine in rank order, None unless all are known."""
        return self._directory.engines().get(engine)

    def _siblings(self) -> tuple[EngineCard, ...] | None:
        """Return the cards of this engine's other ranks, None unless all are known."""
        if self._profile.ranks == 1:
            return ()
        cards = self._cards_of(self._profile.engine)
        return None if cards is None else tuple(card for card in cards if card.rank != self._profile.rank)

    def _draft(self, siblings: Sequence[EngineCard], cards: Sequence[EngineCard]) -> list[_Draft]:
        """Plan the ties to all ranks that this rank writes to; raise PeerError when the caches cannot be mapped."""
        for card in (*siblings, *cards):
            check_geometry(card.profile.geometry, card.segments, owner=f"rank {card.rank} of {card.engine}")
        sources = sorted((self._profile, *(card.profile for card in siblings)), key=lambda profile: profile.rank)
        reason = check_compatible(sources, [card.profile for card in cards])
        if reason is not None:
            raise PeerError(reason)
        drafts = []
        for card in cards:
            shares = shares_for(card.profile, sources)
            if self._profile.rank in shares:
                plan = PairPlan(
                    self._profile.geometry,
                    self._agent.segments,
                    card.profile.geometry,
                    card.segments,
                    share=shares[self._profile.rank],
                )
                drafts.append(_Draft(card, plan, len(shares)))
        return drafts

    async def _tie_up(self, draft: _Draft) -> Tie:
        card = draft.card
        hello = PeerHello(
            source=self._profile.engine, rank=self._profile.rank, target=card.engine, target_rank=card.rank
        )
        # An idle agent answers nobody, so the target has to poll while the connection comes up.
        self._outbox.send(self._subjects.completion(card.engine, card.rank), hello)
        peer = await self._agent.add_peer(card.nixl_metadata)
        # Ignored at the other end: it makes the transport connect before the first request does.
        self._agent.notify(peer, encode(hello))
        return Tie(card, peer, draft.plan, draft.writers)

    async def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                with anyio.move_on_after(CONNECT_WAIT_S):
                    await self._agent.remove_peer(name)
            except KvflowError as error:
                log.warning("peer_not_removed", peer=name, error=str(error))
