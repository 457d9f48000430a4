"""`kvflow demo`."""

import sys
from typing import Annotated

import typer

from kvflow.cli.options import with_settings
from kvflow.config import Settings


@with_settings("placement", "Logging")
def demo(
    settings: Settings,
    sim: Annotated[bool, typer.Option("--sim", help="Simulated engines: no vLLM and no model, up in seconds.")] = False,
    transfers: Annotated[int, typer.Option(min=1, help="Number of transfers (with --sim).")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="Transfers at a time (with --sim).")] = 12,
    tp_size: Annotated[int, typer.Option(min=1, max=16, help="Ranks of each engine (with --sim).")] = 1,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt length in tokens; may be repeated (without --sim).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer (without --sim).")] = 24,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model and the logs (without --sim).")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Show kvflow at work on this machine: a prefill engine, a decode engine, and what goes from one to the other.

    For example:

        kvflow demo --sim

        kvflow demo --sim --transfers 1000 --tp-size 2 --json

        kvflow demo
    """
    from kvflow.log import configure_logging

    configure_logging(level=settings.log_level, log_format=settings.log_format, process="demo")
    if sim:
        from kvflow.sim.demo import run_sim_demo

        status = run_sim_demo(
            settings, transfers=transfers, json=as_json, concurrency=concurrency, tp_size=tp_size, seed=seed
        )
    else:
        from kvflow.demo import run_demo

        status = run_demo(settings, lengths=length or (), max_tokens=max_tokens, json=as_json, keep=keep, seed=seed)
    sys.exit(status)
