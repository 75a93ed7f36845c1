"""Where the workers of a generation meet: a key-value server, and a client whose waits end at a fence or a deadline.

Plain sockets and no torch, so that a process that must start fast (a keeper) can serve. Not a TCPStore: that one looks
up its peers' names, and a lost DNS packet stalls it for 5 s (docs/decisions/0001-fenced-groups-and-rendezvous.md).

A request is answered at once, never held: the client polls. Keys live in a *space* (a scope such as "workers") that
belongs to its newest generation: the first request of a newer one empties it, and requests of older ones are refused.
"""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

POLL_FIRST_S = 0.0002
POLL_LONGEST_S = 0.005
LOOK_UP_S = 0.02  # how often a client that waits for bytes looks whether the fence has tripped


class RendezvousError(RuntimeError):
    """The server is gone, the generation is over, or somebody did not come in time."""


class MissingKeys(RendezvousError):
    """``keys`` were not set in time."""

    def __init__(self, timeout: float, keys: list[str]) -> None:
        super().__init__(f"after {timeout:g} s still missing: {', '.join(keys)}")
        self.keys = keys


class Interrupt(Protocol):
    """What ends a wait early: ``check`` raises once it should (see ``fence.Fence``)."""

    def check(self) -> None: ...


def _pack(parts: Sequence[bytes]) -> bytes:
    return struct.pack("!I", len(parts)) + b"".join(struct.pack("!I", len(part)) + part for part in parts)


class Rendezvous(Protocol):
    """A way to the server. ``local_host`` is this node's address as its peers see it."""

    @property
    def local_host(self) -> str: ...

    def request(self, parts: Sequence[bytes], interrupt: Any, /) -> list[bytes]:
        """What ``Spaces.answer`` returns; raises what ``interrupt.check`` raises, or ``RendezvousError``."""
        ...


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


class Spaces:
    """The server's data: scope -> (newest generation, its keys)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[bytes, tuple[int, dict[bytes, bytes]]] = {}

    def answer(self, request: list[bytes]) -> list[bytes]:
        """First part of the answer: ``b"ok"``, or ``b"over"`` and the newest generation."""
        scope, generation, command, *arguments = request
        with self._lock:
            newest, keys = self._spaces.get(scope, (-1, {}))
            if int(generation) < newest:
                return [b"over", str(newest).encode()]
            if int(generation) > newest:
                keys = {}
                self._spaces[scope] = (int(generation), keys)
            return [b"ok", *self._run(keys, command, arguments)]

    def _run(self, keys: dict[bytes, bytes], command: bytes, arguments: list[bytes]) -> list[bytes]:
        match command, arguments:
            case b"set", [key, value]:
                keys[key] = value
                return []
            case b"get", wanted:  # all the values, or none of them and the keys that are missing
                missing = [key for key in wanted if key not in keys]
                return [b"missing", *missing] if missing else [b"found", *(keys[key] for key in wanted)]
            case b"add", [key, amount]:
                keys[key] = str(int(keys.get(key, b"0")) + int(amount)).encode()
                return [keys[key]]
            case b"swap", [key, expected, desired]:  # torch's compare_set
                if keys.get(key, b"") == expected:
                    keys[key] = desired
                return [keys.get(key, expected)]
            case b"delete", [key]:
                return [b"1" if keys.pop(key, None) is not None else b"0"]
            case b"count", []:
                return [str(len(keys)).encode()]
        raise AssertionError(f"unknown request {command!r} with {len(arguments)} arguments")


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


class Space:
    """The keys of one scope and generation, as one worker sees them. All values are bytes."""

    def __init__(self, client: Rendezvous, scope: str, generation: int, interrupt: Interrupt) -> None:
        self._client = client
        self._head = (scope.encode(), str(generation).encode())
        self._interrupt = interrupt

    def _ask(self, command: bytes, *arguments: bytes) -> list[bytes]:
        self._interrupt.check()
        status, *answer = self._client.request((*self._head, command, *arguments), self._interrupt)
        if status == b"over":
            own, newest = self._head[1].decode(), answer[0].decode()
            raise RendezvousError(f"generation {own} is over: generation {newest} has begun")
        return answer

    def set(self, key: str, value: bytes) -> None:
        self._ask(b"set", key.encode(), value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask(b"swap", key.encode(), expected, desired)[0]

    def delete(self, key: str) -> bool:
        return self._ask(b"delete", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def look(self, keys: Sequence[str]) -> tuple[list[bytes], list[str]]:
        """(values, []) when all keys are there, otherwise ([], the missing keys). Does not wait."""
        found, *rest = self._ask(b"get", *(key.encode() for key in keys))
        return (rest, []) if found == b"found" else ([], [key.decode() for key in rest])

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values, once all are there; ``MissingKeys`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        pause = POLL_FIRST_S
        while True:
            values, missing = self.look(keys)
            if not missing:
                return values
            if time.monotonic() > deadline:
                raise MissingKeys(timeout, missing)
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_LONGEST_S)


def gather(space: Space, name: str, rank: int, members: Sequence[int], value: bytes, timeout: float) -> list[bytes]:
    """Leave ``value`` as ``rank`` and return the values of all ``members`` (ranks), in that order.

    Raises ``RendezvousError`` naming the ranks that did not come within ``timeout`` seconds.
    """
    keys = {f"{name}/{member}": member for member in members}
    space.set(f"{name}/{rank}", value)
    try:
        return space.wait(list(keys), timeout)
    except MissingKeys as error:
        absent = sorted(keys[key] for key in error.keys)
        who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        raise RendezvousError(f"{who} did not come within {timeout:g} s") from None
