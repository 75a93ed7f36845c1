"""Anonymous shared memory that a keeper owns and a worker writes.

Each slot is a memfd: it has no name in any file system, so nothing can leak, and the kernel frees it with the last
process that holds it. A worker maps the keeper's descriptor through /proc; when the worker is killed the keeper still
has every byte.

Before a slot's data lie two words that all processes see. The *ticket* is odd while the writer is at work and even
when the content is whole, so a writer killed half-way leaves a slot that nobody takes for a snapshot. The *lease count*
is the number of readers in the keeper; the writer waits for it to reach zero. After them come *marks*, one byte for
each of the first records of the content, in which the readers of a node tell each other what they have verified.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from checkpointing.node_memory import available_memory

_HEADER = 16 * mmap.PAGESIZE
_WORDS_NBYTES = 64
_TICKET, _LEASES = 0, 1
# Nobody can truncate a slot, which would kill whoever has it mapped and looks there next.
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class ArenaAddress:
    """What another process on the node needs to map an arena: ``nbytes`` per slot, a descriptor of ``pid`` per slot."""

    pid: int
    fds: tuple[int, ...]
    nbytes: int
    token: str  # guards against a reused pid or descriptor


class ArenaLost(RuntimeError):
    """The process that owned the arena is gone, or has closed it."""


class SlotRewritten(RuntimeError):
    """The slot no longer holds what the reader came for."""


class Arena:
    """Slots of equal size; two (A/B) by default, so that one whole snapshot exists while the other is written."""

    def __init__(self, address: ArenaAddress, maps: list[mmap.mmap], owned_fds: tuple[int, ...]) -> None:
        self.address = address
        self._buffers = [np.frombuffer(memory, np.uint8) for memory in maps]
        self._owned_fds = owned_fds
        self._lease_lock = threading.Lock()

    @classmethod
    def create(cls, nbytes: int, num_slots: int = 2) -> Arena:
        """Allocate ``num_slots`` slots of ``nbytes`` bytes each, every page present, so that no later write can fail.

        Raises ValueError when the node (or its control group) has not enough memory left.
        """
        needed, available = num_slots * (nbytes + _HEADER), available_memory()
        if needed > available:
            raise ValueError(f"the memory tier needs {needed} bytes on this node but only {available} are available")
        token = f"planaria-{secrets.token_hex(8)}"
        fds: list[int] = []
        try:
            for _ in range(num_slots):
                fds.append(os.memfd_create(token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.posix_fallocate(fds[-1], 0, _HEADER + nbytes)
                fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _FIXED_SIZE)
            maps = [_map(fd, nbytes) for fd in fds]
        except OSError as error:
            for fd in fds:
                os.close(fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise ValueError(f"the memory tier needs {needed} bytes but the kernel refused: {error.strerror}") from None
        return cls(ArenaAddress(os.getpid(), tuple(fds), nbytes, token), maps, tuple(fds))

    @classmethod
    def attach(cls, address: ArenaAddress) -> Arena:
        """Map an arena of another process on this node. Raises ArenaLost when that process is gone."""
        maps = []
        for index in range(len(address.fds)):
            with _opened(address, index) as fd:
                maps.append(_map(fd, address.nbytes))
        return cls(address, maps, ())

    def slot(self, index: int) -> np.ndarray:
        """The slot's bytes: uint8, 1-d, ``nbytes`` long, shared with every process that maps the arena."""
        return self._buffers[index][_HEADER:]

    def marks(self, index: int) -> np.ndarray:
        """What readers tell each other about the slot's content: uint8, 1-d, all zero after a rewrite."""
        return self._buffers[index][_WORDS_NBYTES:_HEADER]

    def ticket(self, index: int) -> int:
        """Changes with every rewrite; odd while a writer is at work."""
        return int(self._words(index)[_TICKET])

    @contextmanager
    def writing(self, index: int, timeout_s: float = 60.0) -> Iterator[np.ndarray]:
        """For the slot's one writer: the slot counts as empty from here until the block ends without an error.

        Waits for readers of the old content; raises TimeoutError when they take longer than ``timeout_s``.
        """
        words = self._words(index)
        words[_TICKET] |= 1
        deadline = time.monotonic() + timeout_s
        while words[_LEASES]:  # in another process, hence polled
            if time.monotonic() > deadline:
                raise TimeoutError(f"slot {index} is still being read after {timeout_s} s")
            time.sleep(0.0005)
        self.marks(index)[:] = 0
        yield self.slot(index)
        words[_TICKET] += 1

    @contextmanager
    def lease(self, index: int, ticket: int) -> Iterator[np.ndarray]:
        """For readers in the owning process: the content of ``ticket``, not rewritten inside the block.

        Raises SlotRewritten when the slot holds something else by now.
        """
        buffers = self._buffers  # close() may come at any time, from another thread
        if not buffers:
            raise SlotRewritten(f"slot {index} was released")
        words = buffers[index][:16].view(np.int64)
        with self._lease_lock:
            words[_LEASES] += 1
        try:
            if words[_TICKET] != ticket:
                raise SlotRewritten(f"slot {index} was rewritten")
            yield buffers[index][_HEADER:]
        finally:
            with self._lease_lock:
                words[_LEASES] -= 1

    def close(self) -> None:
        """Let go of the memory. Views that were handed out stay valid until they are dropped."""
        self._buffers = []
        for fd in self._owned_fds:
            os.close(fd)
        self._owned_fds = ()

    def _words(self, index: int) -> np.ndarray:
        return self._buffers[index][:16].view(np.int64)


def map_slot(address: ArenaAddress, index: int) -> tuple[np.ndarray, np.ndarray]:
    """(data, marks) of one slot for a reader on the node, both uint8, 1-d. Raises ArenaLost when its owner is gone.

    The data cannot be written to, and only pages that are touched get mapped: that costs about as much as copying them.
    """
    with _opened(address, index) as fd:
        header = mmap.mmap(fd, _HEADER, flags=mmap.MAP_SHARED)
        data = mmap.mmap(fd, address.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=_HEADER)
    return np.frombuffer(data, np.uint8), np.frombuffer(header, np.uint8)[_WORDS_NBYTES:]


@contextmanager
def _opened(address: ArenaAddress, index: int) -> Iterator[int]:
    """The slot's memfd, opened in this process."""
    gone = ArenaLost(f"process {address.pid} no longer holds its arena")
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fds[index]}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise gone from None
    try:
        if address.token not in os.readlink(f"/proc/self/fd/{fd}"):
            raise gone
        yield fd
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, _HEADER + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
