"""The thread that owns a transfer engine: it takes commands, drives progress and reports events in batches.

The engines behind a `Driver` are not thread-safe and block at times, so one thread makes every call. It sleeps on its
command queue. Only while something is in flight, or somebody asked to listen, does the sleep have an end: short right
after something happened, longer when nothing does.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from kvflow.config import HALT_SHARE, Settings
from kvflow.dataplane.geometry import check_runs, locate
from kvflow.dataplane.port import AgentEvent, Notified, NotifyFailed, PieceDone, PieceFailed, Plan, Runs
from kvflow.errors import TransferError
from kvflow.messages import KvSegment

FAST_S = 0.02  # how long after the last event the short poll interval applies
SLOW_INTERVAL_S = 0.001
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0  # between connections to a peer that keeps failing: each may cost descriptors
WARM_S = 0.5  # how long a new connection is driven, so that its first piece finds it established

Emit = Callable[[Sequence[AgentEvent]], None]
Command = Callable[[], None]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold the checked runs of one piece, with the index of the segment that holds each side of each run."""

    runs: Runs
    local_segment: NDArray[np.intp]
    remote_segment: NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Peer:
    """Hold what is known of a peer; `connected` is false after a failure, until a use after `retry_at` connects again.

    `failures` counts those since the last piece that ended well.
    """

    name: str
    blob: bytes
    segments: tuple[KvSegment, ...]
    connected: bool = False
    last_done: float = 0.0
    last_post: float = 0.0
    failures: int = 0
    retry_at: float = 0.0


