"""Checkpoints that ``torch.distributed.checkpoint`` has saved, read whole tensor by tensor.

Their metadata is a pickle. It is read by an unpickler that knows the classes of such metadata and nothing else, so that
a folder from elsewhere cannot run code; tensors are read by torch with ``weights_only``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpointing.live import stored_as
from checkpointing.safetensors_folder import Stored

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


class DcpFolder:
    """``tensors`` by name, as they were saved. Raises ValueError for a folder that is no such checkpoint."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._reader = _Reader(self._folder)
        metadata = self._reader.read_metadata()
        self.tensors = {
            name: Stored(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor."""
        shape, dtype = self.tensors[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        load({name: tensor}, storage_reader=_Reader(self._folder), no_dist=True)
        return tensor.reshape(-1).view(torch.uint8).numpy().view(stored_as(dtype)).reshape(shape)


def is_dcp_folder(folder: str) -> bool:
    return "://" not in folder and (Path(folder) / _METADATA).is_file()


class _Reader(FileSystemReader):
    """torch's own reader, but for how it unpickles metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / _METADATA

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with self._file.open("rb") as file:
                metadata = _Unpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"{self._file} cannot be read as the metadata of a DCP checkpoint: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self._file} is not the metadata of a DCP checkpoint")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no such metadata does")
        return super().find_class(module, name)
