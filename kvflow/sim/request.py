"""A request inside a simulated engine, and what is known about it when it ends."""

import enum
from dataclasses import dataclass, field

import msgspec

from kvflow.sim.kv import PrefixHashes


class Status(enum.Enum):
    """Say where a request is in its life."""

    WAITING = "waiting"
    LOADING = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Ask an engine to process a prompt and to generate `max_tokens` tokens."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 1
    params: dict[str, object] | None = None


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """Say how a request ended. Times are seconds on the host's monotonic clock, 0 when the step was never reached.

    `allocated_at` is when blocks for a remote prefix were offered, `received_at` when the engine learnt of its arrival,
    `first_token_at` when the prompt was computed. `checked_bytes` and `mismatched_bytes` cover the request's whole KV.
    """

    request_id: str
    outcome: str
    output: list[int]
    prompt_tokens: int
    local_hit_tokens: int = 0
    external_tokens: int = 0
    loads_failed: int = 0
    preemptions: int = 0
    submitted_at: float = 0.0
    allocated_at: float = 0.0
    received_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    checked_bytes: int = 0
    mismatched_bytes: int = 0
    stray_bytes: int = 0
    detail: str = ""


@dataclass(slots=True, eq=False)
class SimRequest:
    """Hold the state of one request; `computed` counts the tokens whose KV is, or is about to be, in its blocks."""

    spec: RequestSpec
    submitted_at: float
    tokens: list[int] = field(init=False)
    hashes: PrefixHashes = field(init=False)
    status: Status = Status.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    holds_load: bool = False
    admitted: bool = False
    local_hit_tokens: int = 0
    external_tokens: int = 0
    loads_failed: int = 0
    preemptions: int = 0
    allocated_at: float = 0.0
    received_at: float = 0.0
    first_token_at: float = 0.0
    checked_bytes: int = 0
    mismatched_bytes: int = 0
    stray_bytes: int = 0
    outcome: str = ""
    # After the end: what the blocks still wait for.
    awaits_load: bool = False
    awaits_sent: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.prompt)
        self.hashes = PrefixHashes(self.tokens)

    @property
    def request_id(self) -> str:
        """Return the request's id."""
        return self.spec.request_id

    @property
    def generated(self) -> int:
        """Return how many tokens have been sampled."""
        return len(self.tokens) - len(self.spec.prompt)

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self.hashes.extend([token])

    def result(self, now: float, detail: str = "") -> RequestResult:
        """Summarise the request at its end."""
        return RequestResult(
            request_id=self.request_id, outcome=self.outcome, output=self.tokens[len(self.spec.prompt) :],
            prompt_tokens=len(self.spec.prompt), local_hit_tokens=self.local_hit_tokens,
            external_tokens=self.external_tokens, loads_failed=self.loads_failed, preemptions=self.preemptions,
            submitted_at=self.submitted_at, allocated_at=self.allocated_at, received_at=self.received_at,
            first_token_at=self.first_token_at, finished_at=now, checked_bytes=self.checked_bytes,
            mismatched_bytes=self.mismatched_bytes, stray_bytes=self.stray_bytes, detail=detail,
        )  # fmt: skip
