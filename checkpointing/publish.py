"""How files become a checkpoint, and how a checkpoint goes: whole or not at all, on local disks and object storage.

Local disk: an attempt is a hidden folder, synced and then renamed. Object storage has no rename: an attempt's files lie
where they stay, under a prefix of their own inside the step's folder; a note beside the folders says that it is not (or
no longer) a checkpoint; the manifest is created exclusively, then COMMITTED, then the note goes. Whoever finds a note
finishes what it says.

Only a run's one driver calls ``sweep`` and ``remove``, since nobody can tell a live attempt from a dead one. Others
(``planaria checkpoint reshard`` and ``import``) may write at the same time into the same folder: their attempts are
``exclusive``, and of those of one step one becomes a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from dataclasses import dataclass

import numpy as np

from checkpointing.storage import LocalStorage, Storage, join, open_storage, split

MANIFEST, MARK = "manifest.json", "COMMITTED"
_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_NOTES = "unfinished"
_REMOVING = "removing"


@dataclass(frozen=True)
class Attempt:
    """A checkpoint of ``step`` that is being written. Its files go below ``url``; ``name`` is that below ``directory``.

    ``folder`` is the checkpoint's folder, "" as long as that is open; ``prefix`` comes before its files' names there.
    ``made`` are local folders that were made for it, inner ones first; ``exclusive``: see ``begin``.
    """

    directory: str
    step: int
    name: str
    folder: str
    prefix: str
    made: tuple[str, ...] = ()
    exclusive: bool = False

    @property
    def url(self) -> str:
        return join(self.directory, self.name)


def begin(directory: str, step: int, *, exclusive: bool = False) -> Attempt:
    """An attempt at a checkpoint of ``step`` in ``directory`` (a run's ``checkpoints``).

    An ``exclusive`` one becomes the first checkpoint of its step in ``directory``, or none.
    """
    storage, token = open_storage(directory), secrets.token_hex(4)
    folder = f"step-{step:08d}" if exclusive else ""
    if isinstance(storage, LocalStorage):
        name = f".step-{step:08d}.{token}.tmp"
        made = [str(path) for path in (storage.folder, *storage.folder.parents) if not path.exists()]
        (storage.folder / name / "data" / "optimizer").mkdir(parents=True)
        return Attempt(directory, step, name, folder, "", tuple(made), exclusive)
    folder = folder or _free_folder(storage, step)
    storage.write(f"{_NOTES}/{folder}.{token}", b"")
    prefix = f"attempt-{token}"
    return Attempt(directory, step, f"{folder}/{prefix}", folder, f"{prefix}/", exclusive=exclusive)


def sweep(directory: str) -> None:
    """Remove attempts that never ended, finish removals that never did, and abort uploads that nobody will finish."""
    storage = open_storage(directory)
    if isinstance(storage, LocalStorage):
        for path in storage.folder.glob(".step-*.tmp"):
            storage.remove_folder(path.name)
        return
    storage.abort_uploads("")
    for note in storage.names(_NOTES):
        folder, _, token = note.removeprefix(f"{_NOTES}/").rpartition(".")
        if token == _REMOVING or storage.read(f"{folder}/{MARK}") is None:
            storage.remove_folder(folder)
        storage.remove(note)
    for folder in _step_folders(storage):
        if not _is_marked(storage, folder):  # a writer that did not know that its driver was gone
            storage.remove_folder(folder)


def give_up(attempt: Attempt) -> None:
    """Remove what the attempt has written, and the folders made for it that nobody else uses by now."""
    storage = open_storage(attempt.directory)
    storage.remove_folder(attempt.name)
    for note in _notes(attempt):
        storage.remove(note)
    with contextlib.suppress(OSError):  # not empty
        for folder in attempt.made:
            os.rmdir(folder)


def publish(attempt: Attempt, manifest: bytes, mark: bytes) -> str:
    """Turn a fully written attempt into a checkpoint; returns its location. Raises FileExistsError after a rival.

    A step that has a folder already (a damaged one) gets a second one beside it, ``step-….1``.
    """
    storage = open_storage(attempt.directory)
    if isinstance(storage, LocalStorage):
        storage.upload(f"{attempt.name}/{MANIFEST}", [np.frombuffer(manifest, np.uint8)])
        storage.upload(f"{attempt.name}/{MARK}", [np.frombuffer(mark, np.uint8)])
        for folder in ("data/optimizer", "data", "."):
            _sync_folder(storage, f"{attempt.name}/{folder}")
        folder = attempt.folder or _free_folder(storage, attempt.step)
        try:
            os.rename(storage.folder / attempt.name, storage.folder / folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise _overtaken(attempt, folder) from None
        _sync_folder(storage, ".")
        return join(attempt.directory, folder)
    if not storage.create(f"{attempt.folder}/{MANIFEST}", manifest):
        raise _overtaken(attempt, attempt.folder)
    storage.write(f"{attempt.folder}/{MARK}", mark)
    for note in _notes(attempt):
        storage.remove(note)
    return join(attempt.directory, attempt.folder)


def list_checkpoints(directory: str) -> list[str]:
    """Locations of committed checkpoints, oldest step first, damaged ones included."""
    storage = open_storage(directory)
    folders = _step_folders(storage)
    if not isinstance(storage, LocalStorage):
        noted = {note.removeprefix(f"{_NOTES}/").rpartition(".")[0] for note in storage.names(_NOTES)}
        folders = [folder for folder in folders if folder not in noted and _is_marked(storage, folder)]
    return [join(directory, folder) for folder in folders]


def step_of(checkpoint: str) -> int:
    return _order(split(checkpoint)[1])[0]


def remove(checkpoint: str) -> None:
    """Remove a checkpoint; one cut short does not leave something that looks like a damaged checkpoint."""
    directory, folder = split(checkpoint)
    storage = open_storage(directory)
    if isinstance(storage, LocalStorage):
        doomed = f".{folder}.{secrets.token_hex(4)}.tmp"
        os.rename(storage.folder / folder, storage.folder / doomed)
        storage.remove_folder(doomed)
        return
    note = f"{_NOTES}/{folder}.{_REMOVING}"
    storage.write(note, b"")
    storage.remove(f"{folder}/{MANIFEST}")
    storage.remove_folder(folder)
    storage.remove(note)


def _step_folders(storage: Storage) -> list[str]:
    return sorted((folder for folder in storage.folders() if _FOLDER.fullmatch(folder)), key=_order)


def _order(folder: str) -> tuple[int, int]:
    match = _FOLDER.fullmatch(folder)
    assert match is not None, f"{folder} is not a checkpoint's folder"
    return int(match[1]), int(match[2] or 0)


def _free_folder(storage: Storage, step: int) -> str:
    taken = [number for there, number in map(_order, _step_folders(storage)) if there == step]
    return f"step-{step:08d}" + (f".{max(taken) + 1}" if taken else "")


def _is_marked(storage: Storage, folder: str) -> bool:
    return not {f"{folder}/{MANIFEST}", f"{folder}/{MARK}"}.isdisjoint(storage.names(folder))


def _notes(attempt: Attempt) -> list[str]:
    token = attempt.name.rpartition("-")[2]
    return [f"{_NOTES}/{attempt.folder}.{token}"] if attempt.prefix else []


def _overtaken(attempt: Attempt, folder: str) -> FileExistsError:
    return FileExistsError(
        f"{join(attempt.directory, folder)} was written by somebody else just now, and stays as it is"
    )


def _sync_folder(storage: LocalStorage, name: str) -> None:
    fd = os.open(storage.folder / name, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
