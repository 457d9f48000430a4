"""Render lifecycle events as one line each, for people or for programs."""

import time
from collections.abc import Iterator

import msgspec

from kvflow.messages import EngineEvent, EngineRef, TransferEvent
from kvflow.monitor.filter import Event, went_wrong

ID_WIDTH = 12
KIND_WIDTH = 10
BINDING_DIGITS = 4

_RESET, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "\x1b[0m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[36m"
_COLORS = {
    "completed": _GREEN, "released": _GREEN, "joined": _GREEN,
    "revoked": _YELLOW, "quiesced": _YELLOW, "cancelled": _YELLOW, "left": _YELLOW,
    "bound": _CYAN, "delivered": _CYAN,
}  # fmt: skip

_encoder = msgspec.json.Encoder()


def as_json(event: Event) -> str:
    """Return the event as one JSON object, its type and version included."""
    return _encoder.encode(event).decode()


def as_text(event: Event, *, colors: bool) -> str:
    """Return the event as one line: time, kind, who, then what is known about it."""
    when = _clock(event.at)
    kind = f"{event.kind:<{KIND_WIDTH}}"
    details = _engine_details(event) if isinstance(event, EngineEvent) else _transfer_details(event)
    who = event.engine.engine_id if isinstance(event, EngineEvent) else _short(event.transfer_id)
    if colors:
        kind = f"{_RED if went_wrong(event) else _COLORS.get(event.kind, '')}{kind}{_RESET}"
        when = f"{_DIM}{when}{_RESET}"
    return printable(f"{who:<{ID_WIDTH}} {' '.join(details)}".rstrip(), f"{when} {kind} ")


def printable(text: str, prefix: str = "") -> str:
    """Return `prefix` and the text with everything escaped that could steer a terminal: senders are not trusted."""
    return prefix + "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    except (OverflowError, ValueError, OSError):  # the sender's clock may say anything
        return "??:??:??.???"


def _short(identifier: str) -> str:
    return identifier if len(identifier) <= ID_WIDTH else identifier[: ID_WIDTH - 1] + "…"


def _tail(binding: int) -> str:
    """Return the digits that tell the bindings of one transfer apart; the rest only tells when matching began."""
    digits = str(binding)
    return digits if len(digits) <= BINDING_DIGITS else f"…{digits[-BINDING_DIGITS:]}"


def _engine_details(event: EngineEvent) -> Iterator[str]:
    yield f"rank {event.rank}"
    if event.roles:
        yield f"({', '.join(event.roles)})"
    yield f"incarnation {event.engine.incarnation}"
    if event.detail:
        yield f"- {event.detail}"


def _transfer_details(event: TransferEvent) -> Iterator[str]:
    if event.source or event.target:
        yield f"{_engine(event.source)} → {_engine(event.target)}"
    if event.attempt:
        yield f"attempt {event.attempt}"
    if event.binding:
        yield f"binding {_tail(event.binding)}"
    if event.tokens_total:
        yield f"{event.tokens}/{event.tokens_total} tokens"
    elif event.tokens:
        yield f"{event.tokens} tokens"
    if event.bytes_done:
        yield from _bytes_details(event)
    if event.reason:
        yield f"reason {event.reason}"
    if event.detail:
        yield f"- {event.detail}"


def _bytes_details(event: TransferEvent) -> Iterator[str]:
    early = f", {100 * event.bytes_early // event.bytes_done}% early" if event.bytes_early else ""
    pieces = "1 piece" if event.pieces == 1 else f"{event.pieces} pieces"
    yield f"{human_bytes(event.bytes_done)} in {pieces}, {event.descriptors} descriptors{early}"
    if event.last_progress_to_done_s:
        yield f"tail {1000 * event.last_progress_to_done_s:.1f} ms"


def _engine(ref: EngineRef | None) -> str:
    return ref.engine_id if ref else "?"


def human_bytes(count: int) -> str:
    """Return a byte count in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
