"""Set up logging: structlog and stdlib loggers to stderr, readable on a terminal and JSON otherwise."""

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "console", "json"]

# Libraries that report through stdlib logging; at `info` they repeat what kvflow logs in its own words.
_CHATTY = ("nats", "asyncio", "aiohttp.access")


class TolerantStream:
    """Write to a stream and count, instead of raising, what it refuses.

    The reader of stderr (a pipe to a log shipper, a closed terminal) may vanish; that must not end an actor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        """Write the text, or count it as lost."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.lost += 1
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or count the failure."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += 1

    def isatty(self) -> bool:
        """Return whether a person reads along."""
        return not self._stream.closed and self._stream.isatty()


def configure_logging(
    *, level: str = "info", log_format: LogFormat = "auto", process: str = "", stream: TextIO | None = None
) -> None:
    """Route structlog and stdlib logging to `stream` (stderr); calling it again replaces the set-up.

    `process` names this process in every record. `auto` means: for people on a terminal, JSON otherwise.
    """
    out = TolerantStream(stream or sys.stderr)
    numeric = logging.getLevelNamesMapping()[level.upper()]
    as_json = log_format == "json" or (log_format == "auto" and not out.isatty())
    shared = _shared_processors(process)
    final = _final_processors(as_json=as_json, colors=out.isatty())
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.WriteLoggerFactory(file=out),  # type: ignore[arg-type]
        # A cached logger would keep the set-up of its first use; reconfiguring (tests, embedding) has to reach all.
        cache_logger_on_first_use=False,
    )
    _route_stdlib(out, numeric, shared, final)


def _shared_processors(process: str) -> list[Processor]:
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if process:
        processors.append(_process_name(process))
    return processors


def _process_name(process: str) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("process", process)
        return event

    return add


def _final_processors(*, as_json: bool, colors: bool) -> list[Processor]:
    if as_json:
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ]
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def _route_stdlib(out: TolerantStream, level: int, shared: list[Processor], final: list[Processor]) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler: logging.StreamHandler[Any] = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)


def _logger_name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event["logger"] = record.name
    return event
