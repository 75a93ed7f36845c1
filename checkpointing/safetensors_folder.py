"""Folders of safetensors files as Hugging Face has them: one file, or several and ``model.safetensors.index.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from checkpointing.checkpoint_file import SAFETENSORS_DTYPES, safetensors_header
from checkpointing.live import stored_as
from checkpointing.storage import Storage, open_storage

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {stored: name for name, stored in SAFETENSORS_DTYPES.items()}
_MOST_HEADER_NBYTES = 100 << 20  # safetensors' own limit


class Stored(NamedTuple):
    """A tensor in somebody's files: its shape, and its dtype as torch calls it ("bfloat16")."""

    shape: tuple[int, ...]
    dtype: str


class SafetensorsFolder:
    """``tensors`` by name; only headers are read before ``read``. Raises ValueError for what is no such folder.

    ``location``: a path or s3://… .
    """

    def __init__(self, location: str) -> None:
        self._storage = open_storage(location)
        index = self._storage.read(INDEX)
        files = sorted(set(json.loads(index)["weight_map"].values())) if index is not None else [SINGLE]
        self.tensors: dict[str, Stored] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        for file in files:
            if "/" in file:
                raise ValueError(f"{INDEX} in {location} names {file!r}, which is not in the same folder")
            self._read_header(location, file)

    def _read_header(self, location: str, file: str) -> None:
        try:
            length = int.from_bytes(self._storage.read_range(file, 0, 8).tobytes(), "little")
            if length > _MOST_HEADER_NBYTES:
                raise ValueError("its header is too long")
            header = json.loads(self._storage.read_range(file, 8, length).tobytes())
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, stop = entry["data_offsets"]
                self.tensors[name] = Stored(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
                self._places[name] = (file, 8 + length + start, stop - start)
        except FileNotFoundError:
            raise ValueError(f"{location} has no {file}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} in {location} is not a safetensors file: {error}") from None

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor. Raises ValueError when the file ends before it does."""
        file, start, nbytes = self._places[name]
        data = self._storage.read_range(file, start, nbytes)
        if data.nbytes != nbytes:
            raise ValueError(f"{file} is cut off: {name} is not whole")
        return data.view(stored_as(self.tensors[name].dtype)).reshape(self.tensors[name].shape)


def write_safetensors(
    storage: Storage,
    tensors: Mapping[str, Stored],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    file_nbytes: int,
) -> list[str]:
    """Write ``tensors`` into files of at most ``file_nbytes`` (or one tensor) and the index; returns the files' names.

    One file's worth is in memory at a time.
    """
    batches = _batches(tensors, file_nbytes)
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, names in enumerate(batches, 1):
        file = f"model-{number:05d}-of-{len(batches):05d}.safetensors"
        header, _ = safetensors_header(
            [(name, tensors[name].dtype, tensors[name].shape, _nbytes(tensors[name])) for name in names], metadata
        )
        storage.upload(file, [np.frombuffer(header, np.uint8), *map(read, names)])
        index["weight_map"].update(dict.fromkeys(names, file))
        index["metadata"]["total_size"] += sum(_nbytes(tensors[name]) for name in names)
    storage.write(INDEX, json.dumps(index, indent=2).encode())
    return list(dict.fromkeys(index["weight_map"].values()))


def _batches(tensors: Mapping[str, Stored], file_nbytes: int) -> list[list[str]]:
    batches: list[list[str]] = []
    room = 0
    for name, stored in tensors.items():
        if not batches or _nbytes(stored) > room:
            batches.append([])
            room = file_nbytes
        batches[-1].append(name)
        room -= _nbytes(stored)
    return batches


def _nbytes(stored: Stored) -> int:
    return int(np.prod(stored.shape, dtype=np.int64)) * stored_as(stored.dtype).itemsize


def convert(bits: np.ndarray, dtype: str, wanted: str) -> np.ndarray:
    """A tensor stored as ``dtype`` in another floating dtype. Raises ValueError for a pair that loses its meaning."""
    if dtype == wanted:
        return bits
    if dtype == "bfloat16":  # the upper half of a float32
        bits, dtype = (bits.astype(np.uint32) << 16).view(np.float32), "float32"
    floats: Sequence[str] = ("float16", "float32", "float64")
    if dtype not in floats or wanted not in floats:
        raise ValueError(f"a tensor of {dtype} cannot become one of {wanted}")
    return np.ascontiguousarray(bits.astype(wanted))
