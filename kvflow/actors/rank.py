"""Run the data-plane actors of one engine rank on one agent, in a process of their own or in the engine's worker."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import structlog

from kvflow.actors.completion.actor import CompletionActor
from kvflow.actors.transfer.actor import TransferActor
from kvflow.bus.connect import connect_bus
from kvflow.bus.port import Bus
from kvflow.config import Settings
from kvflow.dataplane.agent import DrivenAgent
from kvflow.dataplane.memory import MemoryRange
from kvflow.dataplane.port import AgentEvent, Notified, NotifyFailed, PieceDone, PieceFailed, TransferAgent
from kvflow.directory import Directory
from kvflow.errors import BusError, ConfigError
from kvflow.ids import new_incarnation
from kvflow.messages import EngineCard, EngineProfile, Placement

LEAVE_S = 3.0

log = structlog.get_logger()


class AgentInbox:
    """Be the sink of an agent: hand its results to the transfer actor and its notifications to the completion actor."""

    def __init__(self) -> None:
        self._transfer: Callable[[PieceDone | PieceFailed | NotifyFailed], None] | None = None
        self._completion: Callable[[Notified], None] | None = None
        self.unclaimed = 0

    def attach(self, *, transfer: TransferActor | None, completion: CompletionActor | None) -> None:
        """Deliver to these actors from now on."""
        self._transfer = transfer.on_agent_event if transfer else None
        self._completion = completion.on_notified if completion else None

    def __call__(self, event: AgentEvent) -> None:
        """Take one event, on the event loop; what nobody serves is counted and dropped."""
        if isinstance(event, Notified):
            if self._completion is not None:
                self._completion(event)
                return
        elif self._transfer is not None:
            self._transfer(event)
            return
        self.unclaimed += 1
        log.warning("agent_event_unclaimed", kind=type(event).__name__, count=self.unclaimed)


async def run_rank(
    *,
    bus: Bus,
    settings: Settings,
    profile: EngineProfile,
    agent: TransferAgent,
    inbox: AgentInbox,
    placement: Placement,
    ready: Callable[[], None],
) -> None:
    """Serve a rank until cancelled: its actors by role, and its card in the directory while they live.

    The agent is closed at the end. `ready` is called once the card is published. Raises ConfigError for a rank without
    a role, BusError when the bus is away at the start.
    """
    if not profile.roles:
        raise ConfigError(f"rank {profile.rank} of {profile.engine} has no role", remedy="use kv_role kv_both")
    directory = Directory(bus, settings)
    transfer = completion = None
    if "source" in profile.roles:
        transfer = TransferActor(bus=bus, settings=settings, profile=profile, agent=agent, directory=directory)
    if "target" in profile.roles:
        completion = CompletionActor(bus=bus, settings=settings, profile=profile, agent=agent)
    inbox.attach(transfer=transfer, completion=completion)
    card = EngineCard(
        profile=profile,
        agent=agent.name,
        nixl_metadata=agent.metadata(),
        segments=agent.segments,
        placement=placement,
    )
    try:
        async with anyio.create_task_group() as tasks:
            if completion is not None:
                await tasks.start(completion.run)
                await directory.watch(completion.on_directory_change)
            if transfer is not None:
                await tasks.start(transfer.run)
                await directory.watch(transfer.on_directory_change)
            await directory.publish(card)
            log.info("rank_ready", engine=str(profile.engine), rank=profile.rank, roles=profile.roles, agent=agent.name)
            ready()
            await anyio.sleep_forever()
    finally:
        inbox.attach(transfer=None, completion=None)
        # Before the card goes: who hears that this rank has left may count on it that nothing of it can land any more.
        # The agent bounds its own close.
        with anyio.CancelScope(shield=True):
            await agent.close()
        await _leave(directory, profile)


async def _leave(directory: Directory, profile: EngineProfile) -> None:
    """Take the card out of the directory, within a bound; where that fails it expires by itself."""
    with anyio.move_on_after(LEAVE_S, shield=True) as scope:
        try:
            await directory.withdraw(profile.engine, profile.rank)
        except BusError as error:
            log.warning("card_not_withdrawn", engine=str(profile.engine), rank=profile.rank, error=str(error))
        await directory.close()
    if scope.cancelled_caught:
        log.warning("card_not_withdrawn", engine=str(profile.engine), rank=profile.rank, error="the bus did not answer")


async def run_data_process(
    settings: Settings,
    profile: EngineProfile,
    fds: Sequence[int],
    lengths: Sequence[int],
    *,
    ready: Callable[[], None],
) -> None:
    """Serve one rank over memory that the engine shares, until cancelled.

    Maps `lengths[i]` bytes of each descriptor (they stay the caller's), makes a NIXL agent over them and connects to
    the bus. Raises MemoryAccessError, TransferError or BusError when one of them cannot be had.
    """
    if len(fds) != len(lengths):
        raise ConfigError(f"{len(fds)} memory descriptors came with {len(lengths)} lengths", remedy="attach anew")
    ranges = [MemoryRange(fd=fd, length=length) for fd, length in zip(fds, lengths, strict=True)]
    bus = await connect_bus(settings, name=f"kvflow {profile.engine} rank {profile.rank}")
    try:
        await run_rank_over(
            bus=bus, settings=settings, profile=profile, ranges=ranges, placement="process", ready=ready
        )
    finally:
        with anyio.move_on_after(LEAVE_S, shield=True):
            await bus.close()


async def run_rank_over(
    *,
    bus: Bus,
    settings: Settings,
    profile: EngineProfile,
    ranges: Sequence[MemoryRange],
    placement: Placement,
    ready: Callable[[], None],
    stuck: Callable[[], None] | None = None,
) -> None:
    """Make a NIXL agent over these ranges, run the rank's actors on it until cancelled, and close it.

    `stuck` is called when the agent could not be closed: the ranges stay registered, and peers may still write there.
    """
    from kvflow.dataplane.nixl_agent import NixlAgent

    inbox = AgentInbox()
    loop = asyncio.get_running_loop()
    make = partial(NixlAgent, agent_name(profile), ranges, inbox, loop=loop, settings=settings)
    agent = await _made(make, stuck)
    try:
        await run_rank(
            bus=bus, settings=settings, profile=profile, agent=agent, inbox=inbox, placement=placement, ready=ready
        )
    finally:
        # Also when it never began to serve.
        with anyio.CancelScope(shield=True):
            await _close(agent, stuck)


async def _close(agent: DrivenAgent, stuck: Callable[[], None] | None) -> None:
    await agent.close()
    if agent.stuck and stuck is not None:
        stuck()


async def _made(make: Callable[[], DrivenAgent], stuck: Callable[[], None] | None) -> DrivenAgent:
    """Make an agent on a thread, since registering gigabytes takes a while; cancelled, close what comes out."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.wait({making})
            if making.exception() is None:
                await _close(making.result(), stuck)
        raise


def agent_name(profile: EngineProfile) -> str:
    """Return a name for a new agent of this rank, unlike that of any agent before: peers tell agents by name."""
    return f"{profile.engine}/{profile.rank}/{new_incarnation()}"
