"""Start, watch and stop one child process of the node."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import msgspec
import structlog

from kvflow.config import CONFIG_ENV, ENV_PREFIX, HALT_SHARE, SETTING_NAMES, Settings
from kvflow.errors import NodeError
from kvflow.node.lifeline import BEAT_S, MAX_REPORT_BYTES, Supervision, decode_report

log = structlog.get_logger()

STDERR_FD = 2
KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Describe a child: the actors it runs, its settings, and what an attached engine handed over.

    `held_fds` are kept open by the child for as long as it lives, and used for nothing else.
    """

    name: str
    actors: tuple[str, ...]
    settings: Settings
    profile: bytes = b""
    memory_fds: tuple[int, ...] = ()
    held_fds: tuple[int, ...] = ()


def settings_environment(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with every setting spelled out: a child reads exactly these, and secrets stay out of `ps`."""
    ours = {ENV_PREFIX + name.upper() for name in SETTING_NAMES}
    environment = {name: value for name, value in base.items() if name not in ours and name != CONFIG_ENV}
    for name in SETTING_NAMES:
        value = getattr(settings, name)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text:
            environment[ENV_PREFIX + name.upper()] = text
    return environment


@dataclass(slots=True)
class ChildProcess:
    """Hold a running child. As an async context manager it leaves no process and no descriptor behind."""

    spec: ProcessSpec
    process: anyio.abc.Process
    stop_grace_s: float
    _lifeline: int
    _report: int
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    async def spawn(cls, spec: ProcessSpec, *, stop_grace_s: float) -> Self:
        """Start `kvflow run` for the spec, in its own session so that a terminal's Ctrl-C reaches only the node."""
        child_ends: list[int] = []
        parent_ends: list[int] = []
        try:
            lifeline_read, lifeline_write = os.pipe()
            child_ends.append(lifeline_read)
            parent_ends.append(lifeline_write)
            report_read, report_write = os.pipe()
            child_ends.append(report_write)
            parent_ends.append(report_read)
            os.set_blocking(report_read, False)
            profile_fd = -1
            if spec.profile:
                profile_fd = _in_memory_file(spec.profile)
                child_ends.append(profile_fd)
            supervision = Supervision(
                lifeline=lifeline_read, report=report_write, profile=profile_fd, memory=spec.memory_fds
            )
            process = await anyio.open_process(
                _command(spec.actors, supervision),
                stdin=subprocess.DEVNULL,
                stdout=STDERR_FD,  # libraries that print must not mix with the node's own output
                stderr=STDERR_FD,
                env=settings_environment(spec.settings, os.environ),
                pass_fds=(*child_ends, *spec.memory_fds, *spec.held_fds),
                start_new_session=True,
            )
        except OSError as error:
            _close_all(parent_ends)
            raise NodeError(f"cannot start the {spec.name} process: {error.strerror}") from error
        except BaseException:
            _close_all(parent_ends)
            raise
        finally:
            _close_all(child_ends)
        log.debug("child_started", child=spec.name, pid=process.pid)
        return cls(spec, process, stop_grace_s, lifeline_write, report_read)

    async def ready(self, timeout_s: float) -> None:
        """Wait until the child reports that it works; raise NodeError with its reason when it does not."""
        try:
            with anyio.fail_after(timeout_s):
                line = await self._read_report()
                if not line:
                    code = await self.process.wait()
                    raise NodeError(
                        f"the {self.spec.name} process ended at start-up with {describe_exit(code)}",
                        remedy="its last log lines say why",
                    )
        except TimeoutError:
            raise NodeError(
                f"the {self.spec.name} process was not ready within {timeout_s:g} s",
                remedy="look at its log lines, or allow more time",
            ) from None
        report = decode_report(line)
        if not report.ready:
            error = NodeError(f"the {self.spec.name} process cannot start: {report.message}", remedy=report.remedy)
            error.exit_code = report.exit_code  # what ended the child tells more than that a child ended
            raise error

    async def wait(self) -> int:
        """Wait for the child to end and return its exit code, negative for a signal; kill one that stands still.

        Others take a rank that stands still for lost, and use the blocks again that it may still read and write. It
        must not wake up after that.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_beats)
            code = await self.process.wait()
            group.cancel_scope.cancel()
        return code

    async def _watch_beats(self) -> None:
        patience_s = halt_patience_s(self.spec.settings)
        while True:
            with anyio.move_on_after(patience_s) as silence:
                await anyio.wait_readable(self._report)
            # Asked again, as this process may have stood still itself while beats came in.
            try:
                if not os.read(self._report, MAX_REPORT_BYTES):
                    return  # the child is ending
            except BlockingIOError:
                if silence.cancelled_caught:
                    log.error("child_stands_still", child=self.spec.name, pid=self.process.pid, after_s=patience_s)
                    self.kill()
                    return
            await anyio.sleep(BEAT_S)

    async def stop(self) -> None:
        """End the child: SIGTERM, then SIGKILL when the grace is over. A child that has ended is fine."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self._signal(kill=False)
                with anyio.move_on_after(self.stop_grace_s):
                    await self.process.wait()
            if self.process.returncode is None:
                log.warning("child_killed", child=self.spec.name, pid=self.process.pid, grace_s=self.stop_grace_s)
                self._signal(kill=True)
                with anyio.move_on_after(KILL_WAIT_S):
                    await self.process.wait()
        _close_all([self._lifeline, self._report])
        self._lifeline = self._report = -1

    def kill(self) -> None:
        """End the child at once; `stop` still has to be awaited."""
        self._signal(kill=True)

    def _signal(self, *, kill: bool) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
            if kill:
                self.process.kill()
            else:
                self.process.terminate()

    async def _read_report(self) -> bytes:
        while b"\n" not in self._received and len(self._received) < MAX_REPORT_BYTES:
            await anyio.wait_readable(self._report)
            try:
                chunk = os.read(self._report, 4096)
            except BlockingIOError:
                continue
            if not chunk:
                return b""
            self._received += chunk
        return bytes(self._received.partition(b"\n")[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def halt_patience_s(settings: Settings) -> float:
    """Return how long a child may stand still: until its card may have expired, and half of the quarantine after it."""
    return HALT_SHARE * settings.card_ttl_s + settings.quarantine_s / 2


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _command(actors: tuple[str, ...], supervision: Supervision) -> list[str]:
    encoded = msgspec.json.encode(supervision).decode()
    return [sys.executable, "-m", "kvflow.cli", "run", *actors, "--supervision", encoded]


def _in_memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("kvflow-profile", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
