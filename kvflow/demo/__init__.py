"""Everything needed to show kvflow on one machine: a tiny model, engine processes, and the demo itself."""

from collections.abc import Sequence

from kvflow.config import Settings


def run_demo(
    settings: Settings,
    *,
    lengths: Sequence[int] = (),
    max_tokens: int = 24,
    json: bool = False,
    keep: bool = False,
    seed: int = 1,
) -> int:
    """Show prefill on one vLLM engine and decode on another, compared with one engine alone; return the exit code.

    `lengths` are prompt lengths in tokens (empty: a choice that shows chunk-progressive push). The code is 0 only when
    every answer has the same tokens and every prompt's KV really crossed. Everything is stopped and removed at the end;
    `keep` leaves the folder with the model and the logs.
    """
    import asyncio

    from kvflow.demo.show import PROMPT_LENGTHS, DemoOptions, until_interrupted
    from kvflow.log import configure_logging

    if settings.log_level == "info":  # the default: a demo shows its result, not the log of its parts
        configure_logging(level="warning", log_format=settings.log_format, process="demo")
    options = DemoOptions(
        lengths=tuple(lengths) or PROMPT_LENGTHS, max_tokens=max_tokens, as_json=json, keep=keep, seed=seed
    )
    return asyncio.run(until_interrupted(settings, options))
