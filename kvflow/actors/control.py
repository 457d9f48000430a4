"""Run the control actors, registration and matching, in one process on one bus."""

from collections.abc import Callable

import anyio

from kvflow.actors.matching.actor import MatchingActor
from kvflow.actors.matching.leader import Leadership
from kvflow.actors.registration.actor import RegistrationActor
from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.directory import Directory
from kvflow.errors import ConfigError

CONTROL_ACTORS = frozenset({"registration", "matching"})


async def run_control(*, bus: Bus, settings: Settings, actors: set[str], ready: Callable[[], None]) -> None:
    """Run the named actors until cancelled, and call `ready` once when all of them serve.

    Any number of processes may do so in one cluster: they share registration, and of those that match one leads while
    the others stand by. Raises ConfigError for a name that is no control actor, and BusError (in a group) when the bus
    refuses.
    """
    unknown = actors - CONTROL_ACTORS
    if unknown or not actors:
        raise ConfigError(
            f"not control actors: {', '.join(sorted(unknown)) or 'none named'}",
            remedy=f"name some of {', '.join(sorted(CONTROL_ACTORS))}",
        )
    directory = Directory(bus, settings)
    try:
        async with anyio.create_task_group() as tasks:
            if "matching" in actors:
                leadership = Leadership(bus, settings.cluster)
                await tasks.start(leadership.run)
                for shard in range(settings.shards):
                    matching = MatchingActor(
                        bus=bus, settings=settings, directory=directory, shard=shard, leadership=leadership
                    )
                    await tasks.start(matching.run)
            if "registration" in actors:  # last: what it lets in finds matching at work
                await tasks.start(RegistrationActor(bus=bus, settings=settings, directory=directory).run)
            ready()
    finally:
        with anyio.move_on_after(1.0, shield=True):
            await directory.close()
