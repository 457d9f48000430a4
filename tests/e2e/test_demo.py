"""`kvflow demo` on real engines: it says what happened, ends with 0, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(500)]

RUN = """
import sys
from kvflow.config import Settings
from kvflow.demo import run_demo
sys.exit(run_demo(Settings(), json=True))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    # A mark that all descendants inherit: what is left of the demo is found by it.
    return {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "KVFLOW_DEMO_MARK": str(tmp_path),
    }


def _left_over(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KVFLOW_DEMO_MARK") == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return found


def _assert_nothing_left(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while (left := _left_over(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert not list(tmp_path.glob("kvflow-*"))


def test_the_demo_ends_with_equal_tokens_and_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [row["tokens_in"] for row in report["requests"]] == [48, 200, 1000, 4000]
    assert all(row["equal"] for row in report["requests"])
    assert all(row["transferred"] and row["bytes"] > 0 for row in report["requests"])
    assert report["requests"][-1]["pushed_early"] > 0
    _assert_nothing_left(tmp_path)


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    demo = subprocess.Popen([sys.executable, "-c", RUN], env=environment, stderr=subprocess.DEVNULL)
    time.sleep(20)  # in the middle of starting engines
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    _assert_nothing_left(tmp_path)
