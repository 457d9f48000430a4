"""What the source side and the target side of a scheduler half share: who the engine is, and whom it writes to."""

import itertools
from collections import Counter
from collections.abc import Sequence

import structlog

from kvflow.config import Settings
from kvflow.connector.params import HOW_TO_SEND
from kvflow.connector.port import Letter, SchedulerPort
from kvflow.messages import EngineRef, KvGroup, Role, Subjects, shard_of

log = structlog.get_logger()

BlockTable = Sequence[Sequence[int]]


class Desk:
    """Hold the engine's identity, its letters' addresses and its counters."""

    def __init__(
        self, settings: Settings, link: SchedulerPort, roles: tuple[Role, ...], groups: Sequence[KvGroup]
    ) -> None:
        self.settings = settings
        self.link = link
        self.roles = roles
        self.groups = tuple(groups)
        self.subjects = Subjects(settings.cluster)
        self.engine: EngineRef | None = None
        self.ranks = 0
        # KV becomes movable in whole multiples of this many tokens (see `vllm_geometry`).
        self.atom_tokens = 1
        # One counter for all: an attempt grows whenever this engine opens or registers a transfer again.
        self._attempts = itertools.count(1)
        self._complained: set[str] = set()
        self.counters: Counter[str] = Counter()

    @property
    def usable(self) -> bool:
        """Return whether a transfer that begins now can work."""
        return self.engine is not None and self.link.ready

    def next_attempt(self) -> int:
        """Draw the number of the next attempt."""
        return next(self._attempts)

    def identity(self) -> tuple[EngineRef, int]:
        """Return the engine's full name and its number of ranks; call it only for what `usable` has let begin."""
        if self.engine is None:
            raise RuntimeError("a transfer was begun before the engine was started")
        return self.engine, self.ranks

    def tell_matching(self, transfer_id: str, letter: Letter) -> None:
        """Post to the matching shard of a transfer, as its source."""
        engine, _ = self.identity()
        self.link.post(self.subjects.control(shard_of(transfer_id, self.settings.shards), "source", engine), letter)

    def tell_registration(self, letter: Letter) -> None:
        """Post to the registration actors."""
        self.link.post(self.subjects.registration(), letter)

    def compute_locally(self, request_id: str, kind: str, reason: str) -> None:
        """Count a request that goes without a transfer; log the first one of each kind.

        A flood of bad requests must not become a flood of log lines.
        """
        self.counters[f"local_{kind}"] += 1
        if kind in self._complained:
            return
        self._complained.add(kind)
        log.warning(
            "computed_without_transfer", request_id=request_id, reason=reason, expected=HOW_TO_SEND,
            note="further requests of this kind are only counted",
        )  # fmt: skip
