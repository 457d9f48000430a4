"""The runtime folder of a node: who owns it, and what it tells engines, router and tools on the same host.

The folder is private (0700). A node holds a lock on the folder itself for as long as it lives, so a folder that is not
locked is stale, whatever process ids say: that also holds between containers which share the folder but not their
process ids. The keeper of a private nats-server holds `broker.lock`, and outlives a killed node while it cleans up.
"""

import contextlib
import fcntl
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kvflow import __version__
from kvflow.broker import LOCK_NAME
from kvflow.errors import ConfigError, NodeError

NODE_FILE = "node.json"
SOCKET_FILE = "node.sock"
TEMPORARY_FILE = ".node.json.new"
OWN_FILES = (NODE_FILE, SOCKET_FILE, TEMPORARY_FILE)
OWNER_WAIT_S = 0.5  # a reader that checks whether a node lives holds the lock for an instant
KEEPER_WAIT_S = 8.0  # the keeper of a killed node stops its server and cleans up
MAX_NODE_FILE_BYTES = 64 * 1024
MAX_SOCKET_PATH = 107


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tell how to reach a running node; the content of `node.json`. `started_at` is wall-clock, for display."""

    pid: int
    cluster: str
    nats_url: str
    socket: str
    host: str = ""
    version: str = __version__
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RuntimeFolder:
    """Own a runtime folder; made by `claim`, given back by `release` or the end of a `with` block."""

    path: Path
    lock_fd: int

    @property
    def socket_path(self) -> Path:
        """Return where engine workers attach."""
        return self.path / SOCKET_FILE

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Create or take over the folder and clean what a dead node left.

        Raises NodeError when a live node owns it, ConfigError when the folder cannot be a private one.
        """
        path = path.absolute()
        if len(os.fsencode(path / SOCKET_FILE)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the runtime folder {path} has too long a name for a Unix socket",
                remedy="set a shorter --runtime-dir (KVFLOW_RUNTIME_DIR)",
            )
        began = time.monotonic()
        while True:
            _make_private(path)
            lock_fd = _try_lock(path)
            if lock_fd is not None:
                break
            if time.monotonic() - began > (OWNER_WAIT_S if _is_locked(path) else KEEPER_WAIT_S):
                raise _owned(path)
            time.sleep(0.05)
        folder = cls(path=path, lock_fd=lock_fd)
        folder._remove_files()
        return folder

    def publish(self, info: NodeInfo) -> None:
        """Write node.json (0600) so that readers see all of it or nothing."""
        temporary = self.path / TEMPORARY_FILE
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        temporary.replace(self.path / NODE_FILE)

    def release(self) -> None:
        """Remove what the node put here, the folder too when nothing else is in it, and let go of the lock."""
        self._remove_files()
        with contextlib.suppress(OSError):  # not empty, or already removed by the broker's keeper: both are fine
            self.path.rmdir()
        with contextlib.suppress(OSError):  # released before
            os.close(self.lock_fd)

    def _remove_files(self) -> None:
        for name in OWN_FILES:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_node(path: Path) -> NodeInfo:
    """Return what the live node of this folder tells; raise NodeError when there is none."""
    info = _read_info(path)
    if info is None or not _is_locked(path):
        raise NodeError(
            f"no kvflow node is running in {path}",
            remedy="start one with `kvflow up`, or pass --nats-url (KVFLOW_NATS_URL)",
        )
    return info


def remove_stale(path: Path) -> None:
    """Remove what a node left that was killed; do nothing when another node or a keeper uses the folder."""
    path = path.absolute()
    # A dying process gives up its descriptors in no certain order: the lock may be held for an instant longer.
    deadline = time.monotonic() + OWNER_WAIT_S
    while path.exists():
        lock_fd = _try_lock(path)
        if lock_fd is not None:
            RuntimeFolder(path=path, lock_fd=lock_fd).release()
            return
        if time.monotonic() >= deadline:
            return
        time.sleep(0.02)


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def _read_info(path: Path) -> NodeInfo | None:
    try:
        with (path / NODE_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_NODE_FILE_BYTES), type=NodeInfo)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NodeError(
            f"cannot read {path / NODE_FILE}: {error.strerror}", remedy="run as the user who runs `kvflow up`"
        ) from error
    except msgspec.DecodeError as error:
        raise NodeError(f"{path / NODE_FILE} is damaged: {error}", remedy="restart `kvflow up`") from error


def _make_private(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, "not a directory", str(path))
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot use the runtime folder {path}: {error.strerror}",
            remedy="set --runtime-dir (KVFLOW_RUNTIME_DIR) to a folder that this user may create",
        ) from error
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"the runtime folder {path} belongs to user {found.st_uid}, not to us ({os.getuid()})",
            remedy="set --runtime-dir (KVFLOW_RUNTIME_DIR) to a folder of your own",
        )


def _try_lock(path: Path) -> int | None:
    """Lock the folder and return the descriptor; None while a node or a dead node's keeper uses it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # a keeper has just removed it
        return None
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error.strerror}", remedy="set another --runtime-dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino and not _is_locked(path / LOCK_NAME):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held by a node, or removed between open and lock: the caller tries again
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _owned(path: Path) -> NodeError:
    with contextlib.suppress(NodeError):
        info = _read_info(path)
        if info is not None:
            return _running(path, f" (pid {info.pid} on {info.host})")
    return _running(path, "")


def _running(path: Path, which: str) -> NodeError:
    return NodeError(
        f"another kvflow node{which} runs in {path}",
        remedy="stop it, or give this one its own --runtime-dir or --cluster",
    )
