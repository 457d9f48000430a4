"""Settings, taken from flags, environment (`KVFLOW_*`), a TOML file and defaults, in that order of precedence."""

import difflib
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from kvflow.errors import ConfigError

ENV_PREFIX = "KVFLOW_"
CONFIG_ENV = "KVFLOW_CONFIG"

Positive = Annotated[float, msgspec.Meta(gt=0)]
PlacementChoice = Literal["auto", "process", "engine"]

# A card is refreshed every third of `card_ttl_s`. Whoever stood still for the other two thirds may count as lost.
HALT_SHARE = 2 / 3


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold every setting that more than one part of kvflow reads. Durations are seconds."""

    # Bus. An empty URL means: the node of this runtime folder tells it, or a private server is started.
    cluster: str = "default"
    nats_url: str = ""
    nats_user: str = ""
    nats_password: str = ""
    nats_creds: str = ""
    nats_nkey_seed: str = ""
    nats_tls_ca: str = ""
    nats_tls_cert: str = ""
    nats_tls_key: str = ""
    nats_connect_timeout_s: Positive = 5.0
    runtime_dir: str = ""
    # Life of a transfer.
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    source_wait_s: Positive = 30.0
    compute_wait_s: Positive = 600.0
    transfer_wait_s: Positive = 30.0
    source_lease_s: Positive = 30.0
    quarantine_s: Positive = 5.0
    min_load_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32
    max_live_transfers: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    control_retention_s: Positive = 900.0
    events_retention_s: Positive = 3600.0
    card_ttl_s: Positive = 6.0
    # Data plane.
    placement: PlacementChoice = "auto"
    nixl_backend: str = "UCX"
    nixl_progress_thread: bool = False
    poll_interval_s: Positive = 0.0002
    # Node.
    stop_grace_s: Positive = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"

    def runtime_path(self) -> Path:
        """Return this user's private runtime folder for the cluster (not created here)."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        xdg = os.environ.get("XDG_RUNTIME_DIR")
        base = Path(xdg) if xdg else Path(tempfile.gettempdir()) / f"kvflow-{os.getuid()}"
        return base / "kvflow" / self.cluster


SETTING_NAMES = Settings.__struct_fields__
SECRET_NAMES = frozenset({"nats_password", "nats_nkey_seed", "nats_url"})  # shown in no message


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags_from: str = "",
) -> Settings:
    """Merge flags over environment over file over defaults; raise ConfigError naming a bad setting as it was written.

    `flags_from` says where the flags come from, unless that is the command line.
    """
    env = os.environ if environ is None else environ
    merged: dict[str, object] = {}
    written: dict[str, str] = {}
    file = config_file or env.get(CONFIG_ENV)
    if file:
        content = _read_file(Path(file))
        _check_names(content, f"file {file}")
        merged |= content
        written |= {name: f"{name} in file {file}" for name in content}
    from_env = {name: env[ENV_PREFIX + name.upper()] for name in SETTING_NAMES if env.get(ENV_PREFIX + name.upper())}
    merged |= from_env
    written |= {name: f"{ENV_PREFIX}{name.upper()} in the environment" for name in from_env}
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _check_names(given, flags_from or "flags")
    merged |= given
    written |= {name: f"{name} in {flags_from}" if flags_from else _flag(name) for name in given}
    try:
        settings = msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].strip("`")
        if name not in written:
            raise ConfigError(f"bad settings: {error}", remedy="see `kvflow up --help`") from error
        raise _bad_value(name, merged[name], written[name]) from error
    _check_urls(settings.nats_url, written.get("nats_url", "nats_url"))
    return settings


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bad_value(name: str, value: object, written: str) -> ConfigError:
    shown = "its value" if name in SECRET_NAMES else repr(value)
    return ConfigError(f"bad setting {written}: {shown} is not {_allowed(name)}", remedy=f"give {_allowed(name)}")


def _allowed(name: str) -> str:
    """Say in words which values a setting takes."""
    declared = get_type_hints(Settings, include_extras=True)[name]
    kind, *notes = get_args(declared) if get_origin(declared) is Annotated else (declared,)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    words: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    text = words[kind]
    for note in notes:
        if note.ge is not None and note.le is not None:
            text += f" from {note.ge} to {note.le}"
        elif note.ge is not None:
            text += f" of at least {note.ge}"
        elif note.gt is not None:
            text += f" above {note.gt}"
    return text


def _check_names(layer: Iterable[str], where: str) -> None:
    for name in layer:
        if name not in SETTING_NAMES:
            close = difflib.get_close_matches(name, SETTING_NAMES, n=1)
            raise ConfigError(
                f"unknown setting {name!r} in {where}",
                remedy=f"did you mean {close[0]}?" if close else f"known settings: {', '.join(SETTING_NAMES)}",
            )


def _check_urls(urls: str, written: str) -> None:
    """Raise ConfigError for a server address that is none: connecting would report a failed look-up of a host."""
    for url in filter(None, (url.strip() for url in urls.split(","))):
        try:
            parts = urlsplit(url if "//" in url else f"nats://{url}")
            usable = bool(parts.hostname) and not any(sign.isspace() for sign in url) and parts.port != 0
        except ValueError:  # a port that is no number, a bracket left open
            usable = False
        if not usable:
            # Where credentials are about, it is not clear which part of a broken address is the password.
            shown = "an address with credentials" if "@" in urls else repr(url)
            raise ConfigError(
                f"bad setting {written}: {shown} is no NATS URL",
                remedy="give nats://host:port, several of them separated by commas; write special characters of a"
                " password as %XX",
            )


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}",
            remedy=f"check --config or {CONFIG_ENV}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration file {path} is not valid TOML: {error}",
            remedy='write one `name = value` a line, with text in quotes: cluster = "prod"',
        ) from error
