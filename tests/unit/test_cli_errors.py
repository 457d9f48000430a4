"""What commands print and return when they fail, and what the control path imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvflow.cli.errors import reporting_errors
from kvflow.cli.main import app
from kvflow.cli.run import check_actors
from kvflow.errors import BusError, ConfigError, KvflowError

HEAVY = {"torch", "vllm", "nixl", "nixl_cu12", "transformers"}


def _run(error: BaseException) -> tuple[int, str]:
    made = typer.Typer(pretty_exceptions_enable=False)

    @made.command()
    @reporting_errors
    def command() -> None:
        raise error

    result = CliRunner().invoke(made, [])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KvflowError("odd"), 1, "kvflow: error: odd\n"),
        (ConfigError("bad", remedy="do this"), 2, "kvflow: error: bad (hint: do this)\n"),
        (BusError("gone"), 3, "kvflow: error: gone\n"),
        (ExceptionGroup("g", [ExceptionGroup("h", [BusError("deep")])]), 3, "kvflow: error: deep\n"),
    ],
)
def test_known_errors_are_one_line(error: Exception, code: int, words: str) -> None:
    assert _run(error) == (code, words)


@pytest.mark.parametrize(
    "error", [ValueError("a defect"), ExceptionGroup("g", [BusError("x"), ValueError("a defect")])]
)
def test_a_defect_shows_its_traceback(error: Exception) -> None:
    code, output = _run(error)
    assert code == 70
    assert "Traceback" in output
    assert "a defect" in output


def test_ctrl_c() -> None:
    assert _run(KeyboardInterrupt()) == (130, "")


@pytest.mark.parametrize(
    ("actors", "words"),
    [
        (["matchign"], "unknown actor 'matchign'"),
        (["matching", "matching"], "named twice"),
        (["matching", "transfer"], "do not share a process"),
    ],
)
def test_wrong_actors(actors: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_actors(actors)


def test_right_actors() -> None:
    assert check_actors(["registration"])
    assert check_actors(["matching", "registration"])
    assert not check_actors(["transfer", "completion"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "transfer"], 2, "need the memory of an attached engine"),
        (["run"], 2, "ACTOR"),
        (["run", "matching", "--supervision", "nonsense"], 2, "--supervision is not valid"),
        (["watch", "--kind", "exploded"], 2, "unknown kind of event 'exploded'"),
        (["router", "--port", "99999"], 2, "65535"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_command_lines(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, words in result.output) == (code, True), result.output


@pytest.mark.parametrize("command", [["run", "matching"], ["watch"], ["router"]])
def test_no_node_and_no_url(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLOW_NATS_URL", raising=False)
    result = CliRunner().invoke(app, [*command, "--runtime-dir", str(tmp_path / "none")])
    assert result.exit_code == 6
    assert "no kvflow node is running" in result.output
    assert "kvflow up" in result.output


def test_no_nats_server_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_explicit: object = None) -> str:
        raise BusError("no nats-server binary was found", remedy="install one")

    monkeypatch.delenv("KVFLOW_NATS_URL", raising=False)
    monkeypatch.setattr("kvflow.broker.find_server", missing)
    result = CliRunner().invoke(app, ["up", "--runtime-dir", str(tmp_path / "r")])
    assert result.exit_code == 3
    assert "no nats-server binary was found" in result.output
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("where", ["/proc/kvflow", "/" + "x" * 120])
def test_runtime_folder_that_cannot_be(where: str) -> None:
    result = CliRunner().invoke(app, ["up", "--runtime-dir", where])
    assert result.exit_code == 2
    assert "runtime folder" in result.output
    assert "--runtime-dir" in result.output


def test_version_as_json() -> None:
    result = CliRunner().invoke(app, ["version", "--json"])
    found = json.loads(result.output)
    assert found["kvflow"]
    assert set(found) >= {"python", "nixl", "vllm"}
    assert "not installed" in CliRunner().invoke(app, ["version"]).output or all(found.values())


def _modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())


def test_the_command_line_imports_little() -> None:
    loaded = _modules_after("import kvflow.cli.main")
    assert not loaded & (HEAVY | {"nats", "numpy", "anyio", "aiohttp", "structlog"})


def test_the_control_process_imports_no_engine_software() -> None:
    pytest.importorskip("kvflow.actors.control")
    loaded = _modules_after("import kvflow.node.entry, kvflow.node.control_process, kvflow.actors.control")
    assert not loaded & HEAVY


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "kvflow.cli", "version"], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert process.stderr == b""
    assert process.returncode == 141
