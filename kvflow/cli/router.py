"""`kvflow router`."""

import sys
from typing import Annotated, Literal

import typer

from kvflow.cli.options import CLIENT_GROUPS, with_settings
from kvflow.config import Settings
from kvflow.errors import ConfigError

Mode = Literal["push", "deferred", "local"]


@with_settings(*CLIENT_GROUPS)
def router(
    settings: Settings,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=URL", help="An engine besides those that attached to nodes; may be repeated."),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="How a request crosses. push: both legs at once; deferred: decode is chosen when prefill has ended; "
            "local: not at all.",
        ),
    ] = "push",
    local_below: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Shorter prompts are computed where they are decoded.")
    ] = 0,
    fallback: Annotated[
        bool, typer.Option(help="Without a pair of engines, let one answer alone; otherwise the client gets a 503.")
    ] = True,
    attempts: Annotated[int, typer.Option(min=1, help="Engines to try before a request fails.")] = 3,
    api_key: Annotated[
        str, typer.Option(envvar="KVFLOW_API_KEY", help="Key that the router shows to engines.", show_envvar=True)
    ] = "",
) -> None:
    """Give clients one OpenAI-compatible address in front of all engines of the cluster.

    For example:

        kvflow router --port 8000

        kvflow router --nats-url nats://10.0.0.5:4222 --host 0.0.0.0

        kvflow router --engine prefill=http://h1:8100 --engine decode=http://h2:8200
    """
    from kvflow.cli.locate import locate_nats
    from kvflow.errors import NodeError
    from kvflow.log import configure_logging

    configure_logging(level=settings.log_level, log_format=settings.log_format, process="router")
    try:
        settings = locate_nats(settings)
    except NodeError:
        if not engine:
            raise  # with engines on the command line the directory is an extra
    try:
        from kvflow.router.app import run_router
        from kvflow.router.proxy import Policy
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvflow"):
            raise
        raise ConfigError(f"the router needs {error.name}", remedy='pip install "kvflow[router]"') from error
    policy = Policy(mode=mode, local_below_tokens=local_below, fallback=fallback, attempts=attempts)
    sys.exit(run_router(settings, host=host, port=port, engines=engine or [], policy=policy, api_key=api_key))
