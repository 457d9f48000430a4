"""docker-compose.yml: every kvflow command line parses, and the connector reads what every engine is told."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from kvflow.cli.main import app
from kvflow.config import SETTING_NAMES, load_settings
from kvflow.connector.options import read_options

ROOT = Path(__file__).parents[2]
TRANSFER_CONFIG = "--kv-transfer-config"
# Fields of vLLM's KVTransferConfig that the file uses; a typo would stop the engine.
KNOWN_KEYS = {
    "kv_connector", "kv_connector_module_path", "kv_role", "engine_id", "kv_load_failure_policy",
    "kv_connector_extra_config",
}  # fmt: skip
ROLES = {"prefill": "source", "decode": "target"}


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


SERVICES = _services()
ENGINES = sorted(name for name in SERVICES if TRANSFER_CONFIG in SERVICES[name].get("command", ""))
KVFLOW = sorted(name for name, it in SERVICES.items() if str(it["image"]).startswith("kvflow:") and name not in ENGINES)


def _words(service: Mapping[str, Any]) -> list[str]:
    """Split a command as compose does, with the defaults of its variables."""
    command = service.get("command", [])
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command) if isinstance(command, str) else ""
    return shlex.split(text) if isinstance(command, str) else list(command)


def _transfer_config(name: str) -> dict[str, Any]:
    words = _words(SERVICES[name])
    config: dict[str, Any] = json.loads(words[words.index(TRANSFER_CONFIG) + 1])
    return config


def test_the_file_is_what_the_tests_expect() -> None:
    assert ENGINES == ["decode-cpu", "decode-gpu", "prefill-cpu", "prefill-gpu"]
    assert len(KVFLOW) == 5


@pytest.mark.parametrize("name", KVFLOW)
def test_kvflow_command_lines_parse(name: str) -> None:
    command, *arguments = _words(SERVICES[name])
    found = typer.main.get_group(app).commands[command]
    found.make_context(command, arguments)  # raises on an unknown option or a wrong value
    assert "entrypoint" not in SERVICES[name]


@pytest.mark.parametrize("name", [*ENGINES, *KVFLOW])
def test_variables_are_settings(name: str) -> None:
    environment = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    ours = {key.removeprefix("KVFLOW_").lower() for key in environment if key.startswith("KVFLOW_")}
    assert ours <= set(SETTING_NAMES)
    assert load_settings(environ=environment).nats_url == "nats://nats:4222"


@pytest.mark.parametrize("name", ENGINES)
def test_engines_get_a_configuration_that_the_connector_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("KVFLOW_")]:
        monkeypatch.delenv(variable)
    config = _transfer_config(name)
    assert set(config) <= KNOWN_KEYS
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "KvflowConnector",
        "kvflow.connector.facade",
    )
    options = read_options(config["kv_connector_extra_config"], config["kv_role"])
    words = _words(SERVICES[name])
    assert options.api_url == f"http://{name}:{words[words.index('--port') + 1]}"
    assert options.roles == (ROLES[name.partition("-")[0]],)


def test_the_readme_configures_engines_alike() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = json.loads(readme.partition(f"{TRANSFER_CONFIG} '")[2].partition("'")[0])
    assert set(shown) == set(_transfer_config("prefill-cpu"))
    assert read_options(shown["kv_connector_extra_config"], shown["kv_role"]).roles == ("source",)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_profiles_are_closed(profile: str) -> None:
    members = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    assert "nats" in members
    for name in members:
        assert set(SERVICES[name].get("depends_on", {})) <= members


@pytest.mark.parametrize("engine", ["prefill", "decode"])
def test_a_cpu_engine_and_its_node_share_their_runtime_folder(engine: str) -> None:
    node, served = SERVICES[f"node-{engine}-cpu"], SERVICES[f"{engine}-cpu"]
    folder = node["environment"]["KVFLOW_RUNTIME_DIR"]
    assert node["volumes"] == [f"{engine}-runtime:{folder}"]
    assert node["volumes"][0] in served["volumes"]
    assert (node.get("user"), node["image"]) == (served.get("user"), served["image"])
