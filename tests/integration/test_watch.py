"""`kvflow watch` against a real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from node_support import eventually, kvflow_environment, read_line, run_cli

from kvflow.broker import launch_broker
from kvflow.bus.connect import connect_bus
from kvflow.config import Settings
from kvflow.events import EventSink
from kvflow.messages import EngineEvent, EngineRef, Subjects, TransferEvent

pytestmark = pytest.mark.nats

D = EngineRef(engine_id="decode-0", incarnation="bb")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    # A server of its own: each test wants a stream without a past, and a server has room for a few streams only.
    with launch_broker(tmp_path / "broker") as broker:
        yield Settings(nats_url=broker.url, cluster="w")


@pytest.fixture
def following(settings: Settings) -> Iterator["subprocess.Popen[str]"]:
    with _popen(settings, "--json") as process:
        yield process
        process.kill()


def _popen(settings: Settings, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvflow.cli", "watch", *_flags(settings), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kvflow_environment(),
    )  # fmt: skip


def _flags(settings: Settings) -> list[str]:
    return ["--nats-url", settings.nats_url, "--cluster", settings.cluster]


def _emit(settings: Settings, *events: TransferEvent | EngineEvent, raw: bytes = b"") -> None:
    async def main() -> None:
        bus = await connect_bus(settings, name="test")
        subjects = Subjects(settings.cluster)
        sink = EventSink(bus, subjects, "test")
        await sink.ensure_stream(60)
        if raw:
            await bus.publish(subjects.event("bound", "t"), raw)
        for event in events:
            await sink.emit(event)
        await bus.flush()
        await bus.close()

    anyio.run(main)


def _transfer(kind: str, transfer_id: str = "t1", **fields: object) -> TransferEvent:
    return TransferEvent(kind=kind, transfer_id=transfer_id, at=0, actor="", **fields)  # type: ignore[arg-type]


def test_replay_filter_and_count(settings: Settings) -> None:
    _emit(
        settings,
        _transfer("bound"),
        _transfer("failed", reason="source_lost"),
        EngineEvent(kind="lost", at=0, engine=D),
        raw=b"not a message",
    )
    result = run_cli("watch", *_flags(settings), "--since", "60", "--count", "3", "--json")
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["kind"] for line in result.stdout.splitlines()] == ["bound", "failed", "lost"]
    assert "message_dropped" in result.stderr
    failed = run_cli("watch", *_flags(settings), "--since", "60", "--failed", "--count", "2")
    assert "reason source_lost" in failed.stdout
    assert "decode-0" in failed.stdout
    assert "\x1b" not in failed.stdout
    only = run_cli("watch", *_flags(settings), "--since", "60", "--engine", "decode-0", "--count", "1", "--json")
    assert json.loads(only.stdout)["engine"]["engine_id"] == "decode-0"


def test_only_what_is_new_by_default_and_a_timeout(settings: Settings) -> None:
    _emit(settings, _transfer("bound"))
    result = run_cli("watch", *_flags(settings), "--timeout", "0.5")
    assert (result.returncode, result.stdout) == (0, "")


def test_events_show_when_they_happen(settings: Settings, following: "subprocess.Popen[str]") -> None:
    def shown() -> str:
        _emit(settings, _transfer("completed", "t9"))
        return read_line(following.stdout, 0.3)

    assert json.loads(eventually(shown))["transfer_id"] == "t9"


def test_ctrl_c_is_clean(settings: Settings, following: "subprocess.Popen[str]") -> None:
    def shown() -> str:
        _emit(settings, _transfer("completed"))
        return read_line(following.stdout, 0.3)

    eventually(shown)
    following.send_signal(2)
    _, errors = following.communicate(timeout=10)
    assert following.returncode == 130
    assert "Traceback" not in errors


def test_a_reader_that_leaves(settings: Settings) -> None:
    with _popen(settings, "--since", "60") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()

        def ended() -> bool:
            _emit(settings, _transfer("completed"))
            return process.poll() is not None

        eventually(ended)
        assert process.returncode == 141
        assert process.stderr.read() == ""


def test_nats_that_is_not_there() -> None:
    result = run_cli("watch", "--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout-s", "0.5")
    assert result.returncode == 3
    assert "kvflow: error:" in result.stderr
    assert "hint:" in result.stderr
