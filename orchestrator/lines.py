"""``metrics.jsonl`` and ``events.jsonl``: JSON lines that outlive the process that writes them.

On a local disk a log is one file, appended to. An object cannot be appended to, so behind a URI a log is numbered
segments, one every few seconds; readers see one log either way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from typing import Any, Protocol

from checkpointing.storage import LocalStorage, Storage

FORMAT = 1
_SEGMENT_S = 3.0


class Lines(Protocol):
    def append(self, line: Mapping[str, Any]) -> None: ...

    def flush(self, *, force: bool = False) -> None:
        """Write what has waited for long enough; all of it with ``force``."""
        ...

    def read(self) -> list[dict[str, Any]]: ...


def open_lines(storage: Storage, name: str) -> Lines:
    return FileLines(storage, name) if isinstance(storage, LocalStorage) else SegmentLines(storage, name)


class FileLines:
    """One file; every line is written by one unbuffered append."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._path = storage.folder / f"{name}.jsonl"
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def append(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # A killed writer may have left half a line: end it, so that it cannot swallow the first of ours.
                torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the log
                if torn and self._path.stat().st_size:
                    self._file.write(b"\n")
            try:
                self._file.write(_encode(line))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None

    def flush(self, *, force: bool = False) -> None:
        """Nothing waits."""

    def read(self) -> list[dict[str, Any]]:
        return _decode([self._path.read_bytes()] if self._path.exists() else [])


class SegmentLines:
    """Objects ``name/00000012.jsonl``; lines wait in memory for a few seconds, or until the store answers again.

    Only ``flush``, which is called often and beside the training, talks to the store.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._waiting: list[bytes] = []
        self._since = 0.0
        self._next: int | None = None
        self._lock = threading.Lock()

    def append(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(_encode(line))

    def flush(self, *, force: bool = False) -> None:
        with self._lock:
            if not self._waiting or not (force or time.monotonic() - self._since >= _SEGMENT_S):
                return
            if self._next is None:
                self._next = len(self._storage.names(self._name))
            # Exclusive, so that an older driver that still writes cannot replace a segment of ours.
            while not self._storage.create(f"{self._name}/{self._next:08d}.jsonl", b"".join(self._waiting)):
                self._next += 1
            self._next += 1
            self._waiting.clear()

    def read(self) -> list[dict[str, Any]]:
        return _decode(self._storage.read(name) or b"" for name in self._storage.names(self._name))


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, **line}, ensure_ascii=False).encode() + b"\n"


def _decode(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Whole lines only: one that was torn by a killed writer is left out."""
    lines = []
    for text in (line for chunk in chunks for line in chunk.split(b"\n")):
        try:
            line = json.loads(text) if text else None
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
