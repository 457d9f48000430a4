"""Run a node of one's own as a subprocess, for demos and tests that must touch no cluster in use."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import msgspec
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from kvflow.config import ENV_PREFIX, SETTING_NAMES, Settings
from kvflow.errors import KvflowError

log = structlog.get_logger()

NODE_READY_S = 60.0
NODE_STOP_S = 20.0
MAX_READY_LINE = 64 * 1024
# Loopback TCP works everywhere; UCX's other transports need more of the machine than a demo may assume.
UCX_TLS = "tcp,self"


class SimNodeError(KvflowError):
    """The private node did not start or did not last."""


@asynccontextmanager
async def private_node(settings: Settings) -> AsyncIterator[Settings]:
    """Run `kvflow up` with these settings while the block runs, and yield the settings that reach it.

    The node goes when this process dies, however that happens. Raises SimNodeError when it does not become ready.
    """
    up = [sys.executable, "-m", "kvflow.cli", "up", "--json"]
    # The guard stops the node when the pipe that we hold open ends.
    command = [sys.executable, "-m", "kvflow.demo.guard", f"{NODE_STOP_S:g}", *up]
    process = await anyio.open_process(command, stderr=None, env=_environment(settings))
    try:
        yield msgspec.structs.replace(settings, nats_url=await _wait_ready(process))
    finally:
        with anyio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            with anyio.move_on_after(2 * NODE_STOP_S):
                await process.wait()
            if process.returncode is None:
                log.error("private_node_stuck", after_s=2 * NODE_STOP_S)
            await process.aclose()


async def _wait_ready(process: anyio.abc.Process) -> str:
    """Return the NATS URL that the node says when it is ready."""
    if process.stdout is None:
        raise SimNodeError("the node's stdout is not a pipe")
    lines = BufferedByteReceiveStream(process.stdout)
    with anyio.move_on_after(NODE_READY_S):
        try:
            line = await lines.receive_until(b"\n", MAX_READY_LINE)
            return msgspec.json.decode(line, type=_NodeReady).nats_url
        except (anyio.IncompleteRead, anyio.EndOfStream) as error:
            raise SimNodeError("the private node ended before it was ready", remedy="see its log above") from error
        except msgspec.DecodeError as error:
            raise SimNodeError(f"the private node said something else than that it is ready: {error}") from error
    raise SimNodeError(f"the private node was not ready after {NODE_READY_S:g} s", remedy="see its log above")


class _NodeReady(msgspec.Struct, frozen=True):
    nats_url: str


def _environment(settings: Settings) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    ours = {
        ENV_PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name in SETTING_NAMES
        if (value := getattr(settings, name)) != ""
    }
    return {"UCX_TLS": UCX_TLS} | kept | ours
