"""`kvflow run`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvflow.cli.options import ALL_GROUPS, with_settings
from kvflow.config import Settings
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.node.lifeline import Supervision

CONTROL = ("registration", "matching")
DATA = ("transfer", "completion")


@with_settings(*ALL_GROUPS)
def run(
    settings: Settings,
    actors: Annotated[
        list[str],
        typer.Argument(metavar="ACTOR", help="registration, matching, or both; transfer, completion, or both."),
    ],
    supervision: Annotated[str | None, typer.Option(hidden=True, help="Set by `kvflow up`.")] = None,
) -> None:
    """Run some actors in this process, until SIGTERM or Ctrl-C.

    registration and matching are the control actors: any host that reaches NATS may run them. transfer and completion
    work on an engine's memory, so `kvflow up` starts them, when the engine's worker attaches.

    For example:

        kvflow run registration matching --nats-url nats://10.0.0.5:4222

        kvflow run matching --shards 4 --log-format json
    """
    control = check_actors(actors)
    if supervision is None:
        _run_alone(settings, actors, control=control)
        return
    from kvflow.node.lifeline import parse_supervision, watch_lifeline
    from kvflow.node.runtime import remove_stale

    parsed = parse_supervision(supervision)
    # Before anything slow: the node may die while we import.
    watch_lifeline(parsed.lifeline, tidy=partial(remove_stale, settings.runtime_path()))
    _run(settings, actors, parsed, control=control)


def check_actors(actors: list[str]) -> bool:
    """Return whether these are control actors; raise ConfigError for names or mixtures that make no process."""
    unknown = [name for name in actors if name not in CONTROL + DATA]
    if unknown:
        raise ConfigError(f"unknown actor {unknown[0]!r}", remedy=f"choose from {', '.join(CONTROL + DATA)}")
    if len(set(actors)) != len(actors):
        raise ConfigError(f"an actor is named twice: {' '.join(actors)}", remedy="name each actor once")
    control = all(name in CONTROL for name in actors)
    if not control and any(name in CONTROL for name in actors):
        raise ConfigError(
            "control actors and data actors do not share a process",
            remedy="run registration and matching apart from transfer and completion",
        )
    return control


def _run_alone(settings: Settings, actors: list[str], *, control: bool) -> None:
    if not control:
        raise ConfigError(
            f"{' and '.join(actors)} need the memory of an attached engine",
            remedy="run `kvflow up`: it starts them when an engine's worker attaches",
        )
    from kvflow.cli.locate import locate_nats

    _run(locate_nats(settings), actors, None, control=control)


def _run(settings: Settings, actors: list[str], supervision: "Supervision | None", *, control: bool) -> None:
    from kvflow.log import configure_logging
    from kvflow.node.entry import Ready, run_process

    configure_logging(
        level=settings.log_level, log_format=settings.log_format, process="control" if control else "data"
    )

    async def work(ready: Ready) -> None:
        if control:
            from kvflow.node.control_process import run_control_process

            await run_control_process(settings, actors, ready)
        elif supervision is not None:
            from kvflow.node.data_process import run_attached_rank

            await run_attached_rank(settings, supervision, ready)

    run_process(work, supervision)
