"""What a simulated engine's process and its owner say to each other: one JSON object a line on stdin and stdout."""

from typing import TypeVar

import msgspec

from kvflow.config import Settings
from kvflow.errors import WireError
from kvflow.sim.engine import EngineConfig, EngineReport
from kvflow.sim.request import RequestResult, RequestSpec

T = TypeVar("T")

# A line carries at most a prompt of some hundred thousand tokens.
MAX_LINE_BYTES = 4 << 20


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configure an engine process: the first line it reads, so that secrets stay out of the process list."""

    engine: EngineConfig
    settings: Settings
    attach_timeout_s: float = 60.0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Queue a request."""

    request: RequestSpec


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request early."""

    request_id: str


class DropCache(msgspec.Struct, frozen=True, kw_only=True, tag="drop_cache"):
    """Forget all cached prefixes that no request uses."""


class Audit(msgspec.Struct, frozen=True, kw_only=True, tag="audit"):
    """Ask for a check of all unused memory and a report."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the process in order. The end of stdin means the same."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Say that the engine takes requests and that its ranks are attached."""

    engine_id: str
    incarnation: str
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Say how a request ended."""

    result: RequestResult


class Audited(msgspec.Struct, frozen=True, kw_only=True, tag="audited"):
    """Answer an audit."""

    report: EngineReport


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag="fatal"):
    """Say why the engine has died or cannot start; the process exits with 1."""

    message: str
    contract: bool = False


Command = Submit | Abort | DropCache | Audit | Stop
Event = Ready | Ended | Audited | Fatal

_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command)
_events = msgspec.json.Decoder(Event)
_config = msgspec.json.Decoder(ProcessConfig)


def encode_line(item: "Command | Event | ProcessConfig") -> bytes:
    """Encode one line, with its end."""
    return _encoder.encode(item) + b"\n"


def decode_command(line: bytes) -> Command:
    """Decode what the owner says; raise WireError for anything else."""
    return _decode(_commands, line)


def decode_event(line: bytes) -> Event:
    """Decode what the engine process says; raise WireError for anything else."""
    return _decode(_events, line)


def decode_config(line: bytes) -> ProcessConfig:
    """Decode the first line of an engine process; raise WireError for anything else."""
    return _decode(_config, line)


def _decode(decoder: "msgspec.json.Decoder[T]", line: bytes) -> T:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise WireError(f"not a line of the simulation's channel: {error}") from error
