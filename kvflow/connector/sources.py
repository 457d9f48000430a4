"""The source side of a scheduler half: opens, advances, seals and closes the transfers of prompts computed here."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvflow.connector.bounds import hold_bound_s
from kvflow.connector.desk import BlockTable, Desk
from kvflow.connector.digest import pack_u32, prompt_digest
from kvflow.connector.params import Wish
from kvflow.connector.step import Hold, Progress, StepView
from kvflow.messages import CloseReason, SourceClosed, SourceOpened

# vLLM's null block: it stands where a sliding window has left a block behind.
NULL_BLOCK = 0


@dataclass(slots=True)
class Source:
    """Follow one request whose KV is to be pushed; `attempt` is 0 until it is opened."""

    request_id: str
    transfer_id: str
    prompt: Sequence[int]
    salt: str
    expected_targets: int
    attempt: int = 0
    tokens_sent: int = 0
    blocks_sent: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt)


class Sources:
    """Keep the live sources of one engine."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._by_request: dict[str, Source] = {}
        self._by_transfer: dict[str, Source] = {}
        # Those whose prompt is not computed yet: all that a step has to look at.
        self._computing: dict[str, Source] = {}
        self._held: list[Hold] = []
        self._hold_bound_s = hold_bound_s(desk.settings)

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def computing(self) -> bool:
        """Return whether any prompt is still to be computed."""
        return bool(self._computing)

    def add(self, request_id: str, wish: Wish, prompt: Sequence[int], salt: str) -> None:
        """Take a source in, and open its transfer while it still queues."""
        desk = self._desk
        if "source" not in desk.roles:
            desk.compute_locally(request_id, "wrong_role", "this engine is not a source")
            return
        if wish.transfer_id in self._by_transfer:
            desk.compute_locally(request_id, "duplicate", "another request is the source of this transfer")
            return
        source = Source(request_id, wish.transfer_id, prompt, salt, wish.expected_targets)
        self._by_request[request_id] = source
        self._by_transfer[wish.transfer_id] = source
        self._computing[request_id] = source
        if desk.usable:
            self._open(source)

    def preempted(self, request_ids: AbstractSet[str]) -> None:
        """Close the attempts of preempted sources and open the next ones."""
        if not self._by_request:
            return
        for request_id in request_ids:
            if (source := self._by_request.get(request_id)) is not None:
                self._restart(source, "its blocks were taken away")

    def progress(self, step: StepView) -> tuple[Progress, ...]:
        """Return what the step makes final of each source."""
        scheduled = step.scheduled
        if not self._computing or not scheduled:
            return ()
        found: list[Progress] = []
        for source in list(self._computing.values()):
            computed = scheduled.get(source.request_id)
            if computed is None:
                continue
            if not source.attempt:
                if not self._desk.usable:
                    continue
                self._open(source)
            final = min(computed, source.tokens)
            if final < source.tokens:
                final -= final % self._desk.atom_tokens
            if final < source.tokens_sent:
                self._restart(source, "it is being computed again")
            if final > source.tokens_sent:
                found.append(self._advance(source, final, step.block_table(source.request_id)))
        return tuple(found)

    def take_held(self) -> tuple[Hold, ...]:
        """Return the sources that are held since the last call."""
        if not self._held:
            return ()
        held = tuple(self._held)
        self._held.clear()
        return held

    def finish(
        self, request_id: str, aborted: bool, blocks: BlockTable | None
    ) -> tuple[bool, dict[str, object] | None]:
        """End a source: seal it when it is whole, else close it; return whether its blocks are held."""
        source = self._by_request.pop(request_id, None)
        if source is None:
            return False, None
        self._computing.pop(request_id, None)
        self._by_transfer.pop(source.transfer_id, None)
        if not source.attempt:
            if not aborted:
                self._desk.compute_locally(request_id, "unavailable", "the node or the bus cannot be reached")
            return False, None
        problem = "" if aborted else self._why_incomplete(source, blocks)
        reason: CloseReason = "aborted" if aborted else "error" if problem else "finished"
        self._close(source, reason, problem)
        if reason != "finished" and not source.tokens_sent:
            return False, None  # no actor has ever heard of its blocks
        self._held.append(Hold(request_id, source.transfer_id, source.attempt, self._hold_bound_s, reason))
        if reason != "finished":
            return True, None
        # A router that picks the target only now can pass these on as they are.
        return True, {"transfer_id": source.transfer_id, "do_remote_prefill": True, "do_remote_decode": False}

    def clear(self) -> None:
        """Forget everything."""
        self._by_request.clear()
        self._by_transfer.clear()
        self._computing.clear()
        self._held.clear()

    def _open(self, source: Source) -> None:
        desk = self._desk
        engine, ranks = desk.identity()
        source.attempt = attempt = desk.next_attempt()
        source.tokens_sent = 0
        source.blocks_sent = [0] * len(desk.groups)
        self._computing[source.request_id] = source
        desk.counters["opened"] += 1

        def opened() -> SourceOpened:
            return SourceOpened(
                transfer_id=source.transfer_id, attempt=attempt, source=engine, request_id=source.request_id,
                tokens=source.tokens, ranks=ranks, prompt_digest=prompt_digest(source.prompt, source.salt),
                expected_targets=source.expected_targets,
            )  # fmt: skip

        desk.tell_matching(source.transfer_id, opened)

    def _close(self, source: Source, reason: CloseReason, detail: str = "") -> None:
        desk = self._desk
        engine, _ = desk.identity()
        desk.counters[f"closed_{reason}"] += 1
        closed = SourceClosed(
            transfer_id=source.transfer_id, attempt=source.attempt, source=engine, request_id=source.request_id,
            reason=reason, detail=detail,
        )  # fmt: skip
        desk.tell_matching(source.transfer_id, closed)

    def _restart(self, source: Source, detail: str) -> None:
        """Close a preempted attempt and open the next one, since the engine will compute the prompt again.

        It is opened now and not when it runs again: whoever waits for it then knows that it is coming.
        """
        if not source.attempt or not source.tokens_sent:
            return
        self._close(source, "preempted", detail)
        self._open(source)

    def _advance(self, source: Source, final: int, table: BlockTable) -> Progress:
        first = tuple(source.blocks_sent)
        packed: list[bytes] = []
        for group, begin in enumerate(first):
            ids = table[group] if group < len(table) else ()
            end = min(len(ids), -(-final // self._desk.groups[group].block_tokens))
            packed.append(pack_u32(ids[begin:end]))
            source.blocks_sent[group] = max(begin, end)
        source.tokens_sent = final
        last = final == source.tokens
        if last:
            del self._computing[source.request_id]
        return Progress(source.request_id, source.transfer_id, source.attempt, final, first, tuple(packed), last)

    def _why_incomplete(self, source: Source, blocks: BlockTable | None) -> str:
        if source.tokens_sent < source.tokens:
            return f"only {source.tokens_sent} of {source.tokens} prompt tokens were computed"
        if blocks is None or source.tokens < 2:
            return ""
        for number, group in enumerate(self._desk.groups):
            if group.kind != "window":
                continue
            # The target computes the last prompt token itself and looks one window back from there.
            first = max(0, source.tokens - group.window_tokens) // group.block_tokens
            last = (source.tokens - 2) // group.block_tokens
            ids = blocks[number] if number < len(blocks) else ()
            if any(at >= len(ids) or ids[at] == NULL_BLOCK for at in range(first, last + 1)):
                return f"the sliding window of group {number} has moved past what the target needs"
        return ""
