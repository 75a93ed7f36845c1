"""The rendezvous over plain sockets, so that tests of process groups need no Ray (workers ask a keeper by calls)."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence

from workers.rendezvous import Interrupt, RendezvousError, Spaces

LOOK_UP_S = 0.02  # how often a client that waits for bytes looks whether the fence has tripped


def _pack(parts: Sequence[bytes]) -> bytes:
    return struct.pack("!I", len(parts)) + b"".join(struct.pack("!I", len(part)) + part for part in parts)


class _Reader:
    """Messages from a stream: the number of parts, then each part after its length (all 32-bit, network order)."""

    def __init__(self, connection: socket.socket, before_read: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._before_read = before_read

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._before_read()
            chunk = self._connection.recv(nbytes - len(data))
            if not chunk:
                raise ConnectionError("closed by the other side")
            data += chunk
        return bytes(data)

    def message(self) -> list[bytes]:
        (num_parts,) = struct.unpack("!I", self._read(4))
        return [self._read(struct.unpack("!I", self._read(4))[0]) for _ in range(num_parts)]


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = _Reader(self.request)
        with contextlib.suppress(OSError):  # the client went away
            while True:
                self.request.sendall(_pack(self.server.spaces.answer(reader.message())))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.spaces = Spaces()
        super().__init__(address, _Connection)


class RendezvousServer:
    """Serves from threads of this process, one per client, until ``close``. ``address`` is what clients connect to."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host``: this node's address as the other nodes see it."""
        self._server = _Server((host, 0))
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def connect(host: str, port: int, timeout: float = 5.0) -> RendezvousClient:
    """Connect to a server. ``timeout`` bounds this and every later request."""
    return RendezvousClient(host, port, timeout)


class RendezvousClient:
    """One connection, used by one thread at a time (others queue). Reconnects after an interrupted request."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.address = (host, port)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._socket: socket.socket | None = self._open()

    def _open(self) -> socket.socket:
        try:
            opened = socket.create_connection(self.address, timeout=self._timeout)
        except OSError as error:
            raise RendezvousError(f"no rendezvous server at {self.address[0]}:{self.address[1]}: {error}") from None
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened

    @property
    def local_host(self) -> str:
        """This node's address on the way to the server: the one under which peers reach this process."""
        with self._lock:
            self._socket = self._socket or self._open()
            return self._socket.getsockname()[0]

    def request(self, parts: Sequence[bytes], interrupt: Interrupt) -> list[bytes]:
        """Send one request and return its answer. Raises what ``interrupt`` raises, or ``RendezvousError``."""
        deadline = time.monotonic() + self._timeout
        with self._lock:
            connection = self._socket or self._open()
            self._socket = None  # kept only if the answer arrives: a late one must not be taken for the next request's

            def before_read() -> None:
                while not select.select([connection], [], [], LOOK_UP_S)[0]:
                    interrupt.check()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"silent for {self._timeout:g} s")

            try:
                connection.sendall(_pack(parts))
                answer = _Reader(connection, before_read).message()
                self._socket = connection
                return answer
            except OSError as error:
                host, port = self.address
                raise RendezvousError(f"lost the rendezvous server at {host}:{port}: {error}") from None
            finally:
                if self._socket is None:
                    connection.close()

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
