"""This process's TCP sockets, found through /proc: gloo neither tells its connections nor closes them on request."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator

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


def shut_connections(listeners: Collection[Address]) -> int:
    """Shut every connection that was made to one of ``listeners``, from either end. Returns how many.

    The descriptors stay open: their owner sees the end of the stream and closes them.
    """
    num_shut = 0
    for found in _tcp_sockets():
        try:
            # A listener has no peer and is left alone: gloo ends the process when accepting fails.
            ends = {found.getpeername()[:2], found.getsockname()[:2]}
            if not ends.isdisjoint(listeners):
                found.shutdown(socket.SHUT_RDWR)
                num_shut += 1
        except OSError:  # not, or no longer, connected
            continue
    return num_shut
