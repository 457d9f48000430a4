"""The data process of one attached engine rank: its transfer and completion actors on one NIXL agent."""

import os
from collections.abc import Callable

import msgspec

from kvflow.config import Settings
from kvflow.errors import ConfigError, WireError
from kvflow.messages import AttachEngine, decode
from kvflow.messages.codec import MAX_MESSAGE_BYTES
from kvflow.node.lifeline import Supervision


async def run_attached_rank(settings: Settings, supervision: Supervision, ready: Callable[[], None]) -> None:
    """Run the actors of the rank whose profile and memory the node handed over, until cancelled."""
    from kvflow.actors.rank import run_data_process

    request = read_request(supervision)
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