class Driver(Protocol):
    """Call one transfer engine. Handles are opaque; TransferError is the only error that methods raise."""

    def open(self, segments: Sequence[KvSegment]) -> bytes:
        """Start the engine, register memory and return what peers need to connect; after an error nothing is left."""

    def connect(self, peer: Peer) -> None:
        """Make a peer reachable."""

    def disconnect(self, peer: Peer) -> None:
        """Tear the connection down, so that nothing more is sent; never raises."""

    def prepare(self, peer: Peer, batch: Batch, notification: bytes) -> Any:
        """Return a handle for a WRITE that has not started."""

    def post(self, handle: Any) -> bool:
        """Start a WRITE; return whether it is done already. After an error some of it may be in flight."""

    def poll(self, handle: Any) -> bool:
        """Drive progress; return whether the WRITE is done. After an error some of it may be in flight."""

    def release(self, handle: Any) -> None:
        """Free a handle, cancelling what can be cancelled; never raises."""

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a notification of its own."""

    def receive(self) -> list[tuple[str, bytes]]:
        """Drive progress and return new (peer, payload) notifications."""

    def close(self) -> None:
        """Deregister memory and stop the engine; never raises."""


@dataclass(slots=True, eq=False)
class _Piece:
    number: int
    peer: Peer
    handle: Any
    size: int
    descriptors: int
    planning_s: float
    posting_s: float
    posted_at: float
    failed: str = ""
    report_at: float = 0.0


class Owner:
    """Run one driver on one thread."""

    def __init__(
        self, name: str, driver: Driver, segments: Sequence[KvSegment], emit: Emit, settings: Settings
    ) -> None:
        """Start the thread; `emit` is called on it."""
        self._driver = driver
        self._segments = tuple(segments)
        self._emit = emit
        self._settings = settings
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._peers: dict[str, Peer] = {}
        self._flying: list[_Piece] = []
        self._fenced: list[_Piece] = []
        self._events: list[AgentEvent] = []
        self._listen_until = 0.0
        self._active_at = 0.0
        self._progressed_at = 0.0
        self._turned_at = time.monotonic()
        self._halt_s = HALT_SHARE * settings.card_ttl_s
        self._closing_at: float | None = None
        self._lock = threading.Lock()  # guards `_ended` against submits from other threads
        self._ended = False
        self.opened: Future[bytes] = Future()
        self.thread = threading.Thread(target=self._run, name=f"kvflow-{name}", daemon=True)
        self.thread.start()

    # Called from any thread.

    def submit(self, command: Command) -> bool:
        """Queue a command for the owner thread; return False when it has ended."""
        with self._lock:
            if self._ended:
                return False
            self._commands.put(command)
            return True

    # Commands: called on the owner thread.

    def add_peer(self, peer: Peer) -> None:
        """Connect to a peer; raise TransferError when that fails or another peer has this name."""
        known = self._peers.get(peer.name)
        if known is not None and known.blob != peer.blob:
            raise TransferError(f"another peer is called {peer.name}", remedy="remove the old one first")
        if known is None or not known.connected:
            self._connect(known or peer)
            self._peers.setdefault(peer.name, peer)

    def remove_peer(self, name: str) -> None:
        """Forget a peer; pieces in flight to it fail."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._break(peer, "the peer was removed")

    def write(self, number: int, name: str, plan: Plan, notification: bytes, asked_at: float) -> None:
        """Plan and post one piece that was asked for at `asked_at`; one that waited through a halt fails."""
        began = time.monotonic()
        try:
            peer = self._peer(name)
            batch = self._locate(plan(), peer)
            self._check_age(time.monotonic() - asked_at)
        except TransferError as error:
            self._report(PieceFailed(number, str(error)))
            return
        except Exception as error:  # a plan is foreign code over foreign data: it must not end the thread
            log.exception("plan_raised", piece=number, peer=name)
            self._report(PieceFailed(number, f"planning failed: {error!r}"))
            return
        planned = time.monotonic()
        runs = batch.runs
        try:
            if len(runs) == 0:
                self._write_nothing(number, peer, notification, planned - began)
                return
            if planned - peer.last_post > FAST_S:
                # A target that heard nothing for a while polls slowly, yet it takes part in every round trip of a WRITE
                # over TCP: an empty notification ahead of the bytes makes it poll fast again.
                self._driver.notify(peer, b"")
            handle = self._driver.prepare(peer, batch, notification)
        except TransferError as error:
            # Nothing of this piece has left, but the engine seems to have lost the peer: connect anew next time.
            self._report(PieceFailed(number, str(error)))
            self._break(peer, str(error))
            return
        piece = _Piece(number, peer, handle, runs.total_bytes, len(runs), planned - began, 0.0, planned)
        self._flying.append(piece)
        try:
            done = self._driver.post(handle)
        except TransferError as error:
            self._break(peer, str(error))
            return
        piece.posted_at = peer.last_post = time.monotonic()
        piece.posting_s = piece.posted_at - planned
        if done:
            self._flying.remove(piece)
            self._complete(piece, piece.posted_at)

    def notify(self, name: str, payload: bytes, asked_at: float) -> None:
        """Send a notification that was asked for at `asked_at`; one that waited through a halt fails."""
        peer = None
        try:
            self._check_age(time.monotonic() - asked_at)
            peer = self._peer(name)
            self._driver.notify(peer, payload)
        except TransferError as error:
            self._report(NotifyFailed(name, payload, str(error)))
            if peer is not None:
                self._break(peer, str(error))
            return
        # Without a progress thread the engine needs us to push the message out.
        self.listen(FAST_S)

    def listen(self, seconds: float) -> None:
        """Poll at least until `seconds` from now."""
        now = time.monotonic()
        self._active_at = now
        self._listen_until = max(self._listen_until, now + seconds)

    def begin_close(self) -> None:
        """Let posted pieces end, up to the grace period, then end the thread."""
        if self._closing_at is None:
            self._closing_at = time.monotonic() + self._settings.stop_grace_s

    # The thread.

    def _run(self) -> None:
        try:
            blob = self._driver.open(self._segments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the constructor waits for it in another thread
            with self._lock:
                self._ended = True
            self.opened.set_exception(error)
            return
        self.opened.set_result(blob)
        try:
            while not self._finished():
                self._turn()
        except Exception:  # a bug here must end in failures that actors see, not in pieces that hang
            log.exception("owner_thread_died")
        self._end("the agent is closed")

    def _finished(self) -> bool:
        if self._closing_at is None:
            return False
        return not (self._flying or self._fenced) or time.monotonic() >= self._closing_at

    def _turn(self) -> None:
        """Take commands, or sleep until there is one or a poll is due; then drive progress."""
        command = self._next_command(self._pause(time.monotonic()))
        self._notice_halt()  # here and below: before anything that may send
        while command is not None:
            command()
            self._active_at = time.monotonic()
            if self._active_at - self._progressed_at >= self._settings.poll_interval_s:
                break  # posting takes long: what is in flight must not wait for all of it
            command = self._next_command(0.0)
        self._notice_halt()
        now = time.monotonic()
        if self._flying or now < self._listen_until:
            self._progress(now)
        if self._fenced:
            self._report_fenced(now)
        self._flush()

    def _notice_halt(self) -> None:
        """Give up what is in flight when this process stood still for so long that its WRITEs may count as over.

        Whoever took this rank for lost has by then let both engines use the blocks again. What is driven on would read
        them there, and write them here.
        """
        now = time.monotonic()
        halted_s, self._turned_at = now - self._turned_at, now
        if self._flying and halted_s > self._halt_s:
            log.error("owner_was_halted", seconds=round(halted_s, 3), pieces=len(self._flying))
            for peer in {id(piece.peer): piece.peer for piece in self._flying}.values():
                self._break(peer, f"this process stood still for {halted_s:.1f} s")

    def _check_age(self, age_s: float) -> None:
        if age_s > self._halt_s:
            raise TransferError(f"this process stood still for {age_s:.1f} s")

    def _next_command(self, pause: float | None) -> Command | None:
        try:
            return self._commands.get(timeout=pause) if pause != 0.0 else self._commands.get_nowait()
        except queue.Empty:
            return None

    def _pause(self, now: float) -> float | None:
        """Return how long to wait for a command; None while there is nothing to poll for."""
        if self._flying or now < self._listen_until:
            interval = self._settings.poll_interval_s
            return interval if now - self._active_at < FAST_S else max(interval, SLOW_INTERVAL_S)
        if self._fenced:
            return max(0.0, self._fenced[0].report_at - now)
        return None if self._closing_at is None else 0.0

    def _progress(self, now: float) -> None:
        self._progressed_at = now
        for piece in list(self._flying):
            if piece.failed:
                continue  # its peer broke earlier in this very loop
            try:
                done = self._driver.poll(piece.handle)
            except TransferError as error:
                self._break(piece.peer, str(error))
                continue
            if done:
                self._flying.remove(piece)
                self._complete(piece, now)
            elif now - max(piece.posted_at, piece.peer.last_done) > self._settings.transfer_wait_s:
                self._break(piece.peer, f"no piece ended within {self._settings.transfer_wait_s:g} s")
        try:
            received = self._driver.receive()
        except TransferError as error:
            log.warning("notifications_lost", error=str(error))
            return
        for peer, payload in received:
            if payload:  # empty ones only establish a connection
                self._report(Notified(peer, payload))
            self._active_at = now

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise TransferError(f"peer {name} is not known", remedy="add it first")
        if not peer.connected:
            self._connect(peer)
        return peer

    def _connect(self, peer: Peer) -> None:
        if self._ended:
            raise TransferError("the agent is closed")
        wait_s = peer.retry_at - time.monotonic()
        if wait_s > 0:
            raise TransferError(f"peer {peer.name} keeps failing; it is tried again in {wait_s:.1f} s")
        try:
            self._driver.connect(peer)
        except TransferError:
            _note_failure(peer)
            raise
        peer.connected = True
        self.listen(WARM_S)

    def _locate(self, runs: Runs, peer: Peer) -> Batch:
        """Check, whatever the planner said, that every run stays inside registered memory on both sides."""
        check_runs(runs)
        return Batch(
            runs=runs,
            local_segment=locate(runs.local, runs.length, self._segments, side="local"),
            remote_segment=locate(runs.remote, runs.length, peer.segments, side="remote"),
        )

    def _write_nothing(self, number: int, peer: Peer, notification: bytes, planning_s: float) -> None:
        if notification:
            self._driver.notify(peer, notification)
            self.listen(FAST_S)
        self._report(PieceDone(number, 0, 0, planning_s, 0.0))

    def _complete(self, piece: _Piece, now: float) -> None:
        piece.peer.last_done, piece.peer.failures = now, 0
        self._driver.release(piece.handle)
        self._report(PieceDone(piece.number, piece.size, piece.descriptors, piece.planning_s, piece.posting_s))

    def _break(self, peer: Peer, detail: str) -> None:
        """Disconnect from a peer and fail all its pieces, once what may be on the wire has had time to land.

        Cancelling a WRITE does not take back what the transport has already accepted. Tearing the connection down stops
        the sending, and `quarantine_s` outlasts what is under way: only then is a piece reported as failed.
        """
        report_at = time.monotonic() + self._settings.quarantine_s
        for piece in [piece for piece in self._flying if piece.peer is peer]:
            self._flying.remove(piece)
            self._driver.release(piece.handle)
            piece.failed, piece.report_at = detail, report_at
            self._fenced.append(piece)
        if peer.connected:
            peer.connected = False
            _note_failure(peer)
            self._driver.disconnect(peer)

    def _report_fenced(self, now: float) -> None:
        due = [piece for piece in self._fenced if piece.report_at <= now]
        self._fenced = [piece for piece in self._fenced if piece.report_at > now]
        for piece in due:
            self._report(PieceFailed(piece.number, piece.failed))

    def _report(self, event: AgentEvent) -> None:
        self._active_at = time.monotonic()
        self._events.append(event)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def _end(self, detail: str) -> None:
        """Fail what is left, stop the engine, and answer the commands that came too late."""
        for piece in self._flying:
            self._driver.release(piece.handle)
            piece.failed = detail
        for piece in (*self._flying, *self._fenced):
            self._report(PieceFailed(piece.number, piece.failed))
        self._flying.clear()
        self._fenced.clear()
        self._peers.clear()
        self._driver.close()
        with self._lock:
            self._ended = True
        while (command := self._next_command(0.0)) is not None:
            command()  # no peer is known any more: each of them reports its failure
        self._flush()


def _note_failure(peer: Peer) -> None:
    """Let the first new connection to a peer be made at once, and each further one later than the one before."""
    pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(peer.failures - 1, 10)) if peer.failures else 0.0
    peer.failures += 1
    peer.retry_at = time.monotonic() + pause_s
