"""Logging set-up: formats, levels, stdlib loggers, and a stream that fails."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvflow.log import TolerantStream, configure_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_json_when_nobody_reads_along() -> None:
    out = io.StringIO()
    configure_logging(stream=out, process="control")
    structlog.get_logger().info("rank_ready", engine="e1", payload=b"\x00")
    record = json.loads(out.getvalue())
    assert record["event"] == "rank_ready"
    assert record["process"] == "control"
    assert record["level"] == "info"
    assert record["engine"] == "e1"
    assert "timestamp" in record


def test_readable_on_a_terminal() -> None:
    out = Terminal()
    configure_logging(stream=out)
    structlog.get_logger().warning("mailbox_full", dropped=3)
    assert "mailbox_full" in out.getvalue()
    assert "\x1b[" in out.getvalue()
    assert not out.getvalue().startswith("{")


@pytest.mark.parametrize(("log_format", "is_json"), [("json", True), ("console", False)])
def test_the_format_can_be_forced(log_format: str, is_json: bool) -> None:
    out = Terminal() if is_json else io.StringIO()
    configure_logging(stream=out, log_format=log_format)  # type: ignore[arg-type]
    structlog.get_logger().info("hello")
    assert out.getvalue().startswith("{") is is_json
    assert is_json or "\x1b[" not in out.getvalue()


def test_levels() -> None:
    out = io.StringIO()
    configure_logging(stream=out, level="warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("lib").info("quiet too")
    structlog.get_logger().error("loud")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["loud"]


def test_stdlib_loggers_take_the_same_way() -> None:
    out = io.StringIO()
    configure_logging(stream=out)
    logging.getLogger("nats").info("chatter")
    logging.getLogger("nats").warning("connection to %s lost", "here")
    record = json.loads(out.getvalue())
    assert record["event"] == "connection to here lost"
    assert record["logger"] == "nats"
    assert record["level"] == "warning"


def test_exceptions_are_kept() -> None:
    out = io.StringIO()
    configure_logging(stream=out)
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception("crashed")
        logging.getLogger("lib").exception("crashed too")
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["exception"][0]["exc_value"] for record in records] == ["boom", "boom"]


def test_a_reader_that_has_gone_ends_nobody() -> None:
    configure_logging(stream=Broken())
    structlog.get_logger().info("hello")
    logging.getLogger("lib").warning("hello")
    stream = TolerantStream(Broken())
    assert stream.write("abc") == 3
    assert stream.lost == 1


def test_configuring_again_replaces_the_set_up() -> None:
    first, second = io.StringIO(), io.StringIO()
    logger = structlog.get_logger()
    configure_logging(stream=first)
    logger.info("one")
    configure_logging(stream=second)
    logger.info("two")
    logging.getLogger("lib").warning("three")
    assert len(first.getvalue().splitlines()) == 1
    assert len(second.getvalue().splitlines()) == 2
