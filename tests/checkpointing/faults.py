"""Counts every call that changes something on disk or in an S3 store, and stops the process at one of them.

A *point* is a place where a process can be killed: before a call, after it (its answer is lost), and half-way through a
write to a file. ``enumerate``d by running once without a stop.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from botocore.client import BaseClient

_DISK_CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir")
_S3_CALLS = ("Put", "Create", "Upload", "Complete", "Delete", "Abort")


class Stopped(BaseException):
    """Stands for a kill -9: nobody catches it for good, since every later call raises it again."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    raise Stopped


class Faults:
    """``end`` is called at point number ``at`` (from 1), and at every one after it. ``names`` are the points seen."""

    def __init__(self, at: int | None = None, end: Callable[[], None] = stop) -> None:
        self.names: list[str] = []
        self._at, self._end = at, end
        self._lock = threading.Lock()

    def _point(self, name: str) -> None:
        with self._lock:
            self.names.append(name)
            over = self._at is not None and len(self.names) >= self._at
        if over:
            self._end()

    @contextmanager
    def injected(self) -> Iterator[None]:
        api_call, write, opened = BaseClient._make_api_call, os.write, os.open

        def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self._point(f"before {name}")
                result = call(*args, **kwargs)
                self._point(f"after {name}")
                return result

            return wrapped

        def half_way(fd: int, data: Any) -> int:
            half = write(fd, data[: len(data) // 2])
            self._point("half-way through write")
            return half + write(fd, data[len(data) // 2 :])

        def open_to_write(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if not flags & os.O_CREAT:
                return opened(path, flags, *args, **kwargs)
            return around("open", opened)(path, flags, *args, **kwargs)

        def through_api(client: Any, name: str, parameters: Any) -> Any:
            call = around(name, api_call) if name.startswith(_S3_CALLS) else api_call
            return call(client, name, parameters)

        with (
            mock.patch.multiple(os, **{name: around(name, getattr(os, name)) for name in _DISK_CALLS}),
            mock.patch.multiple(os, write=half_way, open=open_to_write),
            mock.patch.object(BaseClient, "_make_api_call", through_api),
        ):
            yield
