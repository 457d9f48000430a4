"""One thread with an event loop per process: everything that waits happens there, never on an engine's thread.

Engine threads hand letters over through a deque and one wake-up per batch. The thread keeps a bus connection for ever;
services run once per connection and are started again, with back-off, when they fail.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import structlog

from kvflow.bus.port import Bus, BusState, StateHandler
from kvflow.config import Settings
from kvflow.connector.node_file import read_node_url
from kvflow.connector.port import Letter
from kvflow.errors import BusError, KvflowError
from kvflow.messages import Message, encode

log = structlog.get_logger()

OUTBOX_LIMIT = 65_536
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
NODE_POLL_S = 1.0
FAIRNESS = 64  # letters sent in a row before other tasks get a turn
FAREWELL_S = 1.0
CLOSE_S = 5.0

Connect = Callable[[Settings, str, StateHandler], Awaitable[Bus]]
Service = Callable[[Bus], Coroutine[Any, Any, None]]
Task = Callable[[], Coroutine[Any, Any, None]]


async def _connect_nats(settings: Settings, name: str, on_state: StateHandler) -> Bus:
    from kvflow.bus.connect import connect_bus

    return await connect_bus(settings, name=name, on_state=on_state)


class Bridge:
    """Carry letters from engine threads to the bus, and run what needs an event loop."""

    def __init__(self, settings: Settings, *, name: str = "engine", connect: Connect = _connect_nats) -> None:
        """Prepare the bridge; nothing runs before `start`."""
        self.settings = settings
        self._name = name
        self._connect = connect
        self._outbox: deque[tuple[str, Letter]] = deque()
        self._wake_pending = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bus: Bus | None = None
        self._down_since: float | None = time.monotonic()
        self._services: dict[str, Service] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._posted = asyncio.Event()
        self._have_bus = asyncio.Event()
        self._disturbed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._session: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()

    # Called on engine threads.

    def start(self) -> None:
        """Start the thread, or join its users when it runs."""
        with self._lock:
            self._users += 1
            if self._thread is not None:
                return
            self._loop = _new_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="kvflow-bridge", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Leave; the last user stops the thread, within CLOSE_S."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._thread is None or self._loop is None:
                return
            thread, loop = self._thread, self._loop
            self._thread = None
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(self._stop)
        thread.join(CLOSE_S)
        if thread.is_alive():
            log.error("bridge_did_not_stop", after_s=CLOSE_S)

    @property
    def connected(self) -> bool:
        """Return whether the bus can be reached right now."""
        bus = self._bus
        return bus is not None and bus.connected

    def down_for(self) -> float:
        """Return for how many seconds the bus has been unreachable; 0 while it is there."""
        since = self._down_since
        return 0.0 if since is None else time.monotonic() - since

    def post(self, subject: str, letter: Letter) -> None:
        """Hand a letter over; one wake-up serves all letters posted until the bridge thread runs."""
        outbox = self._outbox
        if len(outbox) >= OUTBOX_LIMIT:
            self._drop(outbox.popleft()[0], "the outbox is full")
        outbox.append((subject, letter))
        if not self._wake_pending:
            self._wake_pending = True
            self.call(self._wake)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the bridge thread soon; does nothing when the bridge does not run."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: the engine is shutting down
                loop.call_soon_threadsafe(function)

    def serve(self, name: str, service: Service) -> None:
        """Run a service once per bus connection until the bridge closes."""
        self.call(lambda: self._add_service(name, service))

    def spawn(self, name: str, task: Task) -> None:
        """Run a task until the bridge closes, whether the bus is there or not."""
        self.call(lambda: self._launch(self._running, name, task))

    # Everything below runs on the bridge thread.

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._main())
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _main(self) -> None:
        self._launch(self._running, "connection", self._stay_connected)
        self._launch(self._running, "outbox", self._send_all)
        await self._stopped.wait()
        if self._bus is not None:
            await self._flush(self._bus)
        # Tasks first: what they send while they end (a rank that leaves) still finds the bus.
        await _cancel(self._running, keep="connection")
        await _cancel(self._session)
        await self._leave_bus()
        await _cancel(self._running)

    async def _flush(self, bus: Bus) -> None:
        """Send what is left, as far as a moment suffices."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._outbox:
                    await self._send(bus, *self._outbox.popleft())
        except TimeoutError:
            self.counters["dropped"] += len(self._outbox)

    def _stop(self) -> None:
        self._stopped.set()

    def _wake(self) -> None:
        self._wake_pending = False  # before the outbox is looked at, so that no letter is left without a wake-up
        self._posted.set()

    def _add_service(self, name: str, service: Service) -> None:
        self._services[name] = service
        if self._bus is not None:
            self._launch_service(name, service, self._bus)

    def _launch_service(self, name: str, service: Service, bus: Bus) -> None:
        self._launch(self._session, name, lambda: service(bus))

    def _launch(self, group: set[asyncio.Task[None]], name: str, task: Task) -> None:
        running = asyncio.get_running_loop().create_task(self._guard(name, task), name=name)
        group.add(running)
        running.add_done_callback(group.discard)

    async def _guard(self, name: str, task: Task) -> None:
        delay = FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                await task()
                return
            except KvflowError as error:
                self.counters[f"failed_{name}"] += 1
                log.warning("bridge_service_failed", service=name, error=str(error), retry_s=round(delay, 2))
            except Exception:
                self.counters[f"failed_{name}"] += 1
                log.exception("bridge_service_crashed", service=name, retry_s=round(delay, 2))
            await asyncio.sleep(delay)
            lasted = time.monotonic() - began
            delay = FIRST_RETRY_S if lasted > 2 * LONGEST_RETRY_S else min(2 * delay, LONGEST_RETRY_S)

    # The bus.

    async def _stay_connected(self) -> None:
        delay, told = FIRST_RETRY_S, False
        while True:
            problem = ""
            url = self.settings.nats_url or read_node_url(self.settings)
            if url:
                settings = msgspec.structs.replace(self.settings, nats_url=url)
                try:
                    bus = await self._connect(settings, f"kvflow-{self._name}", self._note_state)
                except BusError as error:
                    problem = str(error)
                else:
                    log.info("bridge_connected", cluster=self.settings.cluster)
                    delay, told = FIRST_RETRY_S, False
                    await self._hold_session(bus, url)
                    continue
            else:
                problem = f"no node runs for {self.settings.runtime_path()}"
            if not told:
                told = True
                log.warning(
                    "bridge_waits", problem=problem, remedy="start `kvflow up` on this host or set nats_url",
                    note="prompts are computed without transfers until then",
                )  # fmt: skip
            await asyncio.sleep(delay)
            delay = min(2 * delay, NODE_POLL_S if not self.settings.nats_url else LONGEST_RETRY_S)

    async def _hold_session(self, bus: Bus, url: str) -> None:
        """Run the services on a connection until another node has taken over or the connection is closed for good."""
        self._bus = bus
        self._down_since = None
        self._have_bus.set()
        for name, service in self._services.items():
            self._launch_service(name, service, bus)
        closed = False
        while not closed:
            await self._disturbed.wait()
            self._disturbed.clear()
            while not bus.connected:
                self._down_since = self._down_since or time.monotonic()
                await asyncio.sleep(NODE_POLL_S)
                other = "" if self.settings.nats_url else read_node_url(self.settings)
                if other and other != url:
                    log.info("bridge_moves", note="another node has taken over")
                    closed = True
                    break
            else:
                self._down_since = None
        await _cancel(self._session)
        await self._leave_bus()

    async def _leave_bus(self) -> None:
        bus, self._bus = self._bus, None
        self._have_bus.clear()
        self._down_since = self._down_since or time.monotonic()
        if bus is None:
            return
        try:
            async with asyncio.timeout(FAREWELL_S * 3):
                await bus.close()
        except (BusError, TimeoutError) as error:
            log.warning("bus_did_not_close", error=str(error) or "timeout")

    def _note_state(self, state: BusState, detail: str) -> None:
        if self._stopped.is_set():
            return
        if state in {"disconnected", "closed"}:
            self._down_since = self._down_since or time.monotonic()
            self._disturbed.set()
            if self._bus is not None:  # else we left by ourselves
                # No warning: the bus gives one, unless it was closed on purpose.
                log.info("bridge_disconnected", detail=detail)
        elif state == "reconnected":
            self._down_since = None

    async def _send_all(self) -> None:
        outbox = self._outbox
        while True:
            await self._posted.wait()
            self._posted.clear()
            sent = 0
            while outbox:
                bus = self._bus
                if bus is None:
                    await self._have_bus.wait()
                    continue
                await self._send(bus, *outbox.popleft())
                sent += 1
                if sent % FAIRNESS == 0:
                    await asyncio.sleep(0)

    async def _send(self, bus: Bus, subject: str, letter: Letter) -> None:
        try:
            message = letter if isinstance(letter, Message) else letter()
            if message is None:
                self.counters["unneeded"] += 1
                return
            await bus.publish(subject, encode(message))
            self.counters["sent"] += 1
        except (KvflowError, ValueError, TypeError) as error:
            # One letter that cannot be sent must not hold up the next; the bounds of the transfer end it.
            self._drop(subject, str(error))

    def _drop(self, subject: str, why: str) -> None:
        self.counters["dropped"] += 1
        dropped = self.counters["dropped"]
        if dropped & (dropped - 1) == 0:
            log.error("letter_dropped", subject=subject, why=why, dropped=dropped)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _cancel(tasks: set[asyncio.Task[None]], keep: str = "") -> None:
    ending = [task for task in tasks if task.get_name() != keep]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=FAREWELL_S * 3)
