"""The scheduler half: decides what each request is to a transfer, and tells the actors and the workers.

Every method runs on the engine's scheduler thread, costs microseconds, never waits and never raises on what a client
sent. A hook may be called again, late, or for a request never seen.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from kvflow.config import Settings
from kvflow.connector.desk import BlockTable, Desk
from kvflow.connector.params import Malformed, encodable, parse_params
from kvflow.connector.port import SchedulerPort
from kvflow.connector.sources import Sources
from kvflow.connector.step import EMPTY_STEP, StepMeta, StepView
from kvflow.connector.targets import Targets
from kvflow.messages import EngineRef, KvGroup, Role


class SchedulerHalf:
    """Be the transfer side of an engine's scheduler. Single-threaded: the engine's scheduler thread owns it."""

    def __init__(
        self, settings: Settings, link: SchedulerPort, *, roles: tuple[Role, ...], groups: Sequence[KvGroup],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Serve `roles` over a cache whose groups are `groups`; nothing is transferred before `start`."""
        self._desk = Desk(settings, link, roles, groups)
        self._sources = Sources(self._desk)
        self._targets = Targets(self._desk, clock)

    def start(self, engine: EngineRef, ranks: int, *, atom_tokens: int = 1) -> None:
        """Learn the engine's full name (drawn by its workers) and how many ranks it has.

        `atom_tokens` is how many tokens the cache stores interleaved, so that they can only be moved together.
        """
        self._desk.engine = engine
        self._desk.ranks = ranks
        self._desk.atom_tokens = atom_tokens
        self._desk.link.start(engine, ranks)

    @property
    def ready(self) -> bool:
        """Return whether a transfer that begins now can work."""
        return self._desk.usable

    @property
    def live(self) -> int:
        """Return how many requests take part in a transfer right now."""
        return len(self._sources) + len(self._targets)

    @property
    def computing(self) -> bool:
        """Return whether `build_step` needs to know what was scheduled and preempted."""
        return bool(len(self._sources))

    @property
    def counters(self) -> Counter[str]:
        """Return what has happened since the start, by name."""
        return self._desk.counters

    def on_new_request(self, request_id: str, params: object, prompt: Sequence[int] | None, salt: str = "") -> None:
        """Read a new request's parameters; open its transfer at once when it is a source."""
        wish = parse_params(params)
        if wish is None:
            return
        if isinstance(wish, Malformed):
            self._desk.compute_locally(request_id, "malformed", wish.reason)
        elif not prompt:
            self._desk.compute_locally(request_id, "no_tokens", "the prompt has no token ids")
        elif request_id in self._sources or request_id in self._targets or not encodable(request_id):
            self._desk.compute_locally(request_id, "duplicate", "the request id is in use or not valid Unicode")
        elif wish.source:
            self._sources.add(request_id, wish, prompt, salt)
        else:
            self._targets.add(request_id, wish, prompt, salt)

    def matched_tokens(self, request_id: str, computed: int) -> tuple[int, bool]:
        """Return how many tokens past `computed` a transfer will bring, and whether in the background.

        The last prompt token is never among them: the engine computes it to sample the first output token.
        """
        wanted = self._targets.matched(request_id, computed)
        return wanted, wanted > 0

    def allocated(self, request_id: str, blocks: BlockTable, external: int) -> None:
        """Register the blocks that were allocated for `external` tokens; 0 means that nothing is to be loaded."""
        self._targets.allocated(request_id, blocks, external)

    def build_step(self, step: StepView) -> StepMeta:
        """Collect what the workers must know of this step; tell the actors of preempted sources.

        Registrations and cancels that have no answer yet are posted again in time.
        """
        if self._targets.waiting:
            self._targets.ask_again()
        if step.preempted:
            self._sources.preempted(step.preempted)
        progress = self._sources.progress(step)
        loads, held = self._targets.take_loads(), self._sources.take_held()
        if not progress and not loads and not held:
            return EMPTY_STEP
        return StepMeta(loads=loads, progress=progress, held=held)

    def finished(
        self, request_id: str, aborted: bool, blocks: BlockTable | None = None
    ) -> tuple[bool, dict[str, object] | None]:
        """End a request; return whether its blocks are held, and what to hand to the router.

        `blocks` is the final block table; with it, a source whose sliding window has already dropped what the target
        needs is found out.
        """
        self._targets.finish(request_id)
        return self._sources.finish(request_id, aborted, blocks)

    def loads_ended(self, received: AbstractSet[str], failed: AbstractSet[str]) -> None:
        """Learn which loads the workers reported as ended; failed ones are computed here, or fail by policy."""
        self._targets.ended(received, failed)

    def shutdown(self) -> None:
        """Forget everything; the workers' actors leave the directory, which tells the peers."""
        self._desk.link.close()
        self._sources.clear()
        self._targets.clear()
