"""An engine process without a node: it says why it cannot start, and it never outlives its owner."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvflow.config import Settings
from kvflow.sim.channel import Fatal, ProcessConfig, decode_event, encode_line
from kvflow.sim.control import SimProcessError, launch_engine
from kvflow.sim.engine import EngineConfig
from kvflow.sim.layout import SimLayout

COMMAND = [sys.executable, "-m", "kvflow.sim.process"]
WAIT_S = 30.0


def config(runtime: Path, *, heads: int = 2, tp_size: int = 1, attach_s: float = 0.5) -> ProcessConfig:
    return ProcessConfig(
        engine=EngineConfig(engine_id="lonely", layout=SimLayout(layers=1, blocks=4, heads=heads, tp_size=tp_size)),
        settings=Settings(runtime_dir=str(runtime)),
        attach_timeout_s=attach_s,
    )


def run(first_line: bytes) -> tuple[int, Fatal]:
    done = subprocess.run(COMMAND, input=first_line, capture_output=True, timeout=WAIT_S, check=False)
    event = decode_event(done.stdout)
    assert isinstance(event, Fatal)
    return done.returncode, event


@pytest.mark.anyio
async def test_without_a_node_the_engine_says_so(tmp_path: Path) -> None:
    with pytest.raises(SimProcessError, match=r"not attached after 0\.5 s"):
        async with launch_engine(config(tmp_path)):
            pytest.fail("the engine cannot be ready")


def test_a_bad_configuration_is_one_readable_line(tmp_path: Path) -> None:
    code, fatal = run(b"{}\n")
    assert code == 1
    assert "engine" in fatal.message
    code, fatal = run(encode_line(config(tmp_path, heads=2, tp_size=3)))
    assert code == 1
    assert "heads" in fatal.message


def test_an_engine_that_attaches_still_ends_with_its_owner(tmp_path: Path) -> None:
    began = time.monotonic()
    code, fatal = run(encode_line(config(tmp_path, attach_s=600.0)))
    assert time.monotonic() - began < WAIT_S
    assert code == 1
    assert "told to stop" in fatal.message
