"""Keep one nats-server for its owner, and leave nothing behind: `python -m kvflow.keeper`.

The keeper is a process of its own, so that it outlives an owner that is killed. Its standard input is a pipe whose
other end the owner holds: end of file means that the owner has gone, however it went. Then the keeper stops the server
and removes what the owner put into the runtime folder. Standard library only: it also runs without site-packages.
"""

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
EXIT_SERVER_DIED = 3
EXIT_NO_SERVER = 4


def die_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent dies (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def keep(command: list[str], log: Path, grace_s: float) -> int:
    """Run the server until the owner's pipe ends or SIGTERM comes, then stop it; return the keeper's exit status."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _noted)
    signal.signal(signal.SIGCHLD, _noted)
    with log.open("ab") as output:
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - the keeper has one thread
            )
        except OSError as error:
            output.write(f"cannot start {command[0]}: {error}\n".encode())
            return EXIT_NO_SERVER
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [])
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break
        if wake_read in ready and signal.SIGTERM in os.read(wake_read, 4096):
            break
    else:
        return EXIT_SERVER_DIED
    _stop(server, grace_s)
    return 0


def _noted(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal has written its number to the wake-up pipe."""


def _stop(server: subprocess.Popen[bytes], grace_s: float) -> None:
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def remove_leavings(runtime_dir: Path, names: list[str]) -> None:
    """Remove the named entries of the runtime folder, and the folder itself once it is empty.

    Only names are removed, never the whole folder: it may be one that the user chose and keeps other things in.
    """
    for name in names:
        entry = runtime_dir / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        runtime_dir.rmdir()


def main() -> int:
    """Parse the arguments that `kvflow.broker` passes, keep the server, clean up."""
    parser = argparse.ArgumentParser(prog="kvflow.keeper", description="Keep a nats-server for the process on stdin.")
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument(
        "--remove", action="append", default=[], help="entry of the runtime folder to remove at the end"
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    # A Ctrl-C in the owner's terminal must reach the owner alone: it still needs the server while it winds down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    status = keep(options.command, options.log, options.grace)
    if status == 0:
        remove_leavings(options.runtime_dir, options.remove)
    # Otherwise the owner lives, reads the log for its error message, and removes the rest itself.
    return status


if __name__ == "__main__":
    sys.exit(main())
