"""Find the node of this host: its `node.json` in the runtime folder says how to reach the bus."""

import os
import stat
from pathlib import Path

import msgspec
import structlog

from kvflow.config import Settings

log = structlog.get_logger()

NODE_FILE = "node.json"
SOCKET_FILE = "node.sock"
MAX_NODE_FILE_BYTES = 64 * 1024


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what the connector needs of `node.json`."""

    nats_url: str
    cluster: str = ""
    pid: int = 0


def socket_path(settings: Settings) -> Path:
    """Return where the node of this host listens for engine workers."""
    return settings.runtime_path() / SOCKET_FILE


def read_node_url(settings: Settings) -> str:
    """Return the bus URL of this host's node, or an empty string while there is no node to trust."""
    try:
        descriptor = os.open(settings.runtime_path() / NODE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            # Somebody else could have put it there to make the engine talk to a bus of theirs.
            log.warning("node_file_ignored", path=str(settings.runtime_path() / NODE_FILE), owner=found.st_uid)
            return ""
        content = file.read(MAX_NODE_FILE_BYTES)
    try:
        node = msgspec.json.decode(content, type=NodeFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return node.nats_url if node.cluster in {"", settings.cluster} else ""
