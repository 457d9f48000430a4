"""The lines between an engine process and its owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import Settings
from kvflow.errors import WireError
from kvflow.sim import channel
from kvflow.sim.engine import EngineConfig, EngineReport
from kvflow.sim.layout import SimLayout
from kvflow.sim.request import RequestResult, RequestSpec


def test_every_line_survives_the_round_trip() -> None:
    spec = RequestSpec(request_id="r\n1", prompt=[1, 2], params={"transfer_id": "t", "do_remote_decode": True})
    commands: list[channel.Command] = [
        channel.Submit(request=spec),
        channel.Abort(request_id="r"),
        channel.DropCache(),
        channel.Audit(),
        channel.Stop(),
    ]
    for command in commands:
        line = channel.encode_line(command)
        assert line.count(b"\n") == 1
        assert channel.decode_command(line) == command
    report = EngineReport(
        requests=1, used_blocks=2, steps=3, preemptions=4, checked_bytes=5, mismatched_bytes=6, stray_bytes=7
    )
    events: list[channel.Event] = [
        channel.Ready(engine_id="e", incarnation="i", pid=1),
        channel.Ended(result=RequestResult(request_id="r", outcome="finished", output=[1], prompt_tokens=2)),
        channel.Audited(report=report),
        channel.Fatal(message="m", contract=True),
    ]
    for event in events:
        assert channel.decode_event(channel.encode_line(event)) == event
    config = channel.ProcessConfig(
        engine=EngineConfig(engine_id="e", layout=SimLayout(tp_size=2, heads=4)), settings=Settings(cluster="c")
    )
    assert channel.decode_config(channel.encode_line(config)) == config


@given(st.binary(max_size=200))
def test_anything_else_is_a_wire_error(line: bytes) -> None:
    for decode in (channel.decode_command, channel.decode_event, channel.decode_config):
        with pytest.raises(WireError):
            decode(line)
