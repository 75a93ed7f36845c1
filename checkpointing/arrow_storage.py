"""Whatever else pyarrow can reach (gs://, abfs://, hdfs://, …), by the same operations as local disks and S3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from checkpointing.storage import Pace, flat, unpaced

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_CHUNK_NBYTES = 8 << 20


def open_arrow_storage(url: str) -> ArrowStorage:
    """Raises ValueError when pyarrow does not understand ``url``."""
    from pyarrow.fs import FileSystem

    try:
        filesystem, path = FileSystem.from_uri(url)
    except (OSError, ValueError) as error:
        raise ValueError(f"storage_path {url!r} cannot be used: {error}") from None
    return ArrowStorage(filesystem, path, url)


class ArrowStorage:
    """See ``Storage``. pyarrow offers no exclusive creation: ``create`` looks, writes, and reads back."""

    def __init__(self, filesystem: FileSystem, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self.url = url.rstrip("/")

    def read(self, name: str) -> bytes | None:
        try:
            with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, nbytes: int) -> np.ndarray:
        with self._filesystem.open_input_file(f"{self._path}/{name}") as file:
            return np.frombuffer(file.read_at(nbytes, start) if start < file.size() else b"", np.uint8)

    def write(self, name: str, data: bytes) -> None:
        self.upload(name, [np.frombuffer(data, np.uint8)])

    def create(self, name: str, data: bytes) -> bool:
        if self.read(name) is not None:
            return False
        self.write(name, data)
        return self.read(name) == data

    def upload(self, name: str, buffers: Sequence[np.ndarray], pace: Pace = unpaced) -> None:
        path = f"{self._path}/{name}"
        self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with self._filesystem.open_output_stream(path) as stream:
            for buffer in buffers:
                data = flat(buffer)
                for start in range(0, data.nbytes, _CHUNK_NBYTES):
                    chunk = data[start : start + _CHUNK_NBYTES]
                    pace(chunk.nbytes)
                    stream.write(chunk)

    def names(self, folder: str) -> list[str]:
        return sorted(f"{folder}/{info.base_name}" for info in self._infos(folder) if info.is_file)

    def folders(self) -> list[str]:
        return sorted(info.base_name for info in self._infos("") if not info.is_file)

    def sizes(self, folder: str) -> dict[str, int]:
        found = self._infos(folder, recursive=True)
        return {info.path.removeprefix(f"{self._path}/"): info.size for info in found if info.is_file}

    def remove(self, name: str) -> None:
        try:
            self._filesystem.delete_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        try:
            self._filesystem.delete_dir(f"{self._path}/{folder}".rstrip("/"))
        except FileNotFoundError:
            return

    def abort_uploads(self, folder: str) -> None:
        """pyarrow has no name for them."""

    def _infos(self, folder: str, recursive: bool = False) -> list[FileInfo]:
        from pyarrow.fs import FileSelector

        where = f"{self._path}/{folder}".rstrip("/")
        return self._filesystem.get_file_info(FileSelector(where, allow_not_found=True, recursive=recursive))
