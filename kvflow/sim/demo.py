"""`kvflow demo --sim`: a node, two simulated engines and real transfers between them, checked byte by byte."""

import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvflow.bus.connect import connect_bus
from kvflow.bus.port import Delivery
from kvflow.config import Settings
from kvflow.errors import KvflowError, WireError
from kvflow.messages import Role, Subjects, TransferEvent, decode
from kvflow.sim.channel import ProcessConfig
from kvflow.sim.control import launch_engine
from kvflow.sim.engine import EngineConfig
from kvflow.sim.layout import SimLayout
from kvflow.sim.load import LoadConfig, plan_load
from kvflow.sim.node import private_node
from kvflow.sim.traffic import Deliveries, Traffic, TrafficReport

log = structlog.get_logger()

QUIET_S = 15.0
STOP_GRACE_S = 3.0
EXIT_TERMINATED = 128 + signal.SIGTERM


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what the demo prints: the traffic's report, and how long the whole demo took (seconds)."""

    ok: bool
    total_s: float
    traffic: TrafficReport

    def as_json(self) -> str:
        """Return one flat JSON object."""
        fields = msgspec.to_builtins(self.traffic) | {"total_s": self.total_s, "ok": self.ok}
        return msgspec.json.encode(fields).decode()


def run_sim_demo(
    settings: Settings,
    *,
    transfers: int = 200,
    json: bool = False,
    concurrency: int = 12,
    tp_size: int = 1,
    seed: int = 1,
) -> int:
    """Run the demo, print its result on stdout, and return the exit status: 0 only if all went right.

    Nothing of it is left behind, files and processes included. Raises KvflowError when it cannot start.
    """
    load = LoadConfig(transfers=transfers, aborts=transfers // 20, seed=seed)
    layout = SimLayout(blocks=768, tp_size=tp_size)
    report = anyio.run(_run_until_stopped, settings, load, layout, concurrency)
    if report is None:
        return EXIT_TERMINATED
    sys.stdout.write(report.as_json() + "\n" if json else "")
    if not json:
        Console().print(_table(report))
    sys.stdout.flush()
    return 0 if report.ok else 1


async def _run_until_stopped(
    settings: Settings, load: LoadConfig, layout: SimLayout, concurrency: int
) -> DemoReport | None:
    """Run the demo; tidy up and return None when SIGTERM or SIGHUP comes."""
    report: DemoReport | None = None
    failure: KvflowError | None = None
    async with anyio.create_task_group() as group:

        async def heed_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
                async for number in signals:
                    log.warning("demo_stopped", signal=number.name)
                    group.cancel_scope.cancel()

        group.start_soon(heed_signals)
        try:
            report = await _run(settings, load, layout, concurrency)
        except KvflowError as error:
            failure = error  # raised below, where the task group does not wrap it
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return report


async def _run(settings: Settings, load: LoadConfig, layout: SimLayout, concurrency: int) -> DemoReport:
    began = time.monotonic()
    # The demo brings its own server and folder, so that it touches no cluster in use; the node makes and removes both.
    own = Settings(
        cluster="demo", runtime_dir=str(Path(tempfile.gettempdir()) / f"kvflow-demo-{secrets.token_hex(6)}"),
        source_lease_s=QUIET_S / 2, stop_grace_s=STOP_GRACE_S, placement=settings.placement,
        log_format=settings.log_format,
        # By default a demo shows its result, not the log of its parts: they warn of every cancelled transfer.
        log_level="error" if settings.log_level == "info" else settings.log_level,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(private_node(own))
        _tell("node", began)
        deliveries = await stack.enter_async_context(_watch_deliveries(own))
        roles: tuple[Role, ...] = ("source", "target")
        source, target = [
            await stack.enter_async_context(launch_engine(_engine(own, role, layout), wait=False)) for role in roles
        ]
        await source.wait_ready()
        await target.wait_ready()
        _tell("engines", began)
        traffic = await _drive(Traffic(source, target, layout.ranks), load, concurrency)
        report = await traffic.report(deliveries, QUIET_S)
    good = report.passed and report.transfers + report.cancelled == load.transfers + load.aborts
    return DemoReport(ok=good, total_s=round(time.monotonic() - began, 3), traffic=report)


def _tell(what: str, began: float) -> None:
    Console(stderr=True).print(f"{what} ready after {time.monotonic() - began:.1f} s")


async def _drive(traffic: Traffic, load: LoadConfig, concurrency: int) -> Traffic:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("transfers", total=load.transfers + load.aborts)
        traffic.on_progress = lambda: progress.advance(task)
        await traffic.run(plan_load(load), concurrency)
    return traffic


def _engine(settings: Settings, role: Role, layout: SimLayout) -> ProcessConfig:
    name = "prefill" if role == "source" else "decode"
    engine = EngineConfig(engine_id=name, roles=(role,), layout=layout, step_s=0.001, token_s=30e-6, idle_step_s=0.0005)
    return ProcessConfig(engine=engine, settings=settings)


@asynccontextmanager
async def _watch_deliveries(settings: Settings) -> AsyncIterator[Deliveries]:
    """Add up the transfer events of the cluster while the block runs."""
    deliveries = Deliveries()

    def take(delivery: Delivery) -> None:
        try:
            event = decode(delivery.data)
        except WireError as error:
            log.warning("event_dropped", subject=delivery.subject, error=str(error))
            return
        if isinstance(event, TransferEvent):
            deliveries.add(event)

    bus = await connect_bus(settings, name="kvflow-demo")
    try:
        await bus.subscribe(Subjects(settings.cluster).events_all(), take)
        await bus.flush()
        yield deliveries
    finally:
        await bus.close()


def _table(report: DemoReport) -> Table:
    traffic = report.traffic
    table = Table(title="Simulated prefill engine to simulated decode engine", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "transfers": f"{traffic.transfers}",
        "of these already there": f"{traffic.already_there}",
        "cancelled / failed": f"{traffic.cancelled} / {traffic.failed}",
        "bytes moved": f"{traffic.bytes / 1e6:.1f} MB in {traffic.pieces} pieces, {traffic.descriptors} descriptors",
        "moved while the prompt was still computed": f"{100 * traffic.bytes_early_share:.0f} %",
        "bytes checked": f"{traffic.checked_bytes / 1e6:.1f} MB",
        "wrong bytes": f"{traffic.mismatched_bytes}",
        "blocks still held": f"{traffic.held_blocks}",
        "both ready to arrived, median / p99": f"{traffic.p50_ms:.2f} / {traffic.p99_ms:.2f} ms",
        "time to first token, median": f"{traffic.ttft_p50_ms:.1f} ms",
        "duration": f"{traffic.duration_s:.1f} s ({report.total_s:.1f} s with start and stop)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for reason, count in traffic.failures.items():
        table.add_row(f"failed {count} times", reason, style="red")
    table.add_row("result", "[green]all right[/]" if report.ok else "[red]something went wrong[/]")
    return table
