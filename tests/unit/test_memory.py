"""Shared segments and the ranges that agents register."""

import errno
import os

import numpy as np
import pytest

from kvflow.dataplane.memory import MappedRanges, MemoryRange, create_shared, map_shared
from kvflow.errors import MemoryAccessError


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_two_mappings_of_one_descriptor_share_their_bytes() -> None:
    with create_shared(10_000) as ours, map_shared(ours.fd, 10_000) as theirs:
        ours.view[:] = np.arange(10_000, dtype=np.uint8)
        np.testing.assert_array_equal(theirs.view, ours.view)
        assert theirs.address != ours.address
        assert theirs.fd != ours.fd


def test_a_mapping_outlives_the_segment_that_made_it() -> None:
    ours = create_shared(4096)
    theirs = map_shared(ours.fd, 4096)
    ours.view[0] = 7
    ours.close()
    assert theirs.view[0] == 7
    theirs.close()


def test_the_size_is_sealed() -> None:
    with create_shared(4096) as segment:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


def test_closing_twice_does_nothing_and_leaves_no_descriptor() -> None:
    before = open_descriptors()
    segment = create_shared(4096)
    segment.close()
    segment.close()
    assert open_descriptors() == before
    with pytest.raises(MemoryAccessError):
        _ = segment.view
    with pytest.raises(MemoryAccessError):
        _ = segment.fd


def test_a_view_that_outlives_its_segment_stays_readable() -> None:
    segment = create_shared(4096)
    segment.view[:] = 3
    view = segment.view
    segment.close()
    assert view.sum() == 3 * 4096


def test_a_descriptor_that_is_too_small_is_refused() -> None:
    before = open_descriptors()
    with create_shared(4096) as segment:
        for length in (4097, 0, -1):
            with pytest.raises(MemoryAccessError, match="announced"):
                map_shared(segment.fd, length)
    assert open_descriptors() == before


def test_a_closed_descriptor_is_refused_with_a_remedy() -> None:
    with pytest.raises(MemoryAccessError, match="attaching anew"):
        map_shared(10**6, 4096)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EPERM])
def test_a_full_host_gives_an_error_and_leaves_no_descriptor(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_descriptors()
    with pytest.raises(MemoryAccessError, match="no room" if code != errno.EPERM else "cannot create"):
        create_shared(4096)
    assert open_descriptors() == before


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(MemoryAccessError):
        create_shared(0)


def test_ranges_give_segments_with_addresses_in_this_process() -> None:
    with create_shared(4096) as first, create_shared(8192) as second:
        ranges = MappedRanges([first.range, second.range])
        assert [segment.length for segment in ranges.segments] == [4096, 8192]
        assert all(segment.memory == "DRAM" for segment in ranges.segments)
        assert ranges.segments[0].address != first.address
        ranges.close()
        ranges.close()


def test_device_memory_is_named_by_address() -> None:
    ranges = MappedRanges([MemoryRange.at(1 << 40, 4096, memory="VRAM", device=3)])
    (segment,) = ranges.segments
    assert (segment.address, segment.length, segment.memory, segment.device) == (1 << 40, 4096, "VRAM", 3)


def test_one_bad_range_unmaps_the_others() -> None:
    before = open_descriptors()
    with create_shared(4096) as segment:
        with pytest.raises(MemoryAccessError):
            MappedRanges([segment.range, MemoryRange(fd=segment.fd, length=1 << 20)])
        with pytest.raises(MemoryAccessError, match="memory kind"):
            MappedRanges([segment.range, MemoryRange.at(4096, 10, memory="VRAM")])
        with pytest.raises(MemoryAccessError, match="placement=engine"):
            MappedRanges([MemoryRange(fd=segment.fd, length=4096, memory="VRAM")])
    assert open_descriptors() == before
