"""Command-line options made from `Settings`, so that every setting has a flag and is declared once.

A command decorated with `with_settings(...)` takes `settings: Settings` and gets one option per field of the named
groups, or per setting named by itself, beside its own; flags win over the environment, which wins over the `--config`
file, then the defaults.
"""

import difflib
import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from kvflow.cli.errors import reporting_errors
from kvflow.config import CONFIG_ENV, ENV_PREFIX, SETTING_NAMES, Settings, load_settings

Group = Literal["Bus", "Transfers", "Data plane", "Node", "Logging"]

HELP: dict[Group, dict[str, str]] = {
    "Bus": {
        "cluster": "Name of the cluster; engines, nodes and tools of one cluster find each other.",
        "nats_url": "NATS servers, comma separated. Empty: the node on this host, or a private server for `kvflow up`.",
        "nats_user": "NATS user.",
        "nats_password": "NATS password; prefer the environment variable, which `ps` does not show.",
        "nats_creds": "File with NATS credentials (JWT and seed).",
        "nats_nkey_seed": "File with an NKey seed.",
        "nats_tls_ca": "File with the certificate authority of the NATS servers.",
        "nats_tls_cert": "File with this client's certificate.",
        "nats_tls_key": "File with this client's private key.",
        "nats_connect_timeout_s": "Seconds to wait for NATS at start-up.",
        "runtime_dir": "Private folder of the node on this host. Default: one per user and cluster.",
    },
    "Transfers": {
        "shards": "Number of matching shards; equal on all nodes and engines of a cluster.",
        "source_wait_s": "Seconds that a target waits for a source to appear.",
        "compute_wait_s": "Seconds that a target waits for its source to finish computing.",
        "transfer_wait_s": "Seconds for the bytes to arrive once the source is ready.",
        "source_lease_s": "Seconds that a finished source is kept for targets to come.",
        "quarantine_s": "Seconds to wait after a source is lost before its target's blocks are reused.",
        "min_load_tokens": "Fewer missing prompt tokens than this are computed by the target itself.",
        "max_live_transfers": "Transfers that one shard holds at most.",
        "control_retention_s": "Seconds that the control stream keeps messages for a restarted matching actor.",
        "events_retention_s": "Seconds that lifecycle events are kept for monitors.",
        "card_ttl_s": "Seconds after which an engine that says nothing counts as lost.",
    },
    "Data plane": {
        "placement": "Where the data plane of an engine runs: in a node process, or in the engine.",
        "nixl_backend": "NIXL backend.",
        "nixl_progress_thread": "Use NIXL's own progress thread; it costs a core.",
        "poll_interval_s": "Seconds between polls while a transfer is pending.",
    },
    "Node": {
        "stop_grace_s": "Seconds for running transfers to end when the node stops.",
    },
    "Logging": {
        "log_level": "Least severe level that is logged.",
        "log_format": "How logs look; auto: readable on a terminal, else JSON.",
    },
}

ALL_GROUPS: tuple[Group, ...] = typing.get_args(Group)
CLIENT_GROUPS: tuple[Group, ...] = ("Bus", "Logging")

Command = Callable[..., None]


def with_settings(*parts: str) -> Callable[[Command], Command]:
    """Turn a function of `settings` and its own options into a command with options for groups or single settings."""
    chosen = [(group, name) for group, texts in HELP.items() for name in texts if group in parts or name in parts]

    def decorate(function: Command) -> Command:

        @functools.wraps(function)
        @reporting_errors
        def command(**values: Any) -> None:
            config = values.pop("config", None)
            flags = {name: values.pop(name, None) for _, name in chosen}
            warn_of_misspelt(os.environ)
            function(settings=load_settings(flags, config_file=config), **values)

        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        shared = [_config_option(), *(_option(group, name) for group, name in chosen)]
        parameters = [*own, *shared]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def warn_of_misspelt(names: Iterable[str]) -> None:
    """Say on stderr which variables nearly name a setting; others may be anybody's (Kubernetes sets its own)."""
    known = {CONFIG_ENV, *(ENV_PREFIX + name.upper() for name in SETTING_NAMES)}
    for name in sorted(name for name in names if name.startswith(ENV_PREFIX) and name not in known):
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            print(f"kvflow: warning: {name} is not a setting (hint: did you mean {close[0]}?)", file=sys.stderr)


def _config_option() -> inspect.Parameter:
    text = (
        "TOML file with settings. Every setting below is also a key of that file (--nats-url: nats_url) and a "
        f"variable ({ENV_PREFIX}NATS_URL). [env: {CONFIG_ENV}]"
    )
    option = typer.Option("--config", metavar="FILE", help=text, rich_help_panel="Configuration")
    return _parameter("config", Annotated[Path | None, option])


def _option(group: Group, name: str) -> inspect.Parameter:
    field = next(field for field in msgspec.structs.fields(Settings) if field.name == name)
    kind = _base_type(field.type)
    default = str(field.default).lower() if kind is bool else field.default
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=HELP[group][name] + (f" [default: {default}]" if default != "" else ""),
        rich_help_panel=group,
        show_default=False,
        show_choices=True,
    )
    # A switch would need a second, negative flag to win over a variable: a value reads as it does there.
    declared = Literal["true", "false"] if kind is bool else kind
    return _parameter(name, Annotated[declared | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _base_type(declared: Any) -> Any:
    """Return the type that the flag takes: the bare type of an annotated one; ranges are checked by `load_settings`."""
    return get_args(declared)[0] if get_origin(declared) is Annotated else declared
