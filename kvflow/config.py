"""Settings, taken from flags, environment (`KVFLOW_*`), a TOML file and defaults, in that order of precedence."""

import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

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


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge flags over environment over file over defaults; raise ConfigError naming the bad setting and its origin."""
    env = os.environ if environ is None else environ
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    file = config_file or env.get(CONFIG_ENV)
    if file:
        _overlay(merged, origin, _read_file(Path(file)), f"file {file}")
    from_env = {name: env[ENV_PREFIX + name.upper()] for name in SETTING_NAMES if env.get(ENV_PREFIX + name.upper())}
    _overlay(merged, origin, from_env, "environment")
    _overlay(merged, origin, {k: v for k, v in (flags or {}).items() if v is not None}, "flags")
    try:
        return msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].strip("`") if "$." in str(error) else ""
        where = f" (from {origin[name]})" if name in origin else ""
        raise ConfigError(
            f"bad setting{where}: {error}", remedy="see `kvflow up --help` for the allowed values"
        ) from error


def _overlay(merged: dict[str, object], origin: dict[str, str], layer: Mapping[str, object], where: str) -> None:
    for name, value in layer.items():
        if name not in SETTING_NAMES:
            raise ConfigError(
                f"unknown setting {name!r} in {where}", remedy=f"known settings: {', '.join(SETTING_NAMES)}"
            )
        merged[name] = value
        origin[name] = where


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}", remedy="check --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return content
