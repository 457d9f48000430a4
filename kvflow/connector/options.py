"""Read the connector's options: kvflow's settings plus `api_url` and `roles`, from vLLM's kv_connector_extra_config."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvflow.config import Settings, load_settings
from kvflow.errors import ConfigError
from kvflow.messages import Role

ROLES: tuple[Role, ...] = ("source", "target")
ROLES_OF_VLLM: Mapping[str, tuple[Role, ...]] = {
    "kv_producer": ("source",),
    "kv_consumer": ("target",),
    "kv_both": ROLES,
}
# Keys of vLLM's own that may stand beside ours.
FOREIGN_KEYS = frozenset({"enforce_handshake_compat", "num_threads", "backends"})


@dataclass(frozen=True, slots=True)
class Options:
    """Hold what an engine was told about kvflow."""

    settings: Settings
    roles: tuple[Role, ...]
    api_url: str


def read_options(extra: Mapping[str, object], kv_role: str | None) -> Options:
    """Return the options; raise ConfigError naming what is wrong, at engine start."""
    flags = {key: value for key, value in extra.items() if key not in FOREIGN_KEYS}
    roles = _roles(flags.pop("roles", None), kv_role)
    api_url = flags.pop("api_url", "")
    if not isinstance(api_url, str):
        raise ConfigError(
            f"api_url is a {type(api_url).__name__}, not a string", remedy="set the engine's HTTP address"
        )
    if api_url and not api_url.startswith(("http://", "https://")):
        raise ConfigError(f"api_url {api_url!r} is no HTTP address", remedy="give http://host:port")
    return Options(load_settings(flags, flags_from="kv_connector_extra_config"), roles, api_url.rstrip("/"))


def _roles(value: object, kv_role: str | None) -> tuple[Role, ...]:
    if value is None:
        if kv_role is None or kv_role not in ROLES_OF_VLLM:
            raise ConfigError(f"kv_role is {kv_role!r}", remedy=f"use one of {', '.join(ROLES_OF_VLLM)}")
        return ROLES_OF_VLLM[kv_role]
    names = value.split(",") if isinstance(value, str) else value
    wanted = {str(name).strip() for name in names} if isinstance(names, list | tuple) else set()
    if not wanted or not wanted <= set(ROLES):
        raise ConfigError(f"roles is {value!r}", remedy='use "source", "target" or "source,target"')
    return tuple(role for role in ROLES if role in wanted)
