"""`kvflow up` with real processes and fake actors: attach, restart, stop, and what a killed node leaves (nothing)."""

import json
import os
import signal
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from node_support import (
    MEMORY_BYTES,
    WAIT_S,
    FakeWorker,
    Nodes,
    all_end,
    eventually,
    make_profile,
    run_cli,
    shared_files,
)

from kvflow.messages import Attached, AttachRefused, encode

pytestmark = pytest.mark.nats


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    started.close()


def _refused(worker: FakeWorker) -> AttachRefused:
    answer = worker.receive()
    assert isinstance(answer, AttachRefused), answer
    assert worker.ended()
    return answer


def _maps_memory(pid: int) -> bool:
    try:
        return "kv-test" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ready_line_and_node_file(nodes: Nodes) -> None:
    node = nodes.up("--cluster", "c1")
    assert set(node.pids) == {"node", "keeper", "nats-server", "control"}
    assert all(psutil.pid_exists(pid) for pid in node.pids.values())
    info = json.loads((node.runtime / "node.json").read_text())
    assert info["pid"] == node.process.pid
    assert info["nats_url"] == node.ready["nats_url"]
    assert info["cluster"] == "c1"
    assert stat.S_IMODE(node.runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE((node.runtime / "node.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((node.runtime / "node.sock").stat().st_mode) == 0o600
    assert node.stop() == 0
    assert not node.runtime.exists()
    assert not any(psutil.pid_exists(pid) for pid in node.pids.values())


def test_attach_runs_a_data_process_until_the_worker_goes(nodes: Nodes) -> None:
    node = nodes.up()
    worker = nodes.worker(node)
    answer = worker.attach()
    assert answer == Attached(nats_url=node.ready["nats_url"], cluster="default")
    pid = worker.data_pid()
    assert "run transfer completion" in " ".join(psutil.Process(pid).cmdline())
    assert _maps_memory(pid)
    worker.socket.close()
    eventually(lambda: not psutil.pid_exists(pid), what="the data process ends")
    assert worker.stopped_cleanly()
    assert node.process.poll() is None
    assert node.stop() == 0


def test_a_killed_data_process_comes_back_on_the_same_memory(nodes: Nodes) -> None:
    node = nodes.up()
    worker = nodes.worker(node)
    assert isinstance(worker.attach(), Attached)
    first = worker.data_pid()
    os.kill(first, signal.SIGKILL)
    second = eventually(lambda: worker.data_pid() != first and worker.data_pid())
    assert psutil.pid_exists(second)
    assert worker.starts() == 2
    worker.socket.close()
    assert node.stop() == 0


def test_i1_a_data_process_that_stands_still_is_killed_before_it_can_wake_up(nodes: Nodes) -> None:
    # Its card may expire after a second; it must be gone before the quarantine ends that follows.
    node = nodes.up("--card-ttl-s", "1.5", "--quarantine-s", "2")
    worker = nodes.worker(node)
    assert isinstance(worker.attach(), Attached)
    first = worker.data_pid()
    time.sleep(3)
    assert worker.data_pid() == first
    halted = time.monotonic()
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not psutil.pid_exists(first), what="the process that stands still ends")
    assert time.monotonic() - halted < 3
    eventually(lambda: worker.data_pid() != first and worker.starts() == 2, what="another one takes over")
    assert "child_stands_still" in node.log_text()
    assert node.stop() == 0


def test_i4_a_control_process_that_stands_still_is_replaced(nodes: Nodes) -> None:
    node = nodes.up("--card-ttl-s", "1.5", "--quarantine-s", "2")
    control = node.pids["control"]
    os.kill(control, signal.SIGSTOP)
    eventually(lambda: not psutil.pid_exists(control), what="the process that stands still ends")
    eventually(lambda: node.log_text().count("child_ready") == 2, what="another one takes over")
    assert node.stop() == 0


def test_a_data_process_that_keeps_dying_ends_its_attachment_only(nodes: Nodes) -> None:
    node = nodes.up()
    bad = nodes.worker(node, make_profile("bad", mode="die_later"))
    good = nodes.worker(node, make_profile("good"))
    assert isinstance(good.attach(), Attached)
    assert isinstance(bad.attach(), Attached)
    refused = _refused(bad)
    assert "ended more than 5 times" in refused.reason
    assert psutil.pid_exists(good.data_pid())
    assert node.stop() == 0


def test_a_data_process_that_cannot_start_says_why(nodes: Nodes) -> None:
    node = nodes.up()
    no_nixl = nodes.worker(node, make_profile(mode="no_nixl"))
    no_nixl.send()
    refused = _refused(no_nixl)
    assert "NIXL cannot be imported" in refused.reason
    assert refused.remedy == "install kvflow[nixl]"
    dead = nodes.worker(node, make_profile(mode="die"))
    dead.send()
    assert "exit code 9" in _refused(dead).reason
    assert node.stop() == 0


def test_another_incarnation_runs_beside_the_older(nodes: Nodes) -> None:
    node = nodes.up()
    older = nodes.worker(node, make_profile(incarnation="one"))
    newer = nodes.worker(node, make_profile(incarnation="two"))
    assert isinstance(older.attach(), Attached)
    assert isinstance(newer.attach(), Attached)
    pids = {older.data_pid(), newer.data_pid()}
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    gone = older.data_pid()
    older.socket.close()
    eventually(lambda: not psutil.pid_exists(gone))
    assert psutil.pid_exists(newer.data_pid())
    twice = nodes.worker(node, newer.profile)
    twice.send()
    assert "attached already" in _refused(twice).reason
    assert node.stop() == 0


def test_a_worker_that_reconnects_is_taken_again(nodes: Nodes) -> None:
    node = nodes.up()
    profile = make_profile()
    for _ in range(3):
        worker = nodes.worker(node, profile)
        assert isinstance(worker.attach(), Attached)
        worker.socket.close()
    assert node.stop() == 0


def test_i7_malformed_clients_are_refused_and_harm_nobody(nodes: Nodes) -> None:
    node = nodes.up()
    good = nodes.worker(node)
    assert isinstance(good.attach(), Attached)
    frame = struct.pack("<I", 5) + b"hello"
    for raw in (struct.pack("<I", 0), struct.pack("<I", 1 << 31), frame):
        worker = nodes.worker(node)
        worker.send_raw(raw, [])
        _refused(worker)
    other = encode(Attached(nats_url="x", cluster="y"))
    worker = nodes.worker(node)
    worker.send_raw(struct.pack("<I", len(other)) + other, [worker.memory])
    assert "expected AttachEngine" in _refused(worker).reason
    cases: list[tuple[FakeWorker, tuple[int, ...], int]] = [
        (nodes.worker(node), (MEMORY_BYTES,), 0),
        (nodes.worker(node), (MEMORY_BYTES, MEMORY_BYTES), 1),
        (nodes.worker(node), (MEMORY_BYTES + 1,), 1),
        (nodes.worker(node), (-1,), 1),
        (nodes.worker(node), (), 0),
        (nodes.worker(node, make_profile(rank=1, ranks=1)), (MEMORY_BYTES,), 1),
        (nodes.worker(node, make_profile(roles=())), (MEMORY_BYTES,), 1),
        (nodes.worker(node, make_profile(segment=1)), (MEMORY_BYTES,), 1),
    ]
    for worker, lengths, count in cases:
        worker.send(lengths, [worker.memory] * count)
        _refused(worker)
    many = nodes.worker(node)
    many.send((MEMORY_BYTES,) * 200, [many.memory] * 200)
    assert "file descriptors" in _refused(many).reason
    pipe_read, pipe_write = os.pipe()
    worker = nodes.worker(node)
    worker.send((10,), [pipe_read])
    assert "not memory" in _refused(worker).reason
    os.close(pipe_read)
    os.close(pipe_write)
    silent = nodes.worker(node)
    assert "within 5 s" in _refused(silent).reason
    leaver = nodes.worker(node)
    leaver.send_raw(struct.pack("<I", 100), [leaver.memory])
    leaver.socket.close()
    assert isinstance(nodes.worker(node, make_profile("e2")).attach(), Attached)
    assert psutil.pid_exists(good.data_pid())
    held = list(Path(f"/proc/{node.process.pid}/fd").iterdir())
    assert len(held) < 60, "the descriptors of refused clients were closed"
    assert node.stop() == 0


def test_sigterm_drains_and_a_second_signal_hurries(nodes: Nodes) -> None:
    node = nodes.up("--stop-grace-s", "60")
    worker = nodes.worker(node, make_profile(mode="stubborn"))
    assert isinstance(worker.attach(), Attached)
    node.process.send_signal(signal.SIGTERM)
    eventually(lambda: "node_stopping" in node.log_text())
    assert node.process.poll() is None, "it waits for the data process"
    assert node.stop(signal.SIGINT) == 0
    assert worker.ended()
    assert not psutil.pid_exists(worker.data_pid())
    assert not node.runtime.exists()


def test_a_stubborn_data_process_is_killed_after_the_grace(nodes: Nodes) -> None:
    node = nodes.up("--stop-grace-s", "0.3")
    worker = nodes.worker(node, make_profile(mode="stubborn"))
    assert isinstance(worker.attach(), Attached)
    assert node.stop() == 0
    assert not psutil.pid_exists(worker.data_pid())


def test_a_killed_node_leaves_nothing(nodes: Nodes) -> None:
    node = nodes.up()
    worker = nodes.worker(node)
    stubborn = nodes.worker(node, make_profile("s", mode="stubborn"))
    assert isinstance(worker.attach(), Attached)
    assert isinstance(stubborn.attach(), Attached)
    family = node.family()
    assert len(family) == 6
    shared = shared_files(family)
    node.process.kill()
    assert stubborn.ended()
    assert not _maps_memory(stubborn.data_pid()), "the socket ends when nobody has the memory any more"
    all_end(family)
    eventually(lambda: not node.runtime.exists(), what="the runtime folder is removed")
    assert not [file for file in shared if file.exists()]
    assert worker.stopped_cleanly()
    # And the folder can be used again at once.
    assert nodes.up().stop() == 0


def test_a_second_node_in_the_same_folder_is_refused(nodes: Nodes) -> None:
    node = nodes.up()
    result = run_cli("up", "--runtime-dir", str(node.runtime))
    assert result.returncode == 6
    assert f"another kvflow node (pid {node.process.pid}" in result.stderr
    assert "hint: stop it" in result.stderr
    assert psutil.pid_exists(node.pids["control"])
    assert (node.runtime / "node.sock").exists()
    assert node.stop() == 0


def test_a_stale_folder_is_cleaned(nodes: Nodes, tmp_path: Path) -> None:
    runtime = tmp_path / "n"
    runtime.mkdir(mode=0o755)
    (runtime / "node.json").write_text("{}")
    (runtime / "node.sock").write_text("")
    (runtime / "keep-me").write_text("of the user")
    node = nodes.up()
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert isinstance(nodes.worker(node).attach(), Attached)
    assert node.stop() == 0
    assert [entry.name for entry in runtime.iterdir()] == ["keep-me"]


def test_control_is_restarted_within_a_budget_then_the_node_ends_loudly(nodes: Nodes) -> None:
    node = nodes.up(env={"FAKE_CONTROL": "die_later"})
    assert node.process.wait(WAIT_S) == 6
    assert "ended more than 5 times within 60 s" in node.log_text()
    assert "exit code 9" in node.log_text()
    assert not node.runtime.exists()


@pytest.mark.parametrize(
    ("mode", "timeout", "words"), [("die", "30", "exit code 9"), ("hang", "1", "not ready within 1 s")]
)
def test_control_that_does_not_start(nodes: Nodes, mode: str, timeout: str, words: str) -> None:
    node = nodes.up("--ready-timeout", timeout, env={"FAKE_CONTROL": mode}, expect_ready=False)
    assert node.process.wait(WAIT_S) == 6
    assert words in node.log_text()
    assert not node.runtime.exists()


def test_a_stop_signal_during_start_up(nodes: Nodes) -> None:
    node = nodes.up(env={"FAKE_CONTROL": "hang"}, expect_ready=False)
    eventually(lambda: "broker_ready" in node.log_text())
    assert node.stop() == 0
    assert not node.runtime.exists()


def test_the_private_server_comes_back_on_its_port(nodes: Nodes) -> None:
    node = nodes.up()
    os.kill(node.pids["nats-server"], signal.SIGKILL)
    eventually(lambda: node.log_text().count("broker_ready") == 2)
    assert node.process.poll() is None
    watching = run_cli("watch", "--runtime-dir", str(node.runtime), "--timeout", "0.2")
    assert watching.returncode == 0, watching.stderr
    assert node.stop() == 0
    assert not node.runtime.exists()


def test_an_external_server(nodes: Nodes, nats_url: str) -> None:
    node = nodes.up("--nats-url", nats_url)
    assert set(node.pids) == {"node", "control"}
    assert isinstance(nodes.worker(node).attach(), Attached)
    assert node.stop() == 0
    assert not node.runtime.exists()


def test_a_killed_node_on_an_external_server_leaves_nothing(nodes: Nodes, nats_url: str) -> None:
    node = nodes.up("--nats-url", nats_url)
    assert isinstance(nodes.worker(node).attach(), Attached)
    family = node.family()
    assert len(family) == 3
    node.process.kill()
    all_end(family)
    assert not node.runtime.exists()


def test_run_alone(nodes: Nodes, nats_url: str) -> None:
    node = nodes.up("--no-control", "--nats-url", nats_url)
    assert set(node.pids) == {"node"}
    # Without a URL it finds the node of this host.
    with nodes.command("run", "registration", "matching", "--runtime-dir", str(node.runtime)) as running:
        eventually(lambda: "control_runs" in nodes.command_log())
        running.send_signal(signal.SIGTERM)
        assert running.wait(WAIT_S) == 0
    missing = run_cli("run", "matching", "--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout-s", "0.5")
    assert missing.returncode == 3
    assert "hint:" in missing.stderr
    assert node.stop() == 0


def test_nats_that_is_not_there(nodes: Nodes) -> None:
    node = nodes.up("--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout-s", "0.5", expect_ready=False)
    assert node.process.wait(WAIT_S) == 3
    assert node.log_text().count("nothing listens at") == 1, "the child leaves it to the node to say"
    assert "hint: start nats-server there, or check --nats-url" in node.log_text()
    assert not node.runtime.exists()


def test_nats_port_taken(nodes: Nodes, nats_url: str) -> None:
    port = nats_url.rpartition(":")[2]
    node = nodes.up("--nats-port", port, expect_ready=False)
    assert node.process.wait(WAIT_S) == 3
    assert "address already in use" in node.log_text()
    assert "hint: choose another --nats-port" in node.log_text()
    assert "[INF]" not in node.log_text()
    assert not node.runtime.exists()
