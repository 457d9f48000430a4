"""The control process: registration and matching on one bus connection. Imports neither NIXL nor torch."""

from collections.abc import Callable, Collection

import structlog

from kvflow.bus.connect import connect_bus
from kvflow.bus.port import BusState
from kvflow.config import Settings

log = structlog.get_logger()


async def run_control_process(settings: Settings, actors: Collection[str], ready: Callable[[], None]) -> None:
    """Run the named control actors until cancelled; raise BusError when NATS cannot be reached in time."""
    from kvflow.actors.control import run_control

    bus = await connect_bus(settings, name="kvflow-control", on_state=log_bus_state)
    try:
        await run_control(bus=bus, settings=settings, actors=set(actors), ready=ready)
    finally:
        await bus.close()


def log_bus_state(state: BusState, detail: str) -> None:
    """Log what happens to the connection, as loud as it matters."""
    quiet = state in {"connected", "reconnected", "closed"}
    (log.info if quiet else log.warning)("bus_state", state=state, detail=detail)
