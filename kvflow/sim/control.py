"""Start simulated engines as processes, load them and kill them."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from kvflow.errors import KvflowError, WireError
from kvflow.sim.channel import (
    MAX_LINE_BYTES,
    Abort,
    Audit,
    Audited,
    Command,
    DropCache,
    Ended,
    Event,
    Fatal,
    ProcessConfig,
    Ready,
    Stop,
    Submit,
    decode_event,
    encode_line,
)
from kvflow.sim.engine import EngineReport
from kvflow.sim.request import RequestResult, RequestSpec

log = structlog.get_logger()

STOP_WAIT_S = 10.0
# Importing and mapping come on top of the time that the process itself allows for attaching.
START_MARGIN_S = 20.0


class SimProcessError(KvflowError):
    """A simulated engine's process did not start, died, or does not answer."""


class SimProcess:
    """Hold one running engine process. Made by `launch_engine`."""

    def __init__(
        self, process: anyio.abc.Process, name: str, on_result: Callable[[RequestResult], None] | None
    ) -> None:
        self._process = process
        self._name = name
        self._on_result = on_result
        self._send_lock = anyio.Lock()
        self._changed = anyio.Event()
        self._results: dict[str, RequestResult] = {}
        self._reports: list[EngineReport] = []
        self._ready: Ready | None = None
        self._start_bound_s = START_MARGIN_S
        self.fatal: Fatal | None = None
        self.ended = False

    @property
    def ready(self) -> Ready:
        """Return what the process said when it became ready."""
        if self._ready is None:
            raise SimProcessError(f"engine {self._name} is not ready")
        return self._ready

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    async def submit(self, spec: RequestSpec) -> None:
        """Queue a request."""
        await self._send(Submit(request=spec))

    async def abort(self, request_id: str) -> None:
        """End a request early."""
        await self._send(Abort(request_id=request_id))

    async def drop_cache(self) -> None:
        """Make the engine forget the prefixes that no request uses."""
        await self._send(DropCache())

    async def result(self, request_id: str, timeout_s: float) -> RequestResult:
        """Wait for the end of a request, and forget it; raise SimProcessError when it does not come."""
        await self._wait(lambda: request_id in self._results, timeout_s, f"the end of request {request_id}")
        return self._results.pop(request_id)

    async def audit(self, timeout_s: float) -> EngineReport:
        """Return the engine's report after a check of its unused memory."""
        self._reports.clear()
        await self._send(Audit())
        await self._wait(lambda: bool(self._reports), timeout_s, "an audit")
        return self._reports.pop()

    async def quiet(self, timeout_s: float) -> EngineReport:
        """Audit until nothing is held any more, or until the time is over; return the last report."""
        end = anyio.current_time() + timeout_s
        while True:
            report = await self.audit(timeout_s)
            if not report.requests or anyio.current_time() >= end:
                return report
            await anyio.sleep(0.05)

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, None while the process runs."""
        return self._process.returncode

    async def stop(self) -> None:
        """Ask the process to end, and kill it when it does not."""
        with anyio.CancelScope(shield=True):
            try:
                await self._send(Stop())
                if self._process.stdin is not None:
                    await self._process.stdin.aclose()
            except (SimProcessError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                log.debug("sim_process_gone", engine=self._name)
            with anyio.move_on_after(STOP_WAIT_S) as bound:
                await self._process.wait()
            if bound.cancelled_caught:
                log.warning("sim_process_killed", engine=self._name, after_s=STOP_WAIT_S)
                await self.kill()

    async def kill(self) -> None:
        """Kill the process at once, as a crash would, and wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _send(self, command: Command) -> None:
        stdin = self._process.stdin
        if stdin is None or self.ended:
            raise SimProcessError(f"engine {self._name} has ended")
        try:
            async with self._send_lock:
                await stdin.send(encode_line(command))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise SimProcessError(f"engine {self._name} has ended") from error

    async def _wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with anyio.move_on_after(timeout_s):
            while not done():
                if self.fatal is not None:
                    raise SimProcessError(f"engine {self._name} died: {self.fatal.message}")
                if self.ended:
                    raise SimProcessError(f"engine {self._name} ended while {what} was awaited")
                await self._changed.wait()
            return
        raise SimProcessError(f"engine {self._name}: no word of {what} within {timeout_s:g} s")

    async def read_events(self) -> None:
        """Take in what the process says until it ends."""
        if self._process.stdout is None:
            raise SimProcessError(f"engine {self._name} has no stdout")
        lines = BufferedByteReceiveStream(self._process.stdout)
        try:
            while True:
                self._take(decode_event(await lines.receive_until(b"\n", MAX_LINE_BYTES)))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError):
            log.debug("sim_process_silent", engine=self._name)
        except (WireError, anyio.DelimiterNotFound) as error:
            log.error("sim_process_garbled", engine=self._name, error=str(error))
        finally:
            self.ended = True
            self._notify()

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                self._ready = event
            case Ended():
                self._results[event.result.request_id] = event.result
                if self._on_result is not None:
                    self._on_result(event.result)
            case Audited():
                self._reports.append(event.report)
            case Fatal():
                self.fatal = event
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def begin(self, config: ProcessConfig) -> None:
        """Hand the configuration over."""
        stdin = self._process.stdin
        if stdin is None:
            raise SimProcessError(f"engine {self._name} has no stdin")
        self._start_bound_s = config.attach_timeout_s + START_MARGIN_S
        try:
            await stdin.send(encode_line(config))
        except anyio.BrokenResourceError as error:
            raise SimProcessError(f"engine {self._name} ended as it started") from error

    async def wait_ready(self) -> None:
        """Wait until the engine takes requests; raise SimProcessError when it does not get there."""
        await self._wait(lambda: self._ready is not None, self._start_bound_s, "its start")


@asynccontextmanager
async def launch_engine(
    config: ProcessConfig, on_result: Callable[[RequestResult], None] | None = None, *, wait: bool = True
) -> AsyncIterator[SimProcess]:
    """Run an engine process while the block runs; its log goes to this process's stderr.

    Raises SimProcessError when it does not become ready. Without `wait` the caller has to call `wait_ready`: so several
    engines can start at once.
    """
    command = [sys.executable, "-m", "kvflow.sim.process"]
    process = await anyio.open_process(command, stderr=None)
    engine = SimProcess(process, config.engine.engine_id, on_result)
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.read_events)
            try:
                await engine.begin(config)
                if wait:
                    await engine.wait_ready()
                yield engine
            except Exception as error:  # noqa: BLE001 - raised below, where the task group does not wrap it
                failure = error
            finally:
                await engine.stop()
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        with anyio.CancelScope(shield=True):
            await process.aclose()
