"""This process's TCP sockets, found through /proc: gloo neither tells its connections nor closes them on request."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator

Address = tuple[str, int]  # host, port


def _tcp_sockets() -> Iterator[socket.socket]:
    """Each TCP socket of this process, as a duplicate that is closed after its turn."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found


def listening() -> set[Address]:
    """The addresses that this process listens on."""
    return {
        found.getsockname()[:2] for found in _tcp_sockets() if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def connections(listeners: Collection[Address]) -> Iterator[tuple[socket.socket, Address]]:
    """Every connection that was made to one of ``listeners``, from either end, and the address of its other end.

    A listener has no peer and is left out. The socket is closed after its turn, gloo's own stays open.
    """
    for found in _tcp_sockets():
        try:
            own, other = found.getsockname()[:2], found.getpeername()[:2]
        except OSError:  # not, or no longer, connected
            continue
        if own in listeners or other in listeners:
            yield found, other


def shut_connections(listeners: Collection[Address]) -> int:
    """Shut every connection that was made to one of ``listeners``, from either end. Returns how many.

    The descriptors stay open: their owner sees the end of the stream and closes them. Listeners are left alone: gloo
    ends the process when accepting fails.
    """
    num_shut = 0
    for found, _ in connections(listeners):
        with contextlib.suppress(OSError):  # no longer connected
            found.shutdown(socket.SHUT_RDWR)
            num_shut += 1
    return num_shut


class Watch:
    """Tells, once, when the other end of one of the connections closes it: at once, though nobody reads from it.

    ``closed`` is called on a thread of the watch with the address of the other end.
    """

    def __init__(self, listeners: Collection[Address], closed: Callable[[Address], None]) -> None:
        # Descriptors of its own, and no `socket.dup`: that would make gloo's sockets, which do not wait, wait.
        self._others = {os.dup(found.fileno()): other for found, other in connections(listeners)}
        self._closed = closed
        self._ended, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._look, name="peers", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        for descriptor in self._others:
            poll.register(descriptor, select.POLLRDHUP)
        seen = [descriptor for descriptor, _ in poll.poll()]
        if self._ended.fileno() not in seen:
            self._closed(self._others[seen[0]])

    def close(self) -> None:
        """Look no more. A connection that gloo closes is closed only after this."""
        self._end.close()
        self._thread.join()
        self._ended.close()
        for descriptor in self._others:
            os.close(descriptor)
