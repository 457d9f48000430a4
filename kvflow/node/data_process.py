"""The data process of one attached engine rank: its transfer and completion actors on one NIXL agent."""

import os
from collections.abc import Callable

import msgspec

from kvflow.config import Settings
from kvflow.errors import ConfigError, WireError
from kvflow.messages import AttachEngine, KvSegment, decode
from kvflow.messages.codec import MAX_MESSAGE_BYTES
from kvflow.node.lifeline import Supervision

ANY_ADDRESS = 4096


async def run_attached_rank(settings: Settings, supervision: Supervision, ready: Callable[[], None]) -> None:
    """Run the actors of the rank whose profile and memory the node handed over, until cancelled."""
    from kvflow.actors.rank import run_data_process

    if settings.log_level != "debug":
        # NIXL logs to a handler of its own, in a format of its own: from it we want trouble only.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    request = read_request(supervision)
    _check_geometry(request)
    settings = msgspec.structs.replace(settings, placement="process")
    await run_data_process(settings, request.profile, supervision.memory, request.segment_lengths, ready=ready)


def read_request(supervision: Supervision) -> AttachEngine:
    """Read what the engine's worker sent to the node; raise ConfigError without one, WireError for anything else."""
    if supervision.profile < 0:
        raise ConfigError("no engine profile was handed over", remedy="start data processes through `kvflow up`")
    with os.fdopen(supervision.profile, "rb") as file:
        request = decode(file.read(MAX_MESSAGE_BYTES + 1))
    if not isinstance(request, AttachEngine):
        raise WireError(f"expected AttachEngine, got {type(request).__name__}")
    for descriptor in supervision.memory:
        os.set_inheritable(descriptor, False)
    return request


def _check_geometry(request: AttachEngine) -> None:
    """Raise PeerError when the cache that the worker describes does not lie in the memory that it gave."""
    from kvflow.dataplane.geometry import check_geometry

    # Where the segments will be mapped makes no difference to that.
    segments = [KvSegment(address=ANY_ADDRESS, length=length) for length in request.segment_lengths]
    profile = request.profile
    check_geometry(profile.geometry, segments, owner=f"rank {profile.rank} of {profile.engine}")
