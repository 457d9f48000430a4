"""Choose the bus by URL."""

from kvflow.bus.nats import NatsBus
from kvflow.bus.port import Bus, StateHandler
from kvflow.config import Settings
from kvflow.errors import ConfigError

SCHEMES = ("nats://", "tls://", "ws://", "wss://")


async def connect_bus(settings: Settings, *, name: str, on_state: StateHandler | None = None) -> Bus:
    """Connect to the bus that `nats_url` names (comma-separated servers); raise BusError or ConfigError."""
    for url in settings.nats_url.split(","):
        if "://" in url and not url.strip().startswith(SCHEMES):
            raise ConfigError(
                f"nats_url has the unknown scheme {url.strip().partition('://')[0]!r}",
                remedy=f"use one of {', '.join(SCHEMES)}",
            )
    return await NatsBus.connect(settings, name=name, on_state=on_state)
