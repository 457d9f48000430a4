"""Run one command and leave nothing behind: the process between us and an engine.

An engine is a tree of processes. Killing its root can orphan the rest, and so can the sudden death of whoever started
it. The guard adopts orphans, holds the read end of a pipe whose write end only the starter has, and when the pipe ends
or a SIGTERM comes it stops the whole tree: politely first, then with SIGKILL. It imports nothing but the standard
library, because it must start at once and stay small.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_S = 10.0


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process; empty when it is gone."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended between the listing and the read
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all processes below one, parents before children."""
    found: list[int] = []
    frontier = children_of(pid)
    while frontier:
        found += frontier
        frontier = [child for parent in frontier for child in children_of(parent)]
    return found


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def reap() -> dict[int, int]:
    """Collect every child that has ended, adopted ones included: pid to exit code."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def wait_gone(seconds: float) -> bool:
    """Reap until no descendant is left; return whether that happened in time."""
    deadline = time.monotonic() + seconds
    while descendants_of(os.getpid()):
        reap()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def stop_tree(root: int, grace_s: float) -> None:
    """Ask the root to stop, then kill what is left of the tree."""
    signal_all([root], signal.SIGTERM)
    if wait_gone(grace_s):
        return
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        # Again and again, since a dying parent may have forked between the listing and its end.
        signal_all(descendants_of(os.getpid()), signal.SIGKILL)
        if wait_gone(0.2):
            return


def guard(command: list[str], grace_s: float) -> int:
    """Run the command until it ends, standard input ends or a signal comes; return the command's exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked.append(received))
    signal.signal(signal.SIGCHLD, lambda _received, _frame: None)
    # The command must not outlive a guard that is itself killed, which no handler sees.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509 - one thread here
    )
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [], 5.0)
        if wake_read in ready:
            os.read(wake_read, 4096)
        code = reap().get(child.pid)
        if code is not None:
            stop_tree(child.pid, 1.0)
            return code if code >= 0 else 128 - code
        if asked or (sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096)):
            stop_tree(child.pid, grace_s)
            return 0


if __name__ == "__main__":
    sys.exit(guard(sys.argv[2:], float(sys.argv[1])))
