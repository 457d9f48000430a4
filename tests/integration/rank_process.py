"""Serve one rank in a process of its own, as the node does: `rank_process.py PROFILE SETTINGS LENGTH FD READY_FD`."""

import os
import sys

import anyio
import msgspec

from kvflow.actors.rank import run_data_process
from kvflow.config import Settings
from kvflow.messages import EngineProfile


def main() -> None:
    """Decode the command line and serve until killed."""
    profile = msgspec.json.decode(sys.argv[1], type=EngineProfile)
    settings = msgspec.json.decode(sys.argv[2], type=Settings)
    length, fd, ready_fd = (int(argument) for argument in sys.argv[3:])

    def ready() -> None:
        os.write(ready_fd, b"ready")

    async def serve() -> None:
        await run_data_process(settings, profile, [fd], [length], ready=ready)

    anyio.run(serve)


if __name__ == "__main__":
    main()
