"""Folders of safetensors files as Hugging Face has them: one file, or several and ``model.safetensors.index.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpointing.checkpoint_file import SAFETENSORS_DTYPES, safetensors_header
from checkpointing.live import stored_as
from checkpointing.storage import Storage, open_storage

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("float16", "float32", "float64")
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
        self._location = self._storage.url
        self._sizes = self._storage.sizes("")
        self.tensors: dict[str, Stored] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        index = self._read_index()
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            for name, (stored, start, nbytes) in self._read_header(file).items():
                if name in self.tensors or (index or {}).get(name, file) != file:
                    raise ValueError(f"{file} in {self._location} holds {name}, which is another file's")
                self.tensors[name], self._places[name] = stored, (file, start, nbytes)
        for name, file in (index or {}).items():
            if name not in self.tensors:
                raise ValueError(f"{file} in {self._location} does not hold {name}, though {INDEX} says so")

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor. Raises ValueError when the file ends before it does."""
        file, start, nbytes = self._places[name]
        data = self._storage.read_range(file, start, nbytes)
        if data.nbytes != nbytes:
            raise ValueError(f"{file} in {self._location} is cut off: {name} is not whole")
        return data.view(stored_as(self.tensors[name].dtype)).reshape(self.tensors[name].shape)

    def _read_index(self) -> dict[str, str] | None:
        """Tensor -> file; None when there is no index."""
        text = self._storage.read(INDEX) if INDEX in self._sizes else None
        if text is None:
            return None
        try:
            index = _parsed(text).get("weight_map")
            if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
                raise ValueError("its weight_map does not give each tensor a file")
        except ValueError as error:
            raise ValueError(f"{INDEX} in {self._location} is not an index: {error}") from None
        for file in index.values():
            if "/" in file:
                raise ValueError(f"{INDEX} in {self._location} names {file!r}, which is not in the same folder")
        return index

    def _read_header(self, file: str) -> dict[str, tuple[Stored, int, int]]:
        """Tensor -> what it is, where it begins in the file, and its bytes."""
        if file not in self._sizes:
            raise ValueError(f"{self._location} has no {file}")
        size = self._sizes[file]
        try:
            length = int.from_bytes(self._storage.read_range(file, 0, 8).tobytes(), "little") if size else 0
            if length > min(size - 8, _MOST_HEADER_NBYTES):
                raise ValueError("its header is too long")
            header = _parsed(self._storage.read_range(file, 8, length).tobytes())
            return _placed(header, 8 + length, size)
        except ValueError as error:
            raise ValueError(f"{file} in {self._location} is not a safetensors file: {error}") from None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    return found


def _placed(header: Mapping[str, Any], start: int, size: int) -> dict[str, tuple[Stored, int, int]]:
    """What a header says, checked as safetensors itself does: the tensors follow each other and fill the file. (Its own
    check needs the whole file on a local disk.)

    ``start``: where data begin in a file of ``size`` bytes.
    """
    found: dict[str, tuple[Stored, int, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            stored = Stored(_counts(entry["shape"]), _DTYPES[entry["dtype"]])
            first, end = _counts(entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"what it says of {name} is not a dtype that is known here, a shape and offsets") from None
        if end - first != _nbytes(stored):
            raise ValueError(f"{name} has {end - first} bytes, which {stored.dtype} {list(stored.shape)} has not")
        found[name] = stored, start + first, end - first
    place = start
    for name, (_, first, nbytes) in sorted(found.items(), key=lambda item: item[1][1:]):
        if first != place:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        place += nbytes
    if place != size:
        raise ValueError(f"it has {size} bytes instead of {place}")
    return found


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(values)
    return tuple(values)


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
    return math.prod(stored.shape) * stored_as(stored.dtype).itemsize


def can_convert(dtype: str, wanted: str) -> bool:
    """Whether ``convert`` takes this pair: it would not lose the meaning of the tensor."""
    return dtype == wanted or (dtype in ("bfloat16", *_FLOATS) and wanted in _FLOATS)


def convert(bits: np.ndarray, dtype: str, wanted: str, name: str) -> np.ndarray:
    """Tensor ``name``, stored as ``dtype``, in another floating dtype (see ``can_convert``).

    Raises ValueError for a finite value that would become infinite.
    """
    assert can_convert(dtype, wanted), (name, dtype, wanted)
    if dtype == wanted:
        return bits
    if dtype == "bfloat16":  # the upper half of a float32
        bits = np.left_shift(bits, 16, dtype=np.uint32, out=np.empty(bits.shape, np.uint32)).view(np.float32)
    with np.errstate(over="ignore"):
        converted = bits.astype(wanted, order="C")
    lost = np.isinf(converted) & np.isfinite(bits)
    if lost.any():
        raise ValueError(f"{name} holds {float(bits[lost][0])}, which is too large for {wanted}")
    return converted
