"""`kvflow up`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvflow.cli.options import ALL_GROUPS, with_settings
from kvflow.config import Settings

if TYPE_CHECKING:
    from kvflow.node.supervisor import NodeReport


@with_settings(*ALL_GROUPS)
def up(
    settings: Settings,
    ready_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for each part of the node to be ready.")
    ] = 30.0,
    control: Annotated[
        bool, typer.Option(help="Run registration and matching here. One node per cluster is enough for them.")
    ] = True,
    nats_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the private NATS server. Default: a free one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that the node is ready in one line of JSON.")] = False,
) -> None:
    """Run a node: NATS (if none is given), the control actors, and a data process per attached engine rank.

    Runs until SIGTERM or Ctrl-C, then lets running transfers end, stops everything and removes its runtime folder.
    A second signal skips the waiting.

    For example:

        kvflow up

        kvflow up --nats-url nats://10.0.0.5:4222 --cluster prod

        kvflow up --no-control --nats-url nats://10.0.0.5:4222 --json
    """
    import anyio

    from kvflow.log import configure_logging
    from kvflow.node.supervisor import NodeOptions, run_node

    configure_logging(level=settings.log_level, log_format=settings.log_format, process="node")
    options = NodeOptions(control=control, ready_timeout_s=ready_timeout, broker_port=nats_port)

    def say_ready(report: "NodeReport") -> None:
        print(_as_json(report) if as_json else _as_text(report), flush=True)

    anyio.run(run_node, settings, options, say_ready)
    sys.exit(0)


def _as_json(report: "NodeReport") -> str:
    import msgspec

    return msgspec.json.encode(report).decode()


def _as_text(report: "NodeReport") -> str:
    address = report.nats_url.rpartition("@")[2].removeprefix("nats://")
    pids = ", ".join(f"{name} {pid}" for name, pid in report.pids.items())
    return f"kvflow node is ready: cluster {report.cluster}, NATS {address}, engines attach at {report.socket} ({pids})"
