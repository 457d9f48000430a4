"""Real vLLM engines for end-to-end tests: who runs, how legs are driven by hand, and what is asked afterwards."""

import asyncio
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import aiohttp

from kvflow.config import Settings
from kvflow.demo.client import Completion, complete
from kvflow.demo.engines import VllmEngine
from kvflow.demo.events import EventLog
from kvflow.demo.model import TinyModel
from kvflow.ids import new_transfer_id
from kvflow.messages import TransferEvent

MODEL = TinyModel()
# K and V of one token in bfloat16 over all layers.
TOKEN_BYTES = MODEL.layers * MODEL.kv_heads * 2 * MODEL.head_dim * 2
CHUNK_TOKENS = 1024
T = TypeVar("T")
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine that share a node."""

    prefill: VllmEngine
    decode: VllmEngine

    def movable(self, tokens: int, cached: int = 0) -> int:
        """Return how many of a prompt's tokens cross when the target has the first `cached` ones.

        The target always computes the last token itself, and all that is missing when that is little. Kernels that
        interleave the tokens of a block have its last block moved whole.
        """
        missing = tokens - 1 - cached
        if missing < self.decode.spec.min_load_tokens:
            return 0
        return missing + -(tokens - 1) % self.atom_tokens

    @cached_property
    def atom_tokens(self) -> int:
        """Return how many tokens the decode engine stores interleaved, by what its worker logged; 1 for none."""
        log = self.decode.log.read_text(errors="replace")
        assert "worker_registered" in log
        found = re.search(r":cpu-\w+-blocks-of-(\d+)", log)
        return int(found[1]) if found else 1


@dataclass(slots=True)
class Stage:
    """What a test needs: a client, the lone engine to compare with, and everybody's events."""

    session: aiohttp.ClientSession
    alone: VllmEngine
    events: EventLog
    settings: Settings

    async def expected(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return what one engine alone answers."""
        return (await complete(self.session, self.alone.url, prompt, max_tokens=max_tokens)).tokens

    async def prefill(self, engine: VllmEngine, prompt: Sequence[int], transfer_id: str, *, targets: int = 1) -> int:
        """Send a source leg and return the status of its answer."""
        params = {"transfer_id": transfer_id, "do_remote_decode": True, "expected_targets": targets}
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": params,
        }
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def decode(
        self, engine: VllmEngine, prompt: Sequence[int], transfer_id: str, *, max_tokens: int = 16
    ) -> Completion:
        """Send a target leg and return its answer."""
        params = {"transfer_id": transfer_id, "do_remote_prefill": True}
        return await complete(self.session, engine.url, prompt, max_tokens=max_tokens, params=params)

    async def both(
        self, pair: Pair, prompt: Sequence[int], *, max_tokens: int = 16, prefill_after_s: float = 0.0
    ) -> tuple[str, Completion]:
        """Send both legs, the source leg later if told so; return the transfer id and the target's answer."""
        transfer_id = new_transfer_id()

        async def source() -> None:
            await asyncio.sleep(prefill_after_s)
            assert await self.prefill(pair.prefill, prompt, transfer_id) == 200

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source())
            answer = tasks.create_task(self.decode(pair.decode, prompt, transfer_id, max_tokens=max_tokens))
        return transfer_id, answer.result()

    async def assert_crossed(self, transfer_id: str, tokens: int) -> TransferEvent:
        """Check by the events that the KV of exactly so many tokens crossed; return the delivery.

        Equal tokens alone prove nothing: an engine whose transfer failed computes the prompt itself.
        """
        events = await self.events.wait_for(transfer_id, "completed", "delivered")
        failed = [event for event in events if event.kind in {"failed", "rejected", "cancelled"}]
        assert not failed, failed
        delivered = [event for event in events if event.kind == "delivered"]
        assert len(delivered) == 1
        assert delivered[0].bytes_done == tokens * TOKEN_BYTES, (delivered[0].bytes_done / TOKEN_BYTES, tokens)
        return delivered[0]

    async def cache_usage(self, engine: VllmEngine) -> float:
        """Return the share of the engine's KV blocks that live requests hold."""
        return await self.metric(engine, "vllm:kv_cache_usage_perc")

    async def metric(self, engine: VllmEngine, name: str) -> float:
        """Return the sum of a metric over its labels."""
        async with self.session.get(f"{engine.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(float(value) for value in found)

    async def assert_empty(self, *engines: VllmEngine, within_s: float = 20.0) -> None:
        """Check that no block is held on the engines, soon."""
        for engine in engines:
            await eventually(partial(self._is_empty, engine), within_s, f"{engine.name} holds no block")

    async def _is_empty(self, engine: VllmEngine) -> bool:
        # The usage is a gauge of the last step; a request makes the engine step.
        await complete(self.session, engine.url, [7, 8, 9], max_tokens=2)
        return await self.cache_usage(engine) == 0.0


async def eventually(fact: Callable[[], Awaitable[bool]], within_s: float, what: str) -> None:
    """Ask again and again until it is so; fail saying what was not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not await fact():
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.2)


async def at_most(limit: int, work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run everything with at most so many at a time and return the results in order."""
    gate = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await call()

    return await asyncio.gather(*(one(call) for call in work))


def fresh_prompt(length: int, seeds: Iterator[int] = _seeds) -> list[int]:
    """Return a prompt that no test has used before, so that no prefix cache knows it.

    A file with seeds of its own leaves the prompts of the others as they are. That matters where the best two tokens
    tie in bfloat16: such a prompt's answer depends on what else is in the batch.
    """
    draw = random.Random(next(seeds))
    return [draw.randrange(5, MODEL.vocab_size) for _ in range(length)]
