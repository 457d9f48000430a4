"""What an engine worker and the node process on its host say over the attach socket.

Frames are a u32 little-endian length and one message. `AttachEngine` travels with one file descriptor per segment
(SCM_RIGHTS). The connection stays open: its end means that the worker has gone.
"""

from kvflow.messages.base import Message
from kvflow.messages.engine import EngineProfile


class AttachEngine(Message, frozen=True, kw_only=True, tag="kvflow.attach_engine.v1"):
    """Ask the node to run this engine rank's actors over the memory whose descriptors come along."""

    profile: EngineProfile
    segment_lengths: tuple[int, ...]


class Attached(Message, frozen=True, kw_only=True, tag="kvflow.attached.v1"):
    """Confirm an attachment: the rank's actors are up and its card is in the directory."""

    nats_url: str
    cluster: str


class AttachRefused(Message, frozen=True, kw_only=True, tag="kvflow.attach_refused.v1"):
    """Refuse an attachment, saying why and what to do."""

    reason: str
    remedy: str = ""
