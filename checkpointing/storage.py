"""Files below one folder, on a local disk or in object storage: the one seam between the two.

All kinds offer the same few operations; what they guarantee is the least that runs and checkpoints need: a write is
seen whole or not at all, and ``create`` has one winner.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import psutil

Pace = Callable[[int], None]  # called with a number of bytes before they are written; waits when that is too fast
_CHUNK_NBYTES = 8 << 20


def unpaced(nbytes: int) -> None:
    """As fast as it goes."""


class Storage(Protocol):
    """Files by name ("job.yaml", "lease/00000001.json") below ``url``. Raises OSError when it cannot be used."""

    url: str

    def read(self, name: str) -> bytes | None:
        """The file's bytes, or None when there is none."""
        ...

    def read_range(self, name: str, start: int, nbytes: int) -> np.ndarray:
        """``nbytes`` bytes from ``start`` (uint8, 1-d), fewer where the file ends. Raises FileNotFoundError."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Create or replace the file in one go."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create the file unless it exists; False when it does. Of two callers at once, one gets True."""
        ...

    def upload(self, name: str, buffers: Sequence[np.ndarray], pace: Pace = unpaced) -> None:
        """Write a large file: the ``buffers`` (contiguous) one after the other. Whole and durable when it returns."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names ("folder/file") of the files right below ``folder``, sorted; empty when there is no such folder."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders right below ``url``, sorted, hidden ones left out."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Name ("folder/deep/file") and size in bytes of every file below ``folder``, however deep."""
        ...

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens when there is none."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove all files below ``folder`` ("" is everything), and what unfinished uploads left there."""
        ...

    def abort_uploads(self, folder: str) -> None:
        """End uploads below ``folder`` that nobody will finish; until then their parts take up space unseen."""
        ...


def open_storage(url: str) -> Storage:
    """``url`` is a path (made absolute), s3://bucket/prefix, file:///… or a URI that pyarrow.fs understands.

    Raises ValueError with a sentence otherwise.
    """
    if not url.strip():
        raise ValueError("a location is empty; write a path, or a URI like s3://bucket/prefix")
    if "://" not in url:
        return LocalStorage(_expanded(url).absolute())
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return LocalStorage(_path_of(url))
    if scheme == "s3":
        from checkpointing.s3 import S3Storage

        return S3Storage(url)
    from checkpointing.arrow_storage import open_arrow_storage

    return open_arrow_storage(url)


def check_reachable(url: str) -> None:
    """For a command's first contact: OSError at once when nothing listens at an S3 store, TimeoutError when it does not
    answer within some seconds. What comes later is tried again for about a minute before it fails."""
    if url.lower().startswith("s3://"):
        from checkpointing.s3 import S3Storage

        S3Storage(url).check_reachable()


def _expanded(path: str) -> Path:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{path!r}: there is no user {user[1:]!r}; write ./{user} for a folder of that name")
    return Path(expanded)


def _path_of(url: str) -> Path:
    """The path that a ``file://`` URI means."""
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError(f"{url!r} is not file:// with an absolute path; write file:///folder, or just a path")
    if "?" in url or "#" in url:
        raise ValueError(f"{url!r} has a '?' or '#', which a URI's path must not; write %3F or %23, or just a path")
    path = unquote(parts.path, errors="surrogateescape")
    if "\0" in path:
        raise ValueError(f"{url!r} has a zero byte, which no path has")
    return Path(path)


def join(url: str, *names: str) -> str:
    """Location of something below ``url``; a URI keeps its options (``?region=…``)."""
    base, query, options = url.partition("?") if "://" in url else (url, "", "")
    return "/".join((base.rstrip("/"), *names)) + query + options


def split(url: str) -> tuple[str, str]:
    """The inverse of ``join`` for one name: (location of the folder, name)."""
    base, query, options = url.partition("?") if "://" in url else (url, "", "")
    parent, _, name = base.rstrip("/").rpartition("/")
    if parent.endswith("://"):  # file:///name
        parent += "/"
    return (parent or ("/" if base.startswith("/") else ".")) + query + options, name


def flat(buffer: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(buffer.reshape(-1).view(np.uint8).data)


class RangedFile:
    """A file that slices like a 1-d uint8 array; each slice is one read of that range. Raises OSError."""

    def __init__(self, url: str) -> None:
        folder, self._name = split(url)
        self._storage = open_storage(folder)

    def __getitem__(self, where: slice) -> np.ndarray:
        assert where.step is None, where
        return self._storage.read_range(self._name, where.start, where.stop - where.start)


class LocalStorage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, nbytes: int) -> np.ndarray:
        return np.fromfile(self.folder / name, np.uint8, nbytes, offset=start)

    def write(self, name: str, data: bytes) -> None:
        os.replace(self._draft(name, data), self.folder / name)

    def create(self, name: str, data: bytes) -> bool:
        draft = self._draft(name, data)
        try:
            os.link(draft, self.folder / name)  # unlike O_EXCL, the file appears with its contents
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def upload(self, name: str, buffers: Sequence[np.ndarray], pace: Pace = unpaced) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for buffer in buffers:
                rest = flat(buffer)
                while rest.nbytes:
                    pace(min(rest.nbytes, _CHUNK_NBYTES))
                    rest = rest[os.write(fd, rest[:_CHUNK_NBYTES]) :]
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        found = (self.folder / folder).glob("*")
        return sorted(f"{folder}/{path.name}" for path in found if path.is_file() and not path.name.startswith("."))

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*") if path.is_dir() and not path.name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        found = (self.folder / folder).rglob("*")
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found if path.is_file()}

    def remove(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with contextlib.suppress(OSError):  # as in object storage, a folder is there while something is in it
                path.parent.rmdir()

    def remove_folder(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)

    def abort_uploads(self, folder: str) -> None:
        """A file that is being written is seen."""

    def sweep(self) -> None:
        """Remove the drafts of processes that were killed while writing."""
        for draft in (*self.folder.glob(".*.tmp"), *self.folder.glob("lease/.*.tmp")):
            pid = draft.name.split(".")[-2]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                draft.unlink(missing_ok=True)

    def _draft(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk is not helped by what did not fit
            draft.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from None
        return draft
