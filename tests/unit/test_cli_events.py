"""What `kvflow watch` shows: which events, and how each reads."""

import json
import math

import pytest

from kvflow.errors import ConfigError
from kvflow.messages import EngineEvent, EngineRef, TransferEvent
from kvflow.messages.events import TransferEventKind
from kvflow.monitor.filter import EventFilter, went_wrong
from kvflow.monitor.render import as_json, as_text, human_bytes

P = EngineRef(engine_id="prefill-0", incarnation="aa")
D = EngineRef(engine_id="decode-0", incarnation="bb")


def _event(kind: TransferEventKind = "bound", transfer_id: str = "t1", **fields: object) -> TransferEvent:
    return TransferEvent(kind=kind, transfer_id=transfer_id, at=0.25, actor="matching", **fields)  # type: ignore[arg-type]


def _chosen(
    *, transfers: list[str] | None = None, engines: list[str] | None = None, kinds: list[str] | None = None,
    failed: bool = False,
) -> EventFilter:  # fmt: skip
    return EventFilter.parse(transfers=transfers or [], engines=engines or [], kinds=kinds or [], failed=failed)


def test_no_condition_takes_all() -> None:
    assert _chosen().accepts(_event())
    assert _chosen().accepts(EngineEvent(kind="joined", at=0, engine=P))


def test_by_transfer_prefix() -> None:
    chosen = _chosen(transfers=["t1", "x"])
    assert chosen.accepts(_event(transfer_id="t12"))
    assert not chosen.accepts(_event(transfer_id="2t1"))
    assert not chosen.accepts(EngineEvent(kind="joined", at=0, engine=P))


def test_by_engine_on_either_side_and_by_incarnation() -> None:
    chosen = _chosen(engines=["decode-0"])
    assert chosen.accepts(_event(source=P, target=D))
    assert not chosen.accepts(_event(source=P))
    assert chosen.accepts(EngineEvent(kind="lost", at=0, engine=D))
    assert _chosen(engines=["prefill-0@aa"]).accepts(_event(source=P))
    assert not _chosen(engines=["prefill-0@bb"]).accepts(_event(source=P))


def test_by_kind_and_failure() -> None:
    assert _chosen(kinds=["bound", "lost"]).accepts(_event("bound"))
    assert not _chosen(kinds=["lost"]).accepts(_event("bound"))
    assert _chosen(failed=True).accepts(_event("failed"))
    assert _chosen(failed=True).accepts(EngineEvent(kind="lost", at=0, engine=D))
    assert not _chosen(failed=True).accepts(_event("completed"))
    with pytest.raises(ConfigError, match="choose from opened"):
        _chosen(kinds=["nonsense"])


def test_a_source_that_closed_early_went_wrong() -> None:
    assert went_wrong(_event("closed", reason="preempted"))
    assert not went_wrong(_event("closed", reason="finished"))


def test_json_is_the_whole_event() -> None:
    event = _event(source=P, target=D, binding=3)
    found = json.loads(as_json(event))
    assert found["type"] == "kvflow.transfer_event.v1"
    assert found["source"] == {"engine_id": "prefill-0", "incarnation": "aa"}
    assert found["binding"] == 3


def test_text_shortens_what_only_programs_need() -> None:
    line = as_text(_event(binding=1796077141250519, bytes_done=1024, pieces=1, descriptors=4), colors=False)
    assert "binding …0519" in line
    assert "1.0 KiB in 1 piece, 4 descriptors" in line
    assert "binding 12" in as_text(_event(binding=12), colors=False)
    assert json.loads(as_json(_event(binding=1796077141250519)))["binding"] == 1796077141250519


def test_text_tells_what_is_known() -> None:
    line = as_text(
        _event(
            "delivered",
            source=P,
            target=D,
            binding=2,
            bytes_done=3 << 20,
            bytes_early=2 << 20,
            pieces=4,
            descriptors=32,
            last_progress_to_done_s=0.0123,
        ),
        colors=False,
    )
    assert ".250 delivered  t1" in line
    assert "prefill-0 → decode-0" in line
    assert "3.0 MiB in 4 pieces, 32 descriptors, 66% early" in line
    assert "tail 12.3 ms" in line
    assert "\x1b" not in line
    failed = as_text(_event("failed", reason="source_lost", detail="no card"), colors=True)
    assert "\x1b[31mfailed" in failed
    assert "reason source_lost" in failed
    joined = as_text(EngineEvent(kind="joined", at=0, engine=P, roles=("source",)), colors=False)
    assert "prefill-0" in joined
    assert "(source)" in joined


def test_i7_hostile_events_cannot_steer_the_terminal_or_stop_the_watcher() -> None:
    line = as_text(_event(transfer_id="t\x1b[2J\n", detail="\x07"), colors=False)
    assert line.isprintable()
    for at in (math.nan, math.inf, 1e300, -1e300):
        assert "??:??" in as_text(TransferEvent(kind="bound", transfer_id="t", at=at, actor="x"), colors=False)


def test_long_ids_are_shortened() -> None:
    assert "aaaaaaaaaaa…" in as_text(_event(transfer_id="a" * 64), colors=False)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_human_bytes(count: int, words: str) -> None:
    assert human_bytes(count) == words
