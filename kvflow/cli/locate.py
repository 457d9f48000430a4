"""Find the cluster's NATS for commands that do not start one."""

import msgspec

from kvflow.config import Settings


def locate_nats(settings: Settings) -> Settings:
    """Fill in the NATS URL of the node on this host unless one is set; raise NodeError when there is none either."""
    if settings.nats_url:
        return settings
    from kvflow.node.runtime import read_node

    return msgspec.structs.replace(settings, nats_url=read_node(settings.runtime_path()).nats_url)
