"""Start, watch and stop the process trees of demo, tests and benchmarks, each behind its own guard."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from kvflow.errors import ConfigError

LOG_TAIL_LINES = 30
POLL_S = 0.1


class GuardedProcess:
    """Own one command, everything that it starts, and its log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = 15.0,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._env = dict(os.environ if env is None else env)
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Return whether the command has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the command's own pid; raise ConfigError when it does not run."""
        from kvflow.demo.guard import children_of

        children = children_of(self._process.pid) if self._process is not None and self.running else []
        if not children:
            raise ConfigError(f"{self.name} does not run")
        return children[0]

    def start(self) -> None:
        """Start the command in a session of its own; raise ConfigError when it was started before."""
        if self._process is not None:
            raise ConfigError(f"{self.name} was started before")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-m", "kvflow.demo.guard", str(self._grace_s)]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*guard, *self._command],
                stdin=subprocess.PIPE,  # its write end lives and dies with us: that is how the guard sees our end
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until ready; raise ConfigError with the end of the log when the command ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = self._process.returncode if self._process is not None else "none"
                raise ConfigError(
                    f"{self.name} ended with code {code} before it was ready; {self.log} ends:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.name} was not ready after {timeout_s:.0f} s; {self.log} ends:\n{self.tail()}")
            time.sleep(POLL_S)

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, past its guard; a command that has ended is left alone."""
        with contextlib.suppress(ConfigError, ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the whole tree and wait for its end; calling it again does nothing."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            _close(process.stdin)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._grace_s + 15.0)
        except subprocess.TimeoutExpired:
            # The guard leads its session and its group: this ends it and all that did not leave the group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5.0)

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        try:
            with self.log.open("rb") as source:
                source.seek(0, os.SEEK_END)
                source.seek(max(0, source.tell() - 16_384))
                text = source.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
