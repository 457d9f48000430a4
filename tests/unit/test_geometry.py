"""Geometries and runs that peers could send: what is refused, and why."""

from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.dataplane.geometry import check_geometry, check_runs, locate
from kvflow.dataplane.port import Runs
from kvflow.errors import PeerError, TransferError
from kvflow.messages import KvGeometry, KvGroup, KvSegment, KvView

SEGMENTS = (KvSegment(address=1 << 20, length=10 * 1024),)
VIEW = KvView(
    layer="l0", part="kv", group=0, segment=0, offset=0, blocks=10, block_tokens=4, heads=2, head_start=0,
    total_heads=2, row_bytes=128, block_stride=1024, head_stride=512, token_stride=128,
)  # fmt: skip
GEOMETRY = KvGeometry(dtype="bf16", num_blocks=10, groups=(KvGroup(block_tokens=4),), views=(VIEW,))


def with_view(**changes: Any) -> KvGeometry:
    return msgspec.structs.replace(GEOMETRY, views=(msgspec.structs.replace(VIEW, **changes),))


def test_a_sound_geometry_passes() -> None:
    check_geometry(GEOMETRY, SEGMENTS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"part": "q"}, "unknown part"),
        ({"group": 1}, "group 1 does not exist"),
        ({"group": -1}, "group -1 does not exist"),
        ({"segment": 1}, "segment 1 does not exist"),
        ({"segment": -1}, "segment -1 does not exist"),
        ({"offset": -1}, "reaches"),
        ({"offset": 1}, "reaches byte 10241 of a segment of 10240"),
        ({"blocks": 11}, "reaches"),
        ({"blocks": 9}, "holds 9 blocks, but block ids reach 10"),
        ({"blocks": 0}, "not a positive size"),
        ({"heads": 0}, "not a positive size"),
        ({"row_bytes": 0}, "not a positive size"),
        ({"row_bytes": 1 << 80}, "not a positive size"),
        ({"token_stride": 0}, "not a positive size"),
        ({"head_stride": -512}, "not a positive size"),
        ({"block_stride": 1 << 70}, "not a positive size"),
        ({"head_start": 1}, "do not fit 2 heads"),
        ({"head_start": -1}, "do not fit"),
        ({"block_tokens": 3}, "do not divide"),
        ({"block_tokens": 8}, "do not divide"),
        ({"channels": 0}, "not a positive size"),
        ({"channels": 2, "row_bytes": 64}, "channel_stride is 0"),
        ({"channels": 2, "row_bytes": 64, "channel_stride": 1 << 63}, "not a positive size"),
        ({"channels": 2, "row_bytes": 64, "channel_stride": 32}, "overlap"),
        ({"channels": 2, "row_bytes": 64, "channel_stride": 512}, "overlap"),
        ({"channels": 2, "row_bytes": 64, "channel_stride": 10240}, "reaches byte 20416"),
        ({"row_bytes": 129}, "overlap"),
        ({"head_stride": 256}, "overlap"),
        ({"block_stride": 512}, "overlap"),
    ],
)
def test_i7_an_unsound_view_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PeerError, match=text):
        check_geometry(with_view(**changes), SEGMENTS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_blocks": 0}, "not a valid cache size"),
        ({"num_blocks": 1 << 40}, "not a valid cache size"),
        ({"groups": ()}, "0 KV cache groups"),
        ({"views": ()}, "0 KV views"),
        ({"views": (VIEW, VIEW)}, "listed twice"),
        ({"groups": (KvGroup(block_tokens=0),)}, "blocks of 0 tokens"),
        ({"groups": (KvGroup(block_tokens=4, window_tokens=8),)}, "window of 8"),
        ({"groups": (KvGroup(block_tokens=4, kind="window"),)}, "window of 0"),
        ({"groups": (KvGroup(block_tokens=4, kind="window", window_tokens=-8),)}, "window of -8"),
    ],
)
def test_i7_an_unsound_geometry_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PeerError, match=text):
        check_geometry(msgspec.structs.replace(GEOMETRY, **changes), SEGMENTS)


@pytest.mark.parametrize(
    ("address", "length"), [(0, 10240), (-4096, 10240), (4096, 0), (4096, 1 << 62), (1 << 63, 10240)]
)
def test_i7_an_unsound_segment_is_refused(address: int, length: int) -> None:
    with pytest.raises(PeerError, match="not addressable"):
        check_geometry(GEOMETRY, (KvSegment(address=address, length=length),))


def test_the_error_names_the_owner_and_the_view() -> None:
    with pytest.raises(PeerError, match="decode-1: view l0/kv"):
        check_geometry(with_view(offset=5), SEGMENTS, owner="decode-1")


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    check_geometry(with_view(heads=1, head_stride=1), SEGMENTS)


def test_channels_may_lie_outside_tokens() -> None:
    check_geometry(with_view(channels=64, row_bytes=2, token_stride=2, channel_stride=8), SEGMENTS)
    check_geometry(with_view(channels=1, channel_stride=1), SEGMENTS)


def u64(*values: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    return np.array(values, dtype=np.uint64)


def test_runs_are_located_in_their_segments() -> None:
    segments = (KvSegment(address=5000, length=100), KvSegment(address=1000, length=100))
    found = locate(u64(5000, 1000, 1099, 5050), u64(100, 100, 1, 50), segments, side="local")
    assert found.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("address", "length"),
    [(999, 1), (1099, 2), (1100, 1), (4999, 2), (0, 1), (5000, 101), ((1 << 64) - 1, 1), (1050, (1 << 64) - 1)],
)
def test_i7_a_run_outside_every_segment_is_refused(address: int, length: int) -> None:
    segments = (KvSegment(address=1000, length=100), KvSegment(address=5000, length=100))
    with pytest.raises(TransferError, match="leaves the registered memory"):
        locate(u64(1000, address), u64(1, length), segments, side="remote")


def test_runs_across_neighbouring_segments_are_refused() -> None:
    segments = (KvSegment(address=1000, length=100), KvSegment(address=1100, length=100))
    with pytest.raises(TransferError):
        locate(u64(1050), u64(100), segments, side="remote")


def test_malformed_plans_are_refused() -> None:
    with pytest.raises(TransferError, match="malformed"):
        check_runs(Runs(local=u64(1), remote=u64(1, 2), length=u64(1)))
    with pytest.raises(TransferError, match="empty run"):
        check_runs(Runs(local=u64(1), remote=u64(1), length=u64(0)))
    with pytest.raises(TransferError, match="no registered segment"):
        locate(u64(1), u64(1), (), side="remote")
