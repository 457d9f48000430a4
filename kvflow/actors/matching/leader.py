"""Let one of several matching processes lead: the others follow the control stream and stand by.

Each candidate keeps a key alive in a bucket; the one that began first leads. A leader that cannot refresh its key stops
leading before the others can find it expired. A candidate whose process is known to have died is passed over at once:
a restart on the same host does not wait for the expiry.
"""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import structlog

from kvflow.bus.port import Bus, KeyValue, KvUpdate
from kvflow.errors import BusError
from kvflow.messages import Subjects

BUCKET = "matching"
TTL_S = 4.0
REFRESH_S = 1.0
# A leader is sure of its key for this long after it was refreshed; less than what watchers wait.
SURE_S = 3.0
EXPIRY_SLACK_S = 0.5
# A candidate that sees others leads only after this time, in which the one that led has heard of it.
SETTLE_S = 0.5
LOOK_S = 0.1

log = structlog.get_logger()


class Candidate(msgspec.Struct, frozen=True):
    """Tell where a candidate runs: `space` names the set of processes among which `pid` is unique."""

    space: str
    pid: int


class Leadership:
    """Stand as a candidate; `leads` tells whether this process leads right now."""

    def __init__(self, bus: Bus, cluster: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._bucket = Subjects(cluster).bucket(BUCKET)
        self._clock = clock
        self._me = Candidate(_process_space(), os.getpid())
        # Fixed width: keys sort by the time at which their candidates began. Wall clocks only decide who is first.
        self._key = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self._rivals: dict[str, tuple[Candidate | None, float]] = {}
        self._patient_from = 0.0
        self._refreshed = float("-inf")
        self._synced = False
        self._new = True
        self._leads = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def leads(self) -> bool:
        """Return whether this process may take decisions."""
        return self._leads and self._clock() < self._refreshed + SURE_S

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call back on the event loop whenever `leads` has changed."""
        self._listeners.append(listener)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Stand until cancelled, then resign; ready once the other candidates are known. Raises BusError at first."""
        bucket = await self._bus.key_value(self._bucket, ttl_s=TTL_S)
        await bucket.put(self._key, msgspec.msgpack.encode(self._me))
        self._refreshed = self._clock()
        self._patient_from = self._refreshed + SETTLE_S
        self._new = True
        watch = await bucket.watch(self._on_update)
        started = False
        try:
            while True:
                await self._refresh(bucket)
                self._judge()
                if self._synced and not started:
                    started = True
                    task_status.started()
                settled = self._synced and self._clock() > self._patient_from and self._bus.connected
                await anyio.sleep(REFRESH_S if settled else LOOK_S)
        finally:
            self._leads = False
            with anyio.move_on_after(1.0, shield=True):
                await watch.unsubscribe()
                try:
                    await bucket.delete(self._key)
                except BusError as error:
                    log.info("leadership_not_resigned", error=str(error))

    async def _refresh(self, bucket: KeyValue) -> None:
        now = self._clock()
        if now >= self._refreshed + SURE_S:
            # Others may have found the key expired and lead by now: stand back until they have been heard of.
            self._new = False
            self._patient_from = now + SETTLE_S
            self._judge()
        if now >= self._refreshed + REFRESH_S:
            try:
                await bucket.put(self._key, msgspec.msgpack.encode(self._me))
                self._refreshed = now
            except BusError as error:
                log.warning("leadership_not_refreshed", error=str(error))

    def _on_update(self, update: KvUpdate | None) -> None:
        if update is None:
            self._synced = True
        elif update.key != self._key:
            if update.value is None:
                self._rivals.pop(update.key, None)
            else:
                self._rivals[update.key] = (_candidate(update.value), self._clock() + TTL_S + EXPIRY_SLACK_S)
        self._judge()

    def _judge(self) -> None:
        now = self._clock()
        self._rivals = {
            key: (candidate, expires)
            for key, (candidate, expires) in self._rivals.items()
            if expires > now and not self._is_dead(candidate)
        }
        first = all(self._key < rival for rival in self._rivals)
        patient = self._leads or (self._new and not self._rivals) or now >= self._patient_from
        leads = self._synced and first and patient and now < self._refreshed + SURE_S
        if leads != self._leads:
            self._leads = leads
            log.info("matching_role", leads=leads, candidates=1 + len(self._rivals))
            for listener in self._listeners:
                listener()

    def _is_dead(self, candidate: Candidate | None) -> bool:
        if candidate is None or candidate.space != self._me.space or candidate.pid <= 0:
            return False
        return candidate.pid != self._me.pid and not Path(f"/proc/{candidate.pid}").exists()


def _candidate(value: bytes) -> Candidate | None:
    try:
        return msgspec.msgpack.decode(value, type=Candidate)
    except msgspec.MsgspecError:
        return None  # of another version: it counts until it expires


def _process_space() -> str:
    """Name the process namespace of this boot of this machine; another one shares no pids with it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)
