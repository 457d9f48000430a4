"""`kvflow demo`."""

from typing import Annotated

import typer

from kvflow.cli.options import with_settings
from kvflow.config import Settings


@with_settings("Logging")
def demo(
    settings: Settings,
    sim: Annotated[bool, typer.Option("--sim", help="Simulated engines: no vLLM and no model, up in seconds.")] = False,
) -> None:
    """Show kvflow at work on this machine: a prefill engine, a decode engine, a router, and what happens between them.

    For example:

        kvflow demo --sim

        kvflow demo
    """
    from kvflow.log import configure_logging

    configure_logging(level=settings.log_level, log_format=settings.log_format, process="demo")
    if sim:
        from kvflow.sim.demo import run_sim_demo

        run_sim_demo(settings)
    else:
        from kvflow.demo import run_demo

        run_demo(settings)
