"""`kvflow watch`."""

from typing import Annotated

import typer

from kvflow.cli.options import CLIENT_GROUPS, with_settings
from kvflow.config import Settings


@with_settings(*CLIENT_GROUPS)
def watch(
    settings: Settings,
    transfer: Annotated[
        list[str] | None, typer.Option(help="Only transfers whose id begins with this; may be repeated.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only this engine, as source or target; may be repeated.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only this kind of event (bound, completed, …); may be repeated.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only what went wrong: failed, rejected, expired, lost.")
    ] = False,
    since: Annotated[float, typer.Option(min=0, help="Begin this many seconds ago; 0: only what is new.")] = 0.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after this many events.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="End after this many seconds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Show the lifecycle events of transfers and engines as they happen.

    For example:

        kvflow watch

        kvflow watch --failed --since 600

        kvflow watch --transfer 5f0c --json --count 1
    """
    from kvflow.cli.locate import locate_nats
    from kvflow.log import configure_logging
    from kvflow.monitor.filter import EventFilter
    from kvflow.monitor.watch import WatchOptions, run_watch

    configure_logging(level=settings.log_level, log_format=settings.log_format, process="watch")
    chosen = EventFilter.parse(transfers=transfer or [], engines=engine or [], kinds=kind or [], failed=failed)
    options = WatchOptions(event_filter=chosen, since_s=since, count=count, timeout_s=timeout, as_json=as_json)
    run_watch(locate_nats(settings), options)
