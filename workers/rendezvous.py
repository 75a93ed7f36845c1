"""Where the workers of a generation meet: a key-value table, and waits that end at a fence or a deadline.

The table (``Spaces``) lives in a keeper and is asked by actor calls (``calls.RendezvousClient``), so that no socket of
ours is open. Not a TCPStore: that one looks up peers by name, and a lost DNS packet stalls it for 5 s
(docs/decisions/0001-fenced-groups-and-rendezvous.md). No torch here, since a keeper must start fast.

A request is held for a moment at most. Keys live in a *space* (a scope such as "workers") that belongs to its newest
generation: the first request of a newer one empties it, and requests of older ones are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

HELD_MS = 50  # a wait is answered after this long, so that no number of waiting clients can use up the server's threads


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


class Rendezvous(Protocol):
    """A way to the server. ``local_host`` is this node's address as its peers see it."""

    @property
    def local_host(self) -> str: ...

    def request(self, parts: Sequence[bytes], interrupt: Any, /) -> list[bytes]:
        """What ``Spaces.answer`` returns; raises what ``interrupt.check`` raises, or ``RendezvousError``."""
        ...


class Spaces:
    """The server's data: scope -> (newest generation, its keys). Called from many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spaces: dict[bytes, tuple[int, dict[bytes, bytes]]] = {}

    def answer(self, request: list[bytes]) -> list[bytes]:
        """First part of the answer: ``b"ok"``, or ``b"over"`` and the newest generation."""
        scope, generation, command, *arguments = request
        with self._changed:
            newest, keys = self._spaces.get(scope, (-1, {}))
            if int(generation) > newest:
                newest, keys = int(generation), {}
                self._spaces[scope] = (newest, keys)
            if command in (b"wait", b"family"):
                wanted = set(arguments)
                self._changed.wait_for(lambda: wanted <= keys.keys(), HELD_MS / 1000)
                newest, _ = self._spaces[scope]
            if int(generation) < newest:
                return [b"over", str(newest).encode()]
            answer = self._run(keys, command, arguments)
            self._changed.notify_all()
            return [b"ok", *answer]

    def _run(self, keys: dict[bytes, bytes], command: bytes, arguments: list[bytes]) -> list[bytes]:
        match command, arguments:
            case b"set", [key, value]:
                keys[key] = value
                return []
            case b"get" | b"wait", wanted:  # all the values, or none of them and the keys that are missing
                missing = [key for key in wanted if key not in keys]
                return [b"missing", *missing] if missing else [b"found", *(keys[key] for key in wanted)]
            case b"family", [key]:  # the key and all that differ from it in the last part only, with their values
                family = key.rpartition(b"/")[0] + b"/"
                alike = [other for other in keys if other.startswith(family) and b"/" not in other[len(family) :]]
                return [part for other in alike for part in (other, keys[other])] if key in keys else []
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
        return self._look(b"get", keys)

    def _look(self, command: bytes, keys: Sequence[str]) -> tuple[list[bytes], list[str]]:
        found, *rest = self._ask(command, *(key.encode() for key in keys))
        return (rest, []) if found == b"found" else ([], [key.decode() for key in rest])

    def family(self, key: str, timeout: float) -> dict[str, bytes]:
        """Once ``key`` ("…/0") is there, it and all keys so far that differ in the last part; else ``MissingKeys``."""
        deadline = time.monotonic() + timeout
        while not (found := self._ask(b"family", key.encode())):
            if time.monotonic() > deadline:
                raise MissingKeys(timeout, [key])
        return {name.decode(): value for name, value in zip(found[::2], found[1::2], strict=True)}

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values, once all are there; ``MissingKeys`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            values, missing = self._look(b"wait", keys)
            if not missing:
                return values
            if time.monotonic() > deadline:
                raise MissingKeys(timeout, missing)


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
