"""Settings come from flags, environment, file and defaults, in that order, and mistakes are named with their origin."""

from pathlib import Path

import msgspec
import pytest

from kvflow.config import SETTING_NAMES, Settings, load_settings
from kvflow.errors import ConfigError
from kvflow.ids import MAX_ID_LENGTH, check_id, new_incarnation, new_transfer_id


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_need_nothing() -> None:
    assert load_settings(environ={}) == Settings()


def test_precedence(tmp_path: Path) -> None:
    file = write(tmp_path / "k.toml", 'cluster = "file"\nshards = 2\nlog_level = "debug"\nsource_wait_s = 7\n')
    environ = {"KVFLOW_CLUSTER": "env", "KVFLOW_SHARDS": "3", "KVFLOW_CONFIG": str(file), "OTHER": "x"}
    settings = load_settings({"cluster": "flag", "shards": None}, environ=environ)
    assert (settings.cluster, settings.shards, settings.log_level) == ("flag", 3, "debug")
    assert settings.source_wait_s == 7.0


def test_a_file_given_by_flag_wins_over_the_environments(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.toml", 'cluster = "one"\n'), write(tmp_path / "2.toml", 'cluster = "two"\n')
    assert load_settings(config_file=one, environ={"KVFLOW_CONFIG": str(two)}).cluster == "one"


def test_environment_strings_become_what_the_setting_is() -> None:
    settings = load_settings(
        environ={"KVFLOW_NIXL_PROGRESS_THREAD": "true", "KVFLOW_POLL_INTERVAL_S": "0.001", "KVFLOW_SHARDS": "4"}
    )
    assert (settings.nixl_progress_thread, settings.poll_interval_s, settings.shards) == (True, 0.001, 4)


def test_an_empty_environment_variable_counts_as_not_set() -> None:
    assert load_settings(environ={"KVFLOW_SHARDS": ""}).shards == Settings().shards


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shards", "0"),
        ("shards", "1025"),
        ("shards", "many"),
        ("source_wait_s", "0"),
        ("source_wait_s", "-1"),
        ("placement", "moon"),
        ("log_level", "loud"),
        ("nixl_progress_thread", "perhaps"),
        ("max_live_transfers", "0"),
    ],
)
def test_bad_values_name_the_setting_as_it_was_written(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"KVFLOW_{name.upper()} in the environment: {value!r} is not") as caught:
        load_settings(environ={f"KVFLOW_{name.upper()}": value})
    assert caught.value.exit_code == 2


def test_bad_values_say_where_they_are_and_what_is_allowed(tmp_path: Path) -> None:
    file = write(tmp_path / "k.toml", 'source_wait_s = "long"\n')
    with pytest.raises(ConfigError, match="--shards: 'many' is not a whole number from 1 to 1024"):
        load_settings({"shards": "many"}, environ={})
    with pytest.raises(ConfigError, match="shards in extra: 0 is not"):
        load_settings({"shards": 0}, environ={}, flags_from="extra")
    with pytest.raises(ConfigError, match=r"source_wait_s in file .*k.toml: 'long' is not a number above 0"):
        load_settings(config_file=file, environ={})
    with pytest.raises(ConfigError, match="is not one of auto, process, engine"):
        load_settings({"placement": "moon"}, environ={})
    with pytest.raises(ConfigError, match="is not a whole number of at least 1"):
        load_settings({"min_load_tokens": 0}, environ={})
    with pytest.raises(ConfigError, match="is not true or false"):
        load_settings({"nixl_progress_thread": "maybe"}, environ={})


def test_every_setting_can_say_what_it_takes() -> None:
    for name in SETTING_NAMES:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: .* is not "):
            load_settings({name: ["a list"]}, environ={})


@pytest.mark.parametrize("name", ["nats_password", "nats_nkey_seed"])
def test_secrets_are_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match="its value is not text") as caught:
        load_settings({name: 12345}, environ={})
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize("url", ["two words", "nats://", "nats//h", "nats://h:port", "nats://h:99999", "nats://[::1"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no NATS URL") as caught:
        load_settings({"nats_url": f"nats://h:4222,{url}"}, environ={})
    assert "--nats-url" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings({"nats_url": "nats://user:hush#hush@h:4222"}, environ={})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "h", "h:4222", "nats://u:p@h:1, tls://[::1]:2", "ws://h:1/path"])
def test_addresses_that_connect_are_taken(url: str) -> None:
    assert load_settings({"nats_url": url}, environ={}).nats_url == url


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'colour' in file"):
        load_settings(config_file=write(tmp_path / "k.toml", 'colour = "red"\n'), environ={})
    with pytest.raises(ConfigError, match="unknown setting 'colour' in flags"):
        load_settings({"colour": "red"}, environ={})
    with pytest.raises(ConfigError, match=r"did you mean shards\?"):
        load_settings(config_file=write(tmp_path / "k.toml", "shrads = 2\n"), environ={})


def test_unreadable_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(config_file=tmp_path / "missing.toml", environ={})
    with pytest.raises(ConfigError, match=r"k\.toml is not valid TOML: .*line 1"):
        load_settings(config_file=write(tmp_path / "k.toml", "= ="), environ={})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(config_file=tmp_path / "binary.toml", environ={})


def test_settings_cannot_be_changed_and_reject_unknown_names() -> None:
    with pytest.raises(AttributeError):
        Settings().shards = 2  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"colour": "red"}, Settings)
    assert len(set(SETTING_NAMES)) == len(SETTING_NAMES)


def test_the_runtime_folder_is_the_users_and_the_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings(cluster="c").runtime_path() == tmp_path / "kvflow" / "c"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert "kvflow-" in str(Settings(cluster="c").runtime_path())
    assert Settings(runtime_dir="/somewhere").runtime_path() == Path("/somewhere")


@pytest.mark.parametrize("value", ["", None, 5, "x" * (MAX_ID_LENGTH + 1), "a\nb", "\ud800"])
def test_i7_what_cannot_be_an_id_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="transfer_id"):
        check_id(value, "transfer_id")


def test_ids_are_drawn_valid_and_different() -> None:
    for draw in (new_incarnation, new_transfer_id):
        drawn = {check_id(draw(), "id") for _ in range(100)}
        assert len(drawn) == 100
