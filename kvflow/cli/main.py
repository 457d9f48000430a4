"""The `kvflow` command."""

import typer

from kvflow.cli.demo import demo
from kvflow.cli.router import router
from kvflow.cli.run import run
from kvflow.cli.up import up
from kvflow.cli.version import version
from kvflow.cli.watch import watch

SUMMARY = """Move the KV cache between disaggregated LLM engines.

`kvflow up` runs a node on each host; engines with the kvflow connector attach to it. `kvflow router` gives clients one
OpenAI-compatible address. `kvflow watch` shows what happens. `kvflow demo` shows all of it on one machine.

Settings come from flags, then KVFLOW_* variables, then the --config file, then defaults.
"""

app = typer.Typer(
    name="kvflow",
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (up, run, router, watch, demo, version):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
