"""Options made from Settings: one flag per setting, and the order of precedence."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvflow.cli.main import app
from kvflow.cli.options import ALL_GROUPS, HELP, with_settings
from kvflow.config import CONFIG_ENV, SETTING_NAMES, Settings

COMMANDS = ("up", "run", "router", "watch", "demo", "version")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> tuple[typer.Typer, list[Any]]:
    """Return an app with one command that notes what it was called with."""
    for name in SETTING_NAMES:
        monkeypatch.delenv(f"KVFLOW_{name.upper()}", raising=False)
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    seen: list[Any] = []
    made = typer.Typer()

    @made.command()
    @with_settings(*ALL_GROUPS)
    def command(settings: Settings, extra: int = 7) -> None:
        seen.append((settings, extra))

    return made, seen


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    described = [name for group in ALL_GROUPS for name in HELP[group]]
    assert sorted(described) == sorted(SETTING_NAMES)


def test_defaults(probe: tuple[typer.Typer, list[Any]]) -> None:
    made, seen = probe
    assert CliRunner().invoke(made, []).exit_code == 0
    assert seen == [(Settings(), 7)]


def test_flags_win_over_environment_over_file(
    probe: tuple[typer.Typer, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, seen = probe
    file = tmp_path / "kvflow.toml"
    file.write_text('shards = 2\ncluster = "file"\nlog_level = "debug"\n')
    monkeypatch.setenv("KVFLOW_SHARDS", "3")
    monkeypatch.setenv("KVFLOW_CLUSTER", "env")
    result = CliRunner().invoke(
        made,
        [
            "--config",
            str(file),
            "--shards",
            "4",
            "--nixl-progress-thread",
            "true",
            "--source-wait-s",
            "1.5",
            "--extra",
            "1",
        ],
    )
    assert result.exit_code == 0, result.output
    settings, extra = seen[0]
    assert (settings.shards, settings.cluster, settings.log_level) == (4, "env", "debug")
    assert settings.nixl_progress_thread
    assert settings.source_wait_s == 1.5
    assert extra == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shards", "0"], "shards"),
        (["--source-wait-s", "-1"], "--source-wait-s"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--placement", "moon"], "placement"),
        (["--shards", "many"], "shards"),
        (["--nixl-progress-thread", "maybe"], "nixl-progress-thread"),
    ],
)
def test_bad_values_name_the_setting_and_exit_with_2(
    probe: tuple[typer.Typer, list[Any]], arguments: list[str], words: str
) -> None:
    made, seen = probe
    result = CliRunner().invoke(made, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert not seen


def test_bad_environment_and_file_name_their_origin(
    probe: tuple[typer.Typer, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, _ = probe
    monkeypatch.setenv("KVFLOW_SHARDS", "none")
    result = CliRunner().invoke(made, [])
    assert result.exit_code == 2
    assert "KVFLOW_SHARDS in the environment" in result.output
    monkeypatch.delenv("KVFLOW_SHARDS")
    file = tmp_path / "kvflow.toml"
    file.write_text("shrads = 2\n")
    result = CliRunner().invoke(made, ["--config", str(file)])
    assert result.exit_code == 2
    assert "unknown setting 'shrads'" in result.output
    file.write_text("shards = [")
    assert "not valid TOML" in CliRunner().invoke(made, ["--config", str(file)]).output


def test_a_false_flag_wins_over_a_true_variable(
    probe: tuple[typer.Typer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = probe
    monkeypatch.setenv("KVFLOW_NIXL_PROGRESS_THREAD", "true")
    assert CliRunner().invoke(made, ["--nixl-progress-thread", "false"]).exit_code == 0
    assert not seen[0][0].nixl_progress_thread


def test_misspelt_variables_are_pointed_out_and_strange_ones_left_alone(
    probe: tuple[typer.Typer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = probe
    for name in ("KVFLOW_NATSURL", "KVFLOW_API_KEY", "KVFLOW_PORT_8000_TCP", "KVFLOW_SERVICE_HOST"):
        monkeypatch.setenv(name, "x")
    result = CliRunner().invoke(made, [])
    assert result.exit_code == 0
    assert result.output == ("kvflow: warning: KVFLOW_NATSURL is not a setting (hint: did you mean KVFLOW_NATS_URL?)\n")
    assert seen == [(Settings(), 7)]


def test_single_settings_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["demo", "--help"]).output
    assert "--placement" in shown
    assert "--log-level" in shown
    assert "--nats-url " not in shown
    assert "--nixl-backend" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_flag_whole_in_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [command, "--help"]).output
    flags = [line for line in shown.splitlines() if line.startswith("│ --")]
    assert flags
    assert not [line for line in flags if "…" in line.partition("<")[0]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"kvflow {command}" in result.output.partition("For example")[2]


def test_help_lists_all_commands() -> None:
    result = CliRunner().invoke(app, ["-h"])
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)
