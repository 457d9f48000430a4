"""`kvflow up`: start a node's processes, keep them running, and stop them in order, leaving nothing behind."""

import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec
import structlog

from kvflow.broker import Broker, start_broker
from kvflow.config import Settings
from kvflow.errors import BrokerError
from kvflow.node.attach_server import AttachServer, listen
from kvflow.node.process import ProcessSpec, describe_exit
from kvflow.node.restart import Children, RestartBudget, RestartPolicy
from kvflow.node.runtime import OWN_FILES, NodeInfo, RuntimeFolder, host_name
from kvflow.node.signals import StopRequest, stop_on_signals

log = structlog.get_logger()

CONTROL_ACTORS = ("registration", "matching")
DATA_READY_S = 240.0  # below the time that a worker waits for its answer


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tell whoever started the node how to reach it. `nats_url` of a private server carries its password."""

    cluster: str
    nats_url: str
    runtime_dir: str
    socket: str
    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Say what `kvflow up` runs besides the settings.

    `ready_timeout_s` is for NATS and the control process; a data process registers an engine's memory first, which
    takes longer (`policy`). `broker_port` fixes the private server's port.
    """

    control: bool = True
    ready_timeout_s: float = 30.0
    broker_port: int | None = None
    policy: RestartPolicy = RestartPolicy(ready_timeout_s=DATA_READY_S)  # noqa: RUF009 - immutable


async def run_node(settings: Settings, options: NodeOptions, on_ready: Callable[[NodeReport], None]) -> None:
    """Run a node until SIGTERM or SIGINT; raise NodeError or BusError when it cannot start or go on."""
    with RuntimeFolder.claim(settings.runtime_path()) as folder:
        async with stop_on_signals() as signals:
            await _Node(settings, options, folder, signals, on_ready).run()
    log.info("node_stopped")


class _Node:
    """Hold the parts of one running node."""

    def __init__(
        self,
        settings: Settings,
        options: NodeOptions,
        folder: RuntimeFolder,
        signals: StopRequest,
        on_ready: Callable[[NodeReport], None],
    ) -> None:
        self._settings = settings
        self._options = options
        self._folder = folder
        self._signals = signals
        self._on_ready = on_ready
        self._children = Children(settings.stop_grace_s)
        self._broker: Broker | None = None
        self._serving = False

    async def run(self) -> None:
        """Start everything, serve until asked to stop, stop everything in the reverse order."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._obey_signals, group.cancel_scope)
            if self._settings.nats_url:
                await self._run_actors()
            else:
                async with self._private_broker():
                    await self._run_actors()
            group.cancel_scope.cancel()

    async def _obey_signals(self, scope: anyio.CancelScope) -> None:
        await self._signals.stop.wait()
        if not self._serving:
            scope.cancel()  # still starting: there is nothing to drain
        await self._signals.hurry.wait()
        log.warning("node_stopping_at_once", children=len(self._children.pids()))
        self._children.kill_all()

    @asynccontextmanager
    async def _private_broker(self) -> AsyncIterator[None]:
        self._broker = broker = await self._start_broker()
        log.info("broker_ready", address=broker.address, pid=broker.server_pid)
        # Whoever set credentials without a URL meant them for another server than this one.
        self._settings = msgspec.structs.replace(
            self._settings, nats_url=broker.url, nats_user="", nats_password="", nats_creds="", nats_nkey_seed=""
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep_broker, broker)
                yield
                group.cancel_scope.cancel()
        finally:
            await self._broker.aclose()

    async def _keep_broker(self, broker: Broker) -> None:
        """Start the server again when it dies, on the same port, so that its clients find the new one."""
        budget = RestartBudget(self._options.policy)
        while True:
            status = await broker.wait()
            delay = budget.next_delay(time.monotonic())
            tail = broker.log_tail()
            if delay is None:
                raise BrokerError(
                    f"the private nats-server keeps ending ({describe_exit(status)}): {tail}",
                    remedy="fix what its log says, or set KVFLOW_NATS_URL",
                )
            log.error("broker_ended", cause=describe_exit(status), restart_in_s=delay, log_tail=tail)
            await broker.aclose()
            await anyio.sleep(delay)
            self._broker = broker = await self._start_broker(port=broker.port, password=broker.password)
            log.info("broker_ready", address=broker.address, pid=broker.server_pid)

    async def _start_broker(self, *, port: int | None = None, password: str | None = None) -> Broker:
        return await start_broker(
            self._folder.path,
            port=port or self._options.broker_port,
            password=password,
            remove=OWN_FILES,
            ready_timeout_s=self._options.ready_timeout_s,
        )

    async def _run_actors(self) -> None:
        server = AttachServer(self._settings, self._children, self._options.policy)
        async with anyio.create_task_group() as control:
            if self._options.control:
                spec = ProcessSpec(name="control", actors=CONTROL_ACTORS, settings=self._settings)
                policy = dataclasses.replace(self._options.policy, ready_timeout_s=self._options.ready_timeout_s)
                await control.start(self._children.keep_running, spec, policy)
            with listen(self._folder.socket_path) as listener:
                async with anyio.create_task_group() as attaches:
                    attaches.start_soon(server.serve, listener)
                    self._announce()
                    await self._signals.stop.wait()
                    log.info("node_stopping", attached=server.attached, grace_s=self._settings.stop_grace_s)
                    attaches.cancel_scope.cancel()
            control.cancel_scope.cancel()

    def _announce(self) -> None:
        """Say that the node is ready: to others on this host by node.json, to the caller by its callback."""
        socket = str(self._folder.socket_path)
        self._folder.publish(
            NodeInfo(
                pid=os.getpid(),
                cluster=self._settings.cluster,
                nats_url=self._settings.nats_url,
                socket=socket,
                host=host_name(),
                started_at=time.time(),
            )
        )
        self._serving = True
        pids = {"node": os.getpid(), **self._children.pids()}
        if self._broker is not None:
            pids |= {"keeper": self._broker.pid, "nats-server": self._broker.server_pid}
        self._on_ready(
            NodeReport(
                cluster=self._settings.cluster,
                nats_url=self._settings.nats_url,
                runtime_dir=str(self._folder.path),
                socket=socket,
                pids=pids,
            )
        )
