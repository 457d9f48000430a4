"""Run real `kvflow up` processes, with fake actors in their children, and talk to their attach socket."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from kvflow.ids import new_incarnation
from kvflow.messages import (
    AttachEngine,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    KvView,
    ModelFingerprint,
    Role,
    decode,
    encode,
)
from kvflow.messages.codec import AnyMessage

WAIT_S = 60.0  # an upper bound: a loaded machine takes long to start Python processes
MEMORY_BYTES = 64 * 1024

# Replaces the actors in every Python process that has its folder on PYTHONPATH. What an actor should do is told by the
# environment (control) or by the engine's `api_url` (data). A data process writes its pid into the shared memory.
FAKE_ACTORS = """
import os, signal, struct, sys, time, types, mmap

def _control():
    module = types.ModuleType("kvflow.actors.control")
    async def run_control(*, bus, settings, actors, ready):
        import anyio
        mode = os.environ.get("FAKE_CONTROL", "")
        if mode == "die":
            os._exit(9)
        if mode == "hang":
            await anyio.sleep_forever()
        ready()
        print("control_runs", *actors, file=sys.stderr, flush=True)
        if mode == "die_later":
            await anyio.sleep(0.05)
            os._exit(9)
        await anyio.sleep_forever()
    module.run_control = run_control
    return module

def _rank():
    module = types.ModuleType("kvflow.actors.rank")
    async def run_data_process(settings, profile, memory_fds, segment_lengths, *, ready):
        import anyio
        from kvflow.errors import TransferError
        mode = profile.api_url
        if mode == "no_nixl":
            raise TransferError("NIXL cannot be imported: no such backend", remedy="install kvflow[nixl]")
        if mode == "die":
            os._exit(9)
        memory = mmap.mmap(memory_fds[0], segment_lengths[0])
        memory[0:4] = struct.pack("<I", os.getpid())
        memory[4] += 1
        if mode == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if mode != "slow":
            ready()
        if mode == "die_later":
            await anyio.sleep(0.05)
            os._exit(9)
        if mode == "stubborn":
            ready()
            while True:
                time.sleep(1)
        try:
            await anyio.sleep_forever()
        finally:
            memory[8] = 1
    module.run_data_process = run_data_process
    return module

class Finder:
    made = {"kvflow.actors.control": _control, "kvflow.actors.rank": _rank}
    def find_spec(self, name, path=None, target=None):
        if name not in self.made:
            return None
        import importlib.machinery
        return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return self.made[spec.name]()
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""


