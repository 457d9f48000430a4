"""The message base class, and the small types that several messages share.

A message is an immutable msgspec Struct whose tag names its type and version. A new field gets a default; a new
meaning gets a new tag. Nothing in this package does I/O.
"""

from typing import Literal

import msgspec

Role = Literal["source", "target"]
Direction = Literal["write", "read"]

FailureReason = Literal[
    "cancelled",  # the target engine gave the request up
    "unknown_engine",  # no live card for the registering engine
    "bad_registration",  # block ids, ranges or counts do not fit the engine's card
    "incompatible",  # the two engines' caches cannot be mapped
    "token_mismatch",  # the two legs disagree on the number of prompt tokens
    "prompt_mismatch",  # the two legs have different prompts under one transfer id
    "source_timeout",  # no source opened in time
    "compute_timeout",  # the source did not finish computing in time
    "transfer_timeout",  # everything was ready, but the bytes did not arrive in time
    "transfer_error",  # a WRITE failed
    "source_lost",  # the source engine or its transfer actor vanished
    "source_aborted",  # the source request was aborted
    "target_lost",  # the target engine or its completion actor vanished
    "overloaded",  # a bounded table is full
    "shutdown",  # the actor is stopping
    "unreachable",  # the engine's own backstop: nobody answered
]

CloseReason = Literal["finished", "aborted", "preempted", "error"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that travels over the bus, a NIXL notification or the attach socket."""


class EngineRef(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Name one start of one engine; a restarted engine has another incarnation."""

    engine_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.incarnation}"
