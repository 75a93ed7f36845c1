"""The store through which torch's process groups meet: the rendezvous of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.rendezvous import Space


class GenerationStore(dist.Store):
    """torch's view of a ``Space``. ``generation`` lets the backend's creator, which gets only a store, find its way."""

    def __init__(self, generation: Any, space: Space, deadline: float) -> None:
        super().__init__()
        self.generation = generation
        self.space = space
        self._deadline = deadline
        self._addresses: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.space.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        if not key.rpartition("/")[2].isdigit():
            return self.space.wait([key], self._deadline)[0]
        # Gloo asks for its peers' addresses ("…/0", "…/1", which never change) one by one, and twice.
        if key not in self._addresses:
            self._addresses.update(self.space.family(key, self._deadline))
        return self._addresses[key]

    def add(self, key: str, amount: int) -> int:
        return self.space.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return not self.space.look(keys)[1]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        as_bytes = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return self.space.compare_set(key, *as_bytes)

    def delete_key(self, key: str) -> bool:
        return self.space.delete(key)

    def num_keys(self) -> int:
        return self.space.num_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._addresses]
        if len(missing) == 1 and missing[0].rpartition("/")[2].isdigit():
            self.get(missing[0])
        elif missing:
            self.space.wait(missing, self._deadline if timeout is None else timeout.total_seconds())