def eventually(check: Callable[[], Any], timeout_s: float = WAIT_S, what: str = "") -> Any:
    """Return the first true result of `check`, or fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = check()
        if result:
            return result
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what or check}"
        time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process runs no more; its new parent may take its time to collect it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """Return the files in /dev/shm that the processes have open or mapped."""
    found: set[Path] = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        names = [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
        names += [str(entry.readlink()) for entry in (folder / "fd").iterdir() if entry.is_symlink()]
        found |= {Path(name) for name in names if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}
    return found


def all_end(processes: list[psutil.Process]) -> None:
    """Wait until none of the processes runs."""
    for process in processes:
        eventually(partial(has_ended, process), what=f"{process} ends")


def kvflow_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without the caller's kvflow settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFLOW_")}
    return clean | dict(extra or {})


def run_cli(
    *arguments: str, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run one kvflow command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvflow.cli", *arguments],
        capture_output=True, text=True, timeout=timeout_s, env=kvflow_environment(env), check=False,
    )  # fmt: skip


@dataclass
class NodeUnderTest:
    """Hold a `kvflow up` process."""

    process: "subprocess.Popen[str]"
    runtime: Path
    log: Path
    ready: dict[str, Any]

    @property
    def pids(self) -> dict[str, int]:
        return dict(self.ready["pids"])

    @property
    def socket_path(self) -> Path:
        return Path(self.ready["socket"])

    def family(self) -> list[psutil.Process]:
        """Return the node's process and everything below it."""
        node = psutil.Process(self.process.pid)
        return [node, *node.children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def log_text(self) -> str:
        return self.log.read_text()


def read_line(stream: IO[str] | None, timeout_s: float = WAIT_S) -> str:
    """Return the next line, or nothing when none comes in time."""
    assert stream is not None
    readable, _, _ = select.select([stream], [], [], timeout_s)
    return stream.readline() if readable else ""


def make_profile(
    engine_id: str = "e1", *, incarnation: str = "", rank: int = 0, ranks: int = 1,
    roles: tuple[Role, ...] = ("source", "target"), mode: str = "", segment: int = 0,
) -> EngineProfile:  # fmt: skip
    """Describe a tiny engine rank; `mode` tells the fake data process what to do."""
    view = KvView(
        layer="l0", part="kv", group=0, segment=segment, offset=0, blocks=8, block_tokens=16, heads=1, head_start=0,
        total_heads=1, row_bytes=64, block_stride=1024, head_stride=1024, token_stride=64,
    )  # fmt: skip
    geometry = KvGeometry(dtype="bfloat16", num_blocks=8, groups=(KvGroup(block_tokens=16),), views=(view,))
    return EngineProfile(
        engine=EngineRef(engine_id=engine_id, incarnation=incarnation or new_incarnation()), rank=rank, ranks=ranks,
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, roles=roles, host="h", model="m", geometry=geometry,
        fingerprint=ModelFingerprint(fields=()), api_url=mode,
    )  # fmt: skip


class FakeWorker:
    """Attach to a node as an engine's worker does."""

    def __init__(self, path: Path, profile: EngineProfile | None = None) -> None:
        self.profile = profile or make_profile()
        self.memory = os.memfd_create("kv-test")
        os.ftruncate(self.memory, MEMORY_BYTES)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(str(path))

    def send(self, lengths: tuple[int, ...] = (MEMORY_BYTES,), fds: list[int] | None = None) -> None:
        content = encode(AttachEngine(profile=self.profile, segment_lengths=lengths))
        self.send_raw(struct.pack("<I", len(content)) + content, [self.memory] if fds is None else fds)

    def send_raw(self, data: bytes, fds: list[int]) -> None:
        if fds:
            sent = socket.send_fds(self.socket, [data[:4]], fds)
            data = data[sent:]
        self.socket.sendall(data)

    def receive(self) -> AnyMessage:
        header = self.receive_exactly(4)
        return decode(self.receive_exactly(struct.unpack("<I", header)[0]))

    def receive_exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = self.socket.recv(size - len(content))
            assert piece, "the node closed the connection"
            content += piece
        return content

    def attach(self) -> AnyMessage:
        self.send()
        return self.receive()

    def ended(self) -> bool:
        """Wait for the node to close the connection."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def data_pid(self) -> int:
        """Return the pid that the data process wrote into the shared memory."""
        return int(struct.unpack("<I", os.pread(self.memory, 4, 0))[0])

    def starts(self) -> int:
        return os.pread(self.memory, 1, 4)[0]

    def stopped_cleanly(self) -> bool:
        return os.pread(self.memory, 1, 8)[0] == 1

    def close(self) -> None:
        self.socket.close()
        os.close(self.memory)


class Nodes:
    """Start nodes with a folder each, and end whatever is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._workers: list[FakeWorker] = []
        self._fakes = folder / "fakes"
        self._fakes.mkdir()
        (self._fakes / "sitecustomize.py").write_text(FAKE_ACTORS)

    def up(
        self, *arguments: str, name: str = "n", fake: bool = True, env: Mapping[str, str] | None = None,
        expect_ready: bool = True,
    ) -> NodeUnderTest:  # fmt: skip
        """Start `kvflow up --json` and wait for its ready line."""
        runtime = self._folder / name
        log = self._folder / f"{name}.log"
        environment = kvflow_environment(env)
        if fake:
            environment["PYTHONPATH"] = str(self._fakes)
        command = [sys.executable, "-m", "kvflow.cli", "up", "--json", "--runtime-dir", str(runtime), *arguments]
        with log.open("ab") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        self._started.append(process)
        line = read_line(process.stdout) if expect_ready else ""
        assert line or not expect_ready, f"not ready:\n{log.read_text()}"
        return NodeUnderTest(process, runtime, log, json.loads(line) if line else {})

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start another kvflow command with fake actors; its stderr goes to a file."""
        environment = kvflow_environment({"PYTHONPATH": str(self._fakes)})
        with (self._folder / "command.log").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvflow.cli", *arguments],
                stdout=subprocess.DEVNULL, stderr=stderr, text=True, env=environment,
            )  # fmt: skip
        self._started.append(process)
        return process

    def command_log(self) -> str:
        """Return what the command wrote to stderr."""
        return (self._folder / "command.log").read_text()

    def worker(self, node: NodeUnderTest, profile: EngineProfile | None = None) -> FakeWorker:
        """Return a worker that is connected, not yet attached."""
        worker = FakeWorker(node.socket_path, profile)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End what the test left, children first by way of their lifelines."""
        for worker in self._workers:
            worker.close()
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(WAIT_S)
            if process.stdout is not None:
                process.stdout.close()
