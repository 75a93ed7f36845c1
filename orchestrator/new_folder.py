"""A folder for somebody else that appears whole or not at all, on local disks and object storage."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpointing.storage import LocalStorage, Storage, open_storage

_CLAIM = "unfinished"


@contextmanager
def new_folder(location: str) -> Iterator[Storage]:
    """Storage to write into; what is in it becomes the folder ``location`` when the block ends well, else nothing.

    Raises ValueError when ``location`` is not empty, be it at the end of the block because somebody was faster. Object
    storage has no rename: there the files appear one by one, and beside them ``unfinished``, which keeps others out,
    until all are there.
    """
    storage = open_storage(location)
    if isinstance(storage, LocalStorage):
        with _renamed(storage.folder.resolve(), location) as draft:
            yield draft
        return
    if storage.sizes("") or not storage.create(_CLAIM, secrets.token_bytes(8)):
        raise _not_empty(location)
    if storage.sizes("").keys() - {_CLAIM}:  # whoever wrote them has ended between the look and the claim
        storage.remove(_CLAIM)
        raise _not_empty(location)
    try:
        yield storage
    except BaseException:
        storage.remove_folder("")
        raise
    storage.remove(_CLAIM)


@contextmanager
def _renamed(folder: Path, location: str) -> Iterator[LocalStorage]:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise _not_empty(location)
    made = [path for path in folder.parents if not path.exists()]
    draft = LocalStorage(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp"))
    try:
        draft.folder.mkdir(parents=True)
        yield draft
        for path in (draft.folder, *draft.folder.rglob("*")):
            _sync(path)
        try:
            os.rename(draft.folder, folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _not_empty(location) from None
            raise
    except BaseException:
        draft.remove_folder("")
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()
        raise
    _sync(folder.parent)


def _not_empty(location: str) -> ValueError:
    return ValueError(f"{location} is not empty; choose a new folder")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
