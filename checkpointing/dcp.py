"""Checkpoints that ``torch.distributed.checkpoint`` has saved, read whole tensor by tensor.

Their metadata is a pickle. It is read by an unpickler that knows the classes of such metadata and nothing else, so that
a folder from elsewhere cannot run code; tensors are read by torch with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from checkpointing.boxes import describe, uncovered
from checkpointing.live import stored_as
from checkpointing.safetensors_folder import Stored
from checkpointing.schema import Piece

_METADATA = ".metadata"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
}


class _Part(NamedTuple):
    """A box of a tensor, and where it is."""

    box: Piece
    file: str
    start: int
    nbytes: int


class DcpFolder:
    """``tensors`` by name, as they were saved. Raises ValueError for a folder that is no such checkpoint, or not whole:
    a file is missing or cut off, or a part of a tensor is nowhere.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder / _METADATA)
        self._parts: dict[str, list[_Part]] = {}
        self.tensors: dict[str, Stored] = {}
        try:
            found = dict(_described(self._metadata))
        except Exception as error:  # it can hold anything
            raise _damaged(folder / _METADATA, error) from None
        for name, (stored, parts) in found.items():
            self._check(Piece(name, (0,) * len(stored.shape), stored.shape), parts)
            self.tensors[name], self._parts[name] = stored, parts

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor. Raises ValueError when they are damaged."""
        shape, dtype = self.tensors[name]
        for part in self._parts[name]:
            self._check_sums(part)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        try:
            load({name: tensor}, storage_reader=_Reader(self._folder, self._metadata), no_dist=True)
        except (Exception, CheckpointException) as error:  # a damaged archive makes torch raise anything
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            raise ValueError(f"{name} in {self._folder} cannot be read: {_brief(cause)}") from None
        return tensor.reshape(-1).view(torch.uint8).numpy().view(stored_as(dtype)).reshape(shape)

    def _check(self, whole: Piece, parts: Sequence[_Part]) -> None:
        """torch leaves what no part covers as it was, and fails halfway at a file that is not there."""
        missing = uncovered(whole, [part.box for part in parts])
        if missing:
            raise ValueError(f"the checkpoint in {self._folder} has no {describe(missing[0])}")
        for box, file, start, nbytes in parts:
            path = self._folder / file
            if "/" in file or not path.is_file():
                raise ValueError(f"{self._folder} has no {file!r}, which is to hold {describe(box)}")
            if not 0 <= start <= start + nbytes <= path.stat().st_size:
                raise ValueError(f"{path} is cut off: {describe(box)} is not whole")

    def _check_sums(self, part: _Part) -> None:
        """torch writes a zip archive with checksums, and does not look at them."""
        with (self._folder / part.file).open("rb") as file:
            file.seek(part.start)
            data = io.BytesIO(file.read(part.nbytes))
        try:  # what is no archive, torch itself refuses
            damaged = zipfile.ZipFile(data).testzip() if zipfile.is_zipfile(data) else None
        except Exception as error:
            raise ValueError(f"{describe(part.box)} is damaged in {file.name}: {_brief(error)}") from None
        if damaged is not None:
            raise ValueError(
                f"{describe(part.box)} is damaged in {file.name}: a checksum is wrong (or was left out when saved, "
                "by torch.serialization.set_crc32_options)"
            )


def is_dcp_folder(folder: Path) -> bool:
    return (folder / _METADATA).is_file()


class _Reader(FileSystemReader):
    """torch's own reader, but for how metadata are unpickled."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _read_metadata(path: Path) -> Metadata:
    try:
        text = path.read_bytes()
        for opcode, value, _ in pickletools.genops(text):
            if "PUT" in opcode.name and int(value or 0) > len(text):  # Python would allocate a table of this size
                raise ValueError(f"it remembers an object as number {value}")
        metadata = _Unpickler(io.BytesIO(text)).load()
    except Exception as error:  # damaged bytes make an unpickler raise anything
        raise _damaged(path, error) from None
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} is not the metadata of a DCP checkpoint")
    return metadata


def _described(metadata: Metadata) -> Iterator[tuple[str, tuple[Stored, list[_Part]]]]:
    """Each tensor's name, what it is, and its parts."""
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"the dtype of {name} is {dtype!r}")
            stored = Stored(tuple(map(int, entry.size)), str(dtype).removeprefix("torch."))
            parts = []
            for chunk in entry.chunks:
                place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                box = Piece(name, tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
                if len(box.offset) != len(stored.shape) or len(box.size) != len(stored.shape):
                    raise ValueError(f"{name} and {describe(box)} have not equally many dims")
                parts.append(_Part(box, str(place.relative_path), int(place.offset), int(place.length)))
            yield str(name), (stored, parts)


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as the metadata of a DCP checkpoint: {_brief(error)}")


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no such metadata does")
        return super().find_class(module, name)
