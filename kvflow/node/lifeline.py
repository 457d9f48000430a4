"""What ties a child process to the node: a lifeline pipe that ends with the parent, and a pipe to report on.

The child watches the lifeline from a thread. The kernel closes the parent's end whatever ends the parent, SIGKILL
included, and there is no race with a parent that is gone already. `PR_SET_PDEATHSIG` would have one, and it fires when
only the parent's thread ends.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from kvflow.errors import ConfigError, KvflowError, NodeError

# How long a child may tidy up after its parent has died, before it ends itself.
ORPHAN_GRACE_S = 3.0
ORPHAN_EXIT_CODE = 70
MAX_REPORT_BYTES = 64 * 1024
BEAT = b"."
BEAT_S = 0.5
MAX_TEXT = 2000


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Name the descriptors that a child inherits; -1 means none. `memory` are the engine's segments, in order."""

    lifeline: int
    report: int
    profile: int = -1
    memory: tuple[int, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Say that a child is ready, or why it gives up before that; one JSON line on the report pipe."""

    ready: bool
    message: str = ""
    remedy: str = ""
    exit_code: int = NodeError.exit_code


def parse_supervision(text: str) -> Supervision:
    """Parse what the parent put on the command line; raise ConfigError when it is not that."""
    try:
        return msgspec.json.decode(text, type=Supervision)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--supervision is not valid: {error}", remedy="it is set by `kvflow up`; leave it out"
        ) from error


def watch_lifeline(descriptor: int, *, tidy: Callable[[], None] | None = None, grace_s: float = ORPHAN_GRACE_S) -> None:
    """Stop this process when the other end of the pipe closes: by SIGTERM, then by force after `grace_s` seconds.

    `tidy` runs first, on a thread of its own: it clears away what the parent could not.
    """
    threading.Thread(target=_watch, args=(descriptor, tidy, grace_s), name="kvflow-lifeline", daemon=True).start()


def _watch(descriptor: int, tidy: Callable[[], None] | None, grace_s: float) -> None:
    with contextlib.suppress(OSError):  # a broken lifeline is an ended one
        while os.read(descriptor, 64):
            pass
    if tidy is not None:
        with contextlib.suppress(KvflowError, OSError):  # nothing may keep this process alive
            tidy()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(ORPHAN_EXIT_CODE)


def report_ready(supervision: Supervision) -> None:
    """Tell the parent that this process does its work, and from then on that it still runs; call it once.

    The beats come from a thread: a busy event loop is no halt.
    """
    if _send(supervision.report, Report(ready=True)):
        threading.Thread(target=_beat, args=(supervision.report,), name="kvflow-beat", daemon=True).start()


def _beat(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    while True:
        time.sleep(BEAT_S)
        try:
            os.write(descriptor, BEAT)
        except BlockingIOError:
            continue  # the parent has not read for long: what lies in the pipe says enough
        except OSError:
            return  # the parent has gone, which the lifeline deals with


def report_error(supervision: Supervision, error: KvflowError) -> bool:
    """Tell the parent why this process ends, so that it can tell others; return whether it could be told."""
    report = Report(
        ready=False, message=error.message[:MAX_TEXT], remedy=error.remedy[:MAX_TEXT], exit_code=error.exit_code
    )
    return _send(supervision.report, report)


def decode_report(line: bytes) -> Report:
    """Decode a child's report; raise NodeError when it is not one."""
    try:
        return msgspec.json.decode(line, type=Report)
    except msgspec.DecodeError as error:
        raise NodeError(f"a child process sent an unreadable report: {error}") from error


def _send(descriptor: int, report: Report) -> bool:
    try:
        os.write(descriptor, msgspec.json.encode(report) + b"\n")
    except OSError:
        return False  # the parent has gone, which the lifeline deals with
    return True
