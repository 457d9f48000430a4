"""Shared memory that a worker and its actors map, and the ranges that an agent registers.

A range is either a file descriptor of shared memory (placement `process`) or an address in this process (placement
`engine`, VRAM).
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import MemoryAccessError
from kvflow.messages import KvSegment
from kvflow.messages.engine import MemoryKind

_NO_FD = -1


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Name one contiguous range of KV memory: `fd` of shared memory, or an `address` here when `fd` is negative."""

    fd: int
    length: int
    address: int = 0
    memory: MemoryKind = "DRAM"
    device: int = 0

    @classmethod
    def at(cls, address: int, length: int, *, memory: MemoryKind = "DRAM", device: int = 0) -> "MemoryRange":
        """Name memory that this process already holds; the caller keeps it alive while an agent has it."""
        return cls(fd=_NO_FD, length=length, address=address, memory=memory, device=device)


class SharedSegment:
    """Hold one mapping of shared memory; the descriptor belongs to the segment and is closed with it."""

    def __init__(self, fd: int, length: int) -> None:
        """Map `length` bytes of `fd` and take `fd` over; raise MemoryAccessError when it cannot be mapped."""
        self._fd = fd
        self._map = _map(fd, length)
        self._view: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.length = length
        self.address = int(self._view.ctypes.data)

    @property
    def fd(self) -> int:
        """Return the descriptor, to be sent to another process or duplicated."""
        if self._fd < 0:
            raise MemoryAccessError("the shared segment is closed")
        return self._fd

    @property
    def view(self) -> NDArray[np.uint8]:
        """Return the mapped bytes as a writable array of shape (length,)."""
        if self._view is None:
            raise MemoryAccessError("the shared segment is closed")
        return self._view

    @property
    def range(self) -> MemoryRange:
        """Return the range that an agent can register."""
        return MemoryRange(fd=self.fd, length=self.length)

    def close(self) -> None:
        """Unmap and close the descriptor; calling it again does nothing.

        Arrays taken from `view` keep the mapping alive until the last of them is gone, so none of them dangles.
        """
        if self._fd < 0:
            return
        self._view = None
        with contextlib.suppress(BufferError):  # somebody still holds a view: the mapping goes with it
            self._map.close()
        os.close(self._fd)
        self._fd = _NO_FD

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_shared(length: int, *, name: str = "kvflow", reserve: bool = True) -> SharedSegment:
    """Create anonymous shared memory whose size cannot change any more, and map it.

    `reserve` allocates all pages now, so that lack of memory is an error here and not a SIGBUS later.
    Raises MemoryAccessError when the host has no room.
    """
    if length <= 0:
        raise MemoryAccessError(f"cannot create shared memory of {length} bytes")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        if reserve:
            os.posix_fallocate(fd, 0, length)
        # A peer that maps the descriptor could otherwise shrink the file under our mapping.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return SharedSegment(fd, length)
    except OSError as error:
        os.close(fd)
        raise _no_room(length, error) from error
    except MemoryAccessError:
        os.close(fd)
        raise


def map_shared(fd: int, length: int) -> SharedSegment:
    """Map shared memory of another process; `fd` stays the caller's. Raises MemoryAccessError."""
    try:
        own = os.dup(fd)
    except OSError as error:
        raise MemoryAccessError(
            f"file descriptor {fd} is not open: {error.strerror}", remedy="send the descriptor again by attaching anew"
        ) from error
    try:
        return SharedSegment(own, length)
    except MemoryAccessError:
        os.close(own)
        raise


class MappedRanges:
    """Map the fd-backed ones of some ranges, and give the segments that stand for all of them in this process."""

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        """Map every range; raise MemoryAccessError, with nothing left mapped, when one cannot be."""
        kinds = {item.memory for item in ranges}
        if len(kinds) != 1:
            found = ", ".join(sorted(kinds)) or "none"
            raise MemoryAccessError(
                f"an agent serves ranges of one memory kind, got: {found}", remedy="start one agent per memory kind"
            )
        self._mapped: list[SharedSegment] = []
        try:
            self.segments = tuple([self._segment(item) for item in ranges])
        except MemoryAccessError:
            self.close()
            raise

    def _segment(self, item: MemoryRange) -> KvSegment:
        if item.length <= 0 or (item.fd < 0 and item.address <= 0):
            raise MemoryAccessError(f"memory range at address {item.address} of {item.length} bytes is empty")
        if item.fd < 0:
            return KvSegment(address=item.address, length=item.length, memory=item.memory, device=item.device)
        if item.memory != "DRAM":
            raise MemoryAccessError(
                f"{item.memory} cannot be shared by file descriptor", remedy="use placement=engine for device memory"
            )
        mapped = map_shared(item.fd, item.length)
        self._mapped.append(mapped)
        return KvSegment(address=mapped.address, length=mapped.length)

    def close(self) -> None:
        """Unmap everything that was mapped here."""
        while self._mapped:
            self._mapped.pop().close()


def _map(fd: int, length: int) -> mmap.mmap:
    try:
        size = os.fstat(fd).st_size
    except OSError as error:
        raise MemoryAccessError(f"cannot inspect file descriptor {fd}: {error.strerror}") from error
    if length <= 0 or size < length:
        raise MemoryAccessError(
            f"shared memory holds {size} bytes, but {length} were announced",
            remedy="restart the engine; its worker and the node must run the same kvflow version",
        )
    try:
        return mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise MemoryAccessError(
            f"cannot map {length} bytes of shared memory: {error}", remedy="raise the process's address-space limit"
        ) from error


def _no_room(length: int, error: OSError) -> MemoryAccessError:
    if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
        return MemoryAccessError(
            f"no room for {length} bytes of shared memory: {error.strerror}",
            remedy="give the container more memory (and a larger /dev/shm), or make the KV cache smaller",
        )
    return MemoryAccessError(f"cannot create shared memory of {length} bytes: {error.strerror}")
