"""`kvflow demo --sim` as a user runs it: real NATS, real NIXL, two engine processes, and nothing left afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nats, pytest.mark.nixl, pytest.mark.timeout(240)]

DEMO_S = 120.0
GONE_S = 60.0
MARK = "TEST_MARK"
COMMAND = [sys.executable, "-m", "kvflow.cli", "demo", "--sim", "--json"]


@dataclass
class Place:
    """Hold a temporary folder, and a mark by which every process of the demo is found."""

    folder: Path
    mark: str

    def start(self, transfers: int, tp_size: int = 1) -> "subprocess.Popen[str]":
        environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [*COMMAND, "--transfers", str(transfers), "--tp-size", str(tp_size)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # gone, or not ours
        return found

    def wait_clean(self) -> None:
        """Fail unless all processes and files go away by themselves."""
        end = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == {}
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def place() -> Iterator[Place]:
    # Not below pytest's own folder: the path of a Unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    here = Place(folder, uuid.uuid4().hex)
    try:
        yield here
    finally:
        for pid in here.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def finish(process: "subprocess.Popen[str]") -> dict[str, object]:
    try:
        out, err = process.communicate(timeout=DEMO_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the demo takes too long; stdout {out!r}, stderr ends {err[-3000:]}")
    assert out.count("\n") == 1, f"stdout {out!r}, stderr ends {err[-3000:]}"
    report = json.loads(out)
    assert isinstance(report, dict)
    assert process.returncode == 0, f"{report}, stderr ends {err[-3000:]}"
    return report


def test_200_transfers_are_right_in_every_byte(place: Place) -> None:
    report = finish(place.start(200))
    assert report["ok"] is True
    assert report["mismatched_bytes"] == report["failed"] == report["held_blocks"] == 0
    assert int(str(report["transfers"])) >= 200
    assert int(str(report["transfers"])) + int(str(report["cancelled"])) == 210
    # 8 layers of 2 heads, K and V of 64 bytes each. Cancelled transfers may have moved bytes as well.
    moved = int(str(report["tokens_moved"])) * 8 * 2 * 128
    assert moved <= int(str(report["bytes"])) <= 2 * moved
    assert int(str(report["checked_bytes"])) > 2 * moved
    assert 0 < float(str(report["p50_ms"])) <= float(str(report["p99_ms"]))
    assert float(str(report["bytes_early_share"])) > 0
    place.wait_clean()


def test_two_ranks_each_move_their_heads(place: Place) -> None:
    report = finish(place.start(30, tp_size=2))
    assert report["mismatched_bytes"] == report["failed"] == 0
    place.wait_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_i8_a_demo_that_is_ended_early_leaves_nothing(place: Place, number: signal.Signals) -> None:
    process = place.start(100_000)
    end = time.monotonic() + GONE_S
    while sum("kvflow.sim.process" in command for command in place.processes().values()) < 2:
        assert time.monotonic() < end, "the engines did not start"
        assert process.poll() is None, "the demo ended by itself"
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(number)
    process.communicate(timeout=GONE_S)
    assert process.returncode != 0
    place.wait_clean()
