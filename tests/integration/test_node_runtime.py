"""The runtime folder, the restart budget, and the settings that children get."""

import fcntl
import os
import stat
from pathlib import Path

import msgspec
import pytest

from kvflow.broker import LOCK_NAME
from kvflow.config import CONFIG_ENV, Settings, load_settings
from kvflow.errors import ConfigError, NodeError
from kvflow.node.process import settings_environment
from kvflow.node.restart import RestartBudget, RestartPolicy
from kvflow.node.runtime import NodeInfo, RuntimeFolder, read_node

INFO = NodeInfo(pid=1, cluster="c", nats_url="nats://x", socket="/s")


def test_claim_publish_read_release(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with RuntimeFolder.claim(path) as folder:
        with pytest.raises(NodeError, match="no kvflow node"):
            read_node(path)
        folder.publish(INFO)
        assert read_node(path) == INFO
        assert stat.S_IMODE((path / "node.json").stat().st_mode) == 0o600
        assert [entry.name for entry in path.iterdir()] == ["node.json"], "no temporary file is left"
    assert not path.exists()
    folder.release()


def test_a_live_owner_is_respected(tmp_path: Path) -> None:
    with RuntimeFolder.claim(tmp_path / "r") as folder:
        folder.publish(INFO)
        with pytest.raises(NodeError, match=r"another kvflow node \(pid 1 on .*hint|another kvflow node \(pid 1"):
            RuntimeFolder.claim(tmp_path / "r")
        assert read_node(tmp_path / "r") == INFO


def test_what_a_dead_node_says_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    folder = RuntimeFolder.claim(path)
    folder.publish(INFO)
    os.close(folder.lock_fd)  # what the kernel does when the node is killed
    with pytest.raises(NodeError, match="no kvflow node"):
        read_node(path)
    with RuntimeFolder.claim(path):
        assert not (path / "node.json").exists()


def test_a_keeper_that_still_cleans_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    keeper = os.open(path / LOCK_NAME, os.O_CREAT | os.O_RDWR)
    fcntl.flock(keeper, fcntl.LOCK_EX)
    monkeypatch.setattr("kvflow.node.runtime.KEEPER_WAIT_S", 0.2)
    with pytest.raises(NodeError):
        RuntimeFolder.claim(path)
    os.close(keeper)
    RuntimeFolder.claim(path).release()


def test_damaged_node_file(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text("{")
    with pytest.raises(NodeError, match="damaged"):
        read_node(tmp_path)


def test_a_link_is_no_runtime_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="cannot use the runtime folder"):
        RuntimeFolder.claim(tmp_path / "link")


def test_a_name_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        RuntimeFolder.claim(tmp_path / ("x" * 100))


def test_budget_backs_off_then_gives_up_and_forgets() -> None:
    budget = RestartBudget(RestartPolicy(limit=5, window_s=60, first_delay_s=0.2, max_delay_s=1.0))
    assert [budget.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert budget.next_delay(5.0) is None
    assert budget.next_delay(200.0) == 0.2


def test_children_get_exactly_our_settings() -> None:
    settings = Settings(shards=3, nixl_progress_thread=True, nats_password="secret", log_level="debug")
    base = {"PATH": "/bin", "KVFLOW_SHARDS": "9", "KVFLOW_NATS_USER": "other", CONFIG_ENV: "/etc/kvflow.toml"}
    environment = settings_environment(settings, base)
    assert environment["PATH"] == "/bin"
    assert CONFIG_ENV not in environment
    assert load_settings(environ=environment) == settings
    for value in (True, False):
        changed = msgspec.structs.replace(settings, nixl_progress_thread=value)
        assert load_settings(environ=settings_environment(changed, {})) == changed
