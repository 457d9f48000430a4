"""Guarded processes: whoever dies, and however, nothing of the tree is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvflow.demo.engines import EngineSpec, command_line, environment, transfer_config
from kvflow.demo.processes import GuardedProcess
from kvflow.errors import ConfigError

# A root with a child in its group, and one in a session of its own, which killing groups does not reach.
TREE = """
import os, signal, subprocess, sys, time
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
open(sys.argv[1], "w").write(" ".join(str(pid) for pid in [os.getpid(), *(child.pid for child in children)]))
time.sleep(600)
"""


def _wait(fact: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _pids(file: Path) -> list[int]:
    _wait(lambda: file.exists() and len(file.read_text().split()) == 3)
    return [int(pid) for pid in file.read_text().split()]


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def _tree(tmp_path: Path) -> GuardedProcess:
    return GuardedProcess("tree", [sys.executable, "-c", TREE, str(tmp_path / "pids")], tmp_path / "log", grace_s=0.3)


def test_stop_ends_the_whole_tree(tmp_path: Path) -> None:
    process = _tree(tmp_path)
    process.start()
    pids = _pids(tmp_path / "pids")
    assert process.pid == pids[0]
    process.stop()
    assert _gone(pids)
    process.stop()
    assert not process.running


def test_the_tree_ends_when_its_root_does(tmp_path: Path) -> None:
    process = _tree(tmp_path)
    process.start()
    pids = _pids(tmp_path / "pids")
    process.signal(signal.SIGKILL)
    _wait(lambda: _gone(pids) and not process.running)
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_tree_ends_when_its_starter_dies(tmp_path: Path, number: int) -> None:
    starter = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_demo_processes import _tree
process = _tree(Path({str(tmp_path)!r}))
process.start()
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", starter])
    pids = _pids(tmp_path / "pids")
    os.kill(parent.pid, number)
    parent.wait(5)
    _wait(lambda: _gone(pids))


def test_a_command_that_ends_too_early_shows_its_log(tmp_path: Path) -> None:
    process = GuardedProcess("bad", [sys.executable, "-c", "print('the reason'); exit(3)"], tmp_path / "log")
    process.start()
    with pytest.raises(ConfigError, match=r"(?s)bad ended with code 3 .*the reason"):
        process.wait_until(lambda: False, 10)


def test_a_command_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    process = GuardedProcess("slow", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    process.start()
    with pytest.raises(ConfigError, match="slow was not ready after 0 s"):
        process.wait_until(lambda: False, 0.2)
    process.stop()


def test_an_engine_is_started_as_told() -> None:
    spec = EngineSpec(
        name="p", model=Path("/m"), role="producer", block_size=32, num_blocks=7, cores="1", placement="process",
        runtime_dir=Path("/run/x"), max_num_batched_tokens=512, extra_args=("--seed", "3"), extra_env={"A": "b"},
    )  # fmt: skip
    command = " ".join(command_line(spec, 81))
    for part in ("--model /m", "--port 81", "--block-size 32", "--num-gpu-blocks-override 7", "--seed 3",
                 "--max-num-batched-tokens 512", "--no-enable-prefix-caching", "--enforce-eager"):  # fmt: skip
        assert part in command
    config = transfer_config(spec, 81)
    assert config["kv_role"] == "kv_producer"
    assert config["kv_load_failure_policy"] == "recompute"
    env = environment(spec, {"PATH": "/bin"})
    assert (env["A"], env["KVFLOW_RUNTIME_DIR"], env["KVFLOW_PLACEMENT"], env["PATH"]) == (
        "b",
        "/run/x",
        "process",
        "/bin",
    )
    lone = EngineSpec(name="a", model=Path("/m"))
    assert "--kv-transfer-config" not in command_line(lone, 81)
