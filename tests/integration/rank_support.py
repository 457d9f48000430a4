"""Fake engines whose cache is addressed by content, and a conductor that plays matching for them by hand."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.bus.port import Bus, Delivery
from kvflow.config import Settings
from kvflow.dataplane.memory import MemoryRange, SharedSegment, create_shared
from kvflow.messages import (
    CloseReason,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    KvView,
    Message,
    ModelFingerprint,
    Role,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    Subjects,
    TransferBound,
    TransferRevoked,
    decode,
    encode,
    pack_blocks,
)

LAYERS = 3
HEADS = 4
ROW = 24
BLOCKS = 64

M = TypeVar("M", bound=Message)


def content(prompt: int, tokens: int) -> NDArray[np.uint8]:
    """Return the KV bytes of a prompt, shape (layers, heads, tokens, row)."""
    drawn = np.random.default_rng(prompt).integers(1, 256, (LAYERS, HEADS, tokens, ROW), dtype=np.uint8)
    return np.ascontiguousarray(drawn)


async def eventually(check: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait until a check holds; raise TimeoutError when it does not in time."""
    with anyio.fail_after(timeout_s):
        while not check():  # noqa: ASYNC110 - what is waited for has no event of its own
            await anyio.sleep(0.005)


class FakeEngine:
    """Hold the paged cache of all ranks of one engine; memory per rank is (layers, blocks, heads, tokens, row)."""

    def __init__(
        self, name: str, *, ranks: int = 1, block_tokens: int = 16, roles: tuple[Role, ...] = ("source", "target"),
        seed: int = 0, row: int = ROW,
    ) -> None:  # fmt: skip
        self.ref = EngineRef(engine_id=name, incarnation="1")
        self.ranks = ranks
        self.block_tokens = block_tokens
        self.heads = HEADS // ranks
        self.row = row
        self.roles = roles
        self.rng = np.random.default_rng(seed)
        size = LAYERS * BLOCKS * self.heads * block_tokens * row
        self.segments: list[SharedSegment] = [create_shared(size) for _ in range(ranks)]
        shape = (LAYERS, BLOCKS, self.heads, block_tokens, row)
        self.caches = [segment.view.reshape(shape) for segment in self.segments]

    def close(self) -> None:
        self.caches = []
        for segment in self.segments:
            segment.close()

    def profile(self, rank: int) -> EngineProfile:
        token = self.row
        head = token * self.block_tokens
        block = head * self.heads
        views = tuple(
            KvView(
                layer=str(layer), part="kv", group=0, segment=0, offset=layer * BLOCKS * block, blocks=BLOCKS,
                block_tokens=self.block_tokens, heads=self.heads, head_start=rank * self.heads, total_heads=HEADS,
                row_bytes=self.row, block_stride=block, head_stride=head, token_stride=token,
            )
            for layer in range(LAYERS)
        )  # fmt: skip
        geometry = KvGeometry(
            dtype="uint8", num_blocks=BLOCKS, groups=(KvGroup(block_tokens=self.block_tokens),), views=views
        )
        return EngineProfile(
            engine=self.ref, rank=rank, ranks=self.ranks, tp_rank=rank, tp_size=self.ranks, pp_rank=0, pp_size=1,
            roles=self.roles, host="h", model="m", geometry=geometry, fingerprint=ModelFingerprint(fields=()),
        )  # fmt: skip

    def ranges(self, rank: int) -> list[MemoryRange]:
        return [self.segments[rank].range]

    def allocate(self, tokens: int) -> list[int]:
        """Return scattered block ids for that many tokens; blocks of different calls may be the same."""
        return [int(block) for block in self.rng.permutation(BLOCKS)[: -(-tokens // self.block_tokens)]]

    def write(self, rank: int, kv: NDArray[np.uint8], blocks: Sequence[int], start: int, end: int) -> None:
        """Compute: put the tokens [start, end) into the cache."""
        mine = kv[:, rank * self.heads : (rank + 1) * self.heads]
        for token in range(start, end):
            block = blocks[token // self.block_tokens]
            self.caches[rank][:, block, :, token % self.block_tokens, :] = mine[:, :, token]

    def read(self, rank: int, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Return what the cache holds for the first `tokens`, shape (layers, heads of the rank, tokens, row)."""
        gathered = self.caches[rank][:, list(blocks)].transpose(0, 2, 1, 3, 4)
        return gathered.reshape(LAYERS, self.heads, -1, self.row)[:, :, :tokens]

    def assert_holds(self, kv: NDArray[np.uint8], blocks: Sequence[int], start: int, end: int) -> None:
        """Check the tokens [start, end) byte for byte, and that nothing else was written anywhere."""
        for rank in range(self.ranks):
            mine = kv[:, rank * self.heads : (rank + 1) * self.heads, start:end]
            found = self.read(rank, blocks, end)[:, :, start:]
            assert np.array_equal(found, mine)
            assert np.count_nonzero(self.caches[rank]) == mine.size, "bytes outside the range were written"


@dataclass
class Conductor:
    """Send what schedulers, workers and matching would send, and record what the actors answer."""

    bus: Bus
    subjects: Subjects
    heard: list[tuple[str, Message]] = field(default_factory=list)

    async def listen(self, *targets: FakeEngine) -> None:
        await self.bus.subscribe(self.subjects.control_shard(0), self._hear)
        await self.bus.subscribe(self.subjects.events_all(), self._hear)
        for target in targets:
            for rank in range(target.ranks):
                await self.bus.subscribe(self.subjects.engine(target.ref, rank), self._hear)

    def _hear(self, delivery: Delivery) -> None:
        self.heard.append((delivery.subject, decode(delivery.data)))

    def of(self, kind: type[M], transfer_id: str | None = None) -> list[M]:
        """Return the messages of one type, each once per subject that it came on."""
        found = [message for _, message in self.heard if isinstance(message, kind)]
        return [item for item in found if transfer_id in {None, getattr(item, "transfer_id", None)}]

    async def opened(self, source: FakeEngine, transfer: str, tokens: int, attempt: int = 0) -> None:
        message = SourceOpened(
            transfer_id=transfer, attempt=attempt, source=source.ref, request_id="p", tokens=tokens,
            ranks=source.ranks, prompt_digest=b"",
        )  # fmt: skip
        await self.bus.publish(self.subjects.control(0, "source", source.ref), encode(message))

    async def progress(
        self, source: FakeEngine, transfer: str, blocks: Sequence[int], final: int, *, known: int = 0,
        last: bool = False, attempt: int = 0,
    ) -> None:  # fmt: skip
        for rank in range(source.ranks):
            message = SourceProgress(
                transfer_id=transfer, attempt=attempt, source=source.ref, rank=rank, tokens_final=final,
                first_blocks=(known,), blocks=(pack_blocks(list(blocks[known:])),), last=last,
            )  # fmt: skip
            await self.bus.publish(self.subjects.transfer(source.ref, rank), encode(message))

    async def closed(
        self, source: FakeEngine, transfer: str, reason: CloseReason = "finished", attempt: int = 0
    ) -> None:
        message = SourceClosed(transfer_id=transfer, attempt=attempt, source=source.ref, request_id="p", reason=reason)
        await self.bus.publish(self.subjects.control(0, "source", source.ref), encode(message))

    async def bound(
        self, source: FakeEngine, target: FakeEngine, transfer: str, blocks: Sequence[int], start: int, end: int,
        *, binding: int = 1, attempt: int = 0, **changes: Any,
    ) -> None:  # fmt: skip
        first = start // target.block_tokens
        message = TransferBound(
            transfer_id=transfer, binding=binding, source=source.ref, source_attempt=attempt, target=target.ref,
            target_attempt=0, request_id="d", start=start, end=end, first_blocks=(first,),
            blocks=(pack_blocks(list(blocks[first:])),),
        )  # fmt: skip
        data = encode(msgspec.structs.replace(message, **changes))
        await self.bus.publish(self.subjects.completion(target.ref), data)
        await self.bus.publish(self.subjects.transfer(source.ref), data)

    async def revoked(self, source: FakeEngine, transfer: str, binding: int = 1) -> None:
        message = TransferRevoked(transfer_id=transfer, binding=binding, source=source.ref, reason="cancelled")
        await self.bus.publish(self.subjects.transfer(source.ref), encode(message))

    async def released(self, source: FakeEngine, transfer: str, attempt: int = 0) -> None:
        message = SourceReleased(transfer_id=transfer, attempt=attempt, source=source.ref, request_id="p")
        await self.bus.publish(self.subjects.transfer(source.ref), encode(message))


Runner = Callable[[FakeEngine, int, Callable[[], None]], Any]


@asynccontextmanager
async def serving(run: Runner, *engines: FakeEngine) -> AsyncIterator[dict[str, anyio.abc.TaskGroup]]:
    """Run all ranks of these engines; yields the task groups by engine id, so that one engine can be ended."""
    groups: dict[str, anyio.abc.TaskGroup] = {}
    async with anyio.create_task_group() as all_groups:
        for engine in engines:
            up = [anyio.Event() for _ in range(engine.ranks)]

            async def serve(engine: FakeEngine = engine, up: list[anyio.Event] = up) -> None:
                async with anyio.create_task_group() as group:
                    groups[engine.ref.engine_id] = group
                    for rank in range(engine.ranks):
                        group.start_soon(run, engine, rank, up[rank].set)

            all_groups.start_soon(serve)
            with anyio.fail_after(30):
                for event in up:
                    await event.wait()
        yield groups
        all_groups.cancel_scope.cancel()


def test_settings(cluster: str, **changes: Any) -> Settings:
    """Return settings with short waits."""
    return msgspec.structs.replace(
        Settings(cluster=cluster, quarantine_s=0.3, stop_grace_s=2.0, transfer_wait_s=5.0), **changes
    )
