"""Run one simulated engine as a process: `python -m kvflow.sim.process`, spoken to by lines on stdin and stdout.

The first line is the configuration. The process ends with its owner, since that closes stdin.
"""

import os
import signal
import sys
import threading
from typing import BinaryIO

import structlog

from kvflow.errors import KvflowError, WireError
from kvflow.log import configure_logging
from kvflow.sim.bridge import attach_connector
from kvflow.sim.channel import (
    MAX_LINE_BYTES,
    Abort,
    Audit,
    Audited,
    DropCache,
    Ended,
    Event,
    Fatal,
    Ready,
    Stop,
    Submit,
    decode_command,
    decode_config,
    encode_line,
)
from kvflow.sim.contract import SimContractError
from kvflow.sim.engine import SimEngine

log = structlog.get_logger()

EXIT_FATAL = 1


class _Mouth:
    """Write events, from any thread, to what was stdout when the process began."""

    def __init__(self) -> None:
        # Libraries that print to stdout must not garble the channel: they get stderr.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.failed = False

    def say(self, event: Event) -> None:
        """Write one event; an owner who has gone is noticed by the end of stdin."""
        try:
            with self._lock:
                self._out.write(encode_line(event))
        except BrokenPipeError:
            log.debug("sim_owner_gone")

    def fatal(self, error: Exception) -> None:
        """Tell of the error that ended the engine."""
        self.failed = True
        self.say(Fatal(message=f"{type(error).__name__}: {error}", contract=isinstance(error, SimContractError)))


def main() -> int:
    """Run the engine until it is told to stop, stdin ends or it dies; return the exit status."""
    mouth, done = _Mouth(), threading.Event()
    # A Ctrl-C goes to the whole terminal group; the owner decides then, by closing stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: done.set())

    def die(error: Exception) -> None:
        mouth.fatal(error)
        done.set()

    try:
        config = decode_config(sys.stdin.buffer.readline(MAX_LINE_BYTES))
        settings, name = config.settings, f"sim-{config.engine.engine_id}"
        configure_logging(level=settings.log_level, log_format=settings.log_format, process=name)
        engine = SimEngine(config.engine, on_result=lambda result: mouth.say(Ended(result=result)), on_fatal=die)
    except KvflowError as error:
        mouth.fatal(error)
        return EXIT_FATAL
    # Listen from now on: an owner who dies while the engine attaches must not leave it behind.
    threading.Thread(target=_obey, args=(engine, mouth, sys.stdin.buffer, done), name="sim-stdin", daemon=True).start()
    try:
        connector = attach_connector(config.engine, settings, engine.segments, config.attach_timeout_s, done)
    except KvflowError as error:
        engine.stop()
        mouth.fatal(error)
        return EXIT_FATAL
    engine.start(connector)
    ref = connector.engine
    mouth.say(Ready(engine_id=ref.engine_id, incarnation=ref.incarnation, pid=os.getpid()))
    done.wait()
    engine.stop()
    return EXIT_FATAL if mouth.failed else 0


def _obey(engine: SimEngine, mouth: _Mouth, source: BinaryIO, done: threading.Event) -> None:
    try:
        while line := source.readline(MAX_LINE_BYTES):
            try:
                command = decode_command(line)
            except WireError as error:
                log.warning("sim_command_dropped", error=str(error))
                continue
            if isinstance(command, Stop):
                return
            _perform(command, engine, mouth)
    finally:
        done.set()


def _perform(command: Submit | Abort | DropCache | Audit, engine: SimEngine, mouth: _Mouth) -> None:
    match command:
        case Submit():
            engine.submit(command.request)
        case Abort():
            engine.abort(command.request_id)
        case DropCache():
            engine.drop_cache()
        case Audit():
            engine.audit(lambda report: mouth.say(Audited(report=report)))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The stdin thread may sit in a read that holds the interpreter's lock on stdin: a normal exit would abort on it.
    os._exit(status)
