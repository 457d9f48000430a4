"""A target agent in a process of its own; started by test_agent_processes.py, driven over stdin and stdout.

Prints one JSON line per step: its metadata (hex), then for each notification whether all of its bytes had arrived.
"""

import asyncio
import json
import sys
import time

import numpy as np

from kvflow.config import Settings
from kvflow.dataplane.memory import create_shared
from kvflow.dataplane.nixl_agent import NixlAgent
from kvflow.dataplane.port import AgentEvent, Notified


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def main(size: int, poll_interval_s: float) -> None:
    """Listen until stdin ends."""
    with create_shared(size) as memory:

        def sink(event: AgentEvent) -> None:
            at = time.monotonic()
            # Looked at right here, since "on arrival" is what the test is about.
            if isinstance(event, Notified):
                kind, value = event.payload.decode().split(":")
                arrived = kind != "fill" or bool((memory.view == np.uint8(int(value))).all())
                say(payload=event.payload.decode(), arrived=arrived, at=at)

        settings = Settings(poll_interval_s=poll_interval_s)
        agent = NixlAgent(
            f"target-{sys.argv[3]}", [memory.range], sink, loop=asyncio.get_running_loop(), settings=settings
        )  # fmt: skip
        agent.listen(120.0)
        say(metadata=agent.metadata().hex(), address=agent.segments[0].address)
        await asyncio.to_thread(sys.stdin.read)
        await agent.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
