"""Check a registration against the cards of its engine. Pure: no clock, no I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvflow.errors import WireError
from kvflow.messages import EngineCard, FailureReason, KvGroup, TargetRegistered, unpack_blocks

MAX_PROMPT_TOKENS = 1 << 24
MAX_ATTEMPT = 1 << 31
MAX_WAIT_S = 86_400.0
MAX_DIGEST_BYTES = 64
MAX_ID_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Accepted:
    """The registration may go on to matching."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The registration ends here; `detail` tells its engine what does not fit."""

    reason: FailureReason
    detail: str


Verdict = Accepted | Rejected


def check(registration: TargetRegistered, cards: Sequence[EngineCard]) -> Verdict:
    """Judge a registration by the cards of its engine, which are those of all ranks, or empty when it is not known."""
    if not cards:
        return Rejected("unknown_engine", f"no live cards of {registration.target}")
    if any("target" not in card.profile.roles for card in cards):
        return Rejected("bad_registration", "the engine has not the role of a target")
    if registration.ranks != len(cards):
        return Rejected("bad_registration", f"{registration.ranks} ranks, but the engine has {len(cards)}")
    problem = _scalars_problem(registration)
    if problem:
        return Rejected("bad_registration", problem)
    tables = _Tables(registration)
    for card in cards:
        problem = tables.problem(card.profile.geometry.groups, card.profile.geometry.num_blocks)
        if problem:
            return Rejected("bad_registration", problem)
    return Accepted()


def _scalars_problem(registration: TargetRegistered) -> str:
    if not 0 < len(registration.transfer_id) <= MAX_ID_CHARACTERS:
        return "the transfer id is empty or too long"
    if not 0 < len(registration.request_id) <= MAX_ID_CHARACTERS:
        return "the request id is empty or too long"
    if not 0 <= registration.attempt <= MAX_ATTEMPT:
        return f"attempt {registration.attempt} is out of range"
    if not 0 <= registration.start <= registration.end <= registration.prompt_tokens <= MAX_PROMPT_TOKENS:
        return f"range [{registration.start}, {registration.end}) of {registration.prompt_tokens} tokens makes no sense"
    if len(registration.prompt_digest) > MAX_DIGEST_BYTES:
        return f"a prompt digest of {len(registration.prompt_digest)} bytes"
    for name in ("source_wait_s", "compute_wait_s", "transfer_wait_s"):
        seconds: float = getattr(registration, name)
        if not math.isfinite(seconds) or not 0 < seconds <= MAX_WAIT_S:
            return f"{name} is {seconds}, not within (0, {MAX_WAIT_S:g}]"
    return ""


class _Tables:
    """Check the block tables of one registration; what depends on them alone is computed once for all ranks."""

    def __init__(self, registration: TargetRegistered) -> None:
        self._registration = registration
        self._highest: list[int] | None = None

    def problem(self, groups: Sequence[KvGroup], num_blocks: int) -> str:
        """Return what is wrong for a rank with these groups and this many blocks, or an empty string."""
        blocks, firsts = self._registration.blocks, self._registration.first_blocks
        if self._registration.start == self._registration.end and not any(blocks):
            return ""
        if len(blocks) != len(groups) or len(firsts) != len(groups):
            return f"{len(blocks)} block tables and {len(firsts)} first blocks for {len(groups)} cache groups"
        for index, group in enumerate(groups):
            problem = self._span_problem(group, firsts[index], len(blocks[index]))
            if problem:
                return f"group {index}: {problem}"
        try:
            highest = self._highest_ids(groups)
        except WireError as error:
            return str(error)
        for index, found in enumerate(highest):
            if found >= num_blocks:
                return f"group {index}: block {found}, but the engine has {num_blocks}"
        return ""

    def _span_problem(self, group: KvGroup, first: int, table_bytes: int) -> str:
        start, end = self._registration.start, self._registration.end
        if group.block_tokens <= 0:
            return "the engine's card has no block size"
        if table_bytes % 4:
            return f"a table of {table_bytes} bytes is not a whole number of u32"
        low, high = start // group.block_tokens, -(-end // group.block_tokens)
        last = first + table_bytes // 4
        # A window group may have given up the blocks that its window has left behind.
        fits = low <= first and last <= high if group.kind == "window" else (first, last) == (low, high)
        return "" if fits else f"blocks [{first}, {last}), but tokens [{start}, {end}) lie in blocks [{low}, {high})"

    def _highest_ids(self, groups: Sequence[KvGroup]) -> list[int]:
        if self._highest is None:
            highest = []
            for index, group in enumerate(groups):
                ids = unpack_blocks(self._registration.blocks[index])
                if group.kind == "full" and len(np.unique(ids)) != len(ids):
                    raise WireError(f"group {index}: a block appears twice")
                highest.append(int(ids.max()) if len(ids) else -1)
            self._highest = highest
        return self._highest
