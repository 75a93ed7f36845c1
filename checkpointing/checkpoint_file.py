"""One safetensors file of a checkpoint: written from records, described for the manifest, checked against it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpointing.boxes import describe
from checkpointing.holding import Holding
from checkpointing.schema import Piece
from checkpointing.snapshot import Record, digest_of
from checkpointing.storage import Pace, Storage

# numpy's and torch's names -> safetensors' own
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Share:
    """One record that a keeper writes: its ``dtype`` (the tensor's, as ``TensorSpec`` has it) and its file."""

    holding: Holding
    record: Record
    dtype: str
    file: str


def safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Header (its length before it) of a file whose data are ``tensors`` (name, dtype, shape, bytes) in this order.

    Returns it with where each tensor begins in the file. The header is padded so that data begin at a multiple of 8.
    """
    places: dict[str, dict[str, Any]] = {}
    start = 0
    for name, dtype, shape, nbytes in tensors:
        where = [start, start + nbytes]
        places[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": where}
        start += nbytes
    assert len(places) == len(tensors), "two boxes of one tensor in one file"
    text = json.dumps({"__metadata__": dict(metadata), **places}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + place["data_offsets"][0] for place in places.values()]


def write_file(storage: Storage, file: str, parts: Sequence[tuple[Share, np.ndarray]], pace: Pace) -> dict[str, Any]:
    """Write ``parts`` (shares of this file, each with its record's bytes); return the manifest entry."""
    # Wide items first, as safetensors itself does: every tensor is then aligned to its own items.
    parts = sorted(parts, key=lambda part: (-part[0].record.itemsize, part[0].record.piece.name))
    records = [share.record for share, _ in parts]
    offsets = {record.piece.name: {"saved_offsets": record.piece.offset} for record in records}
    header, starts = safetensors_header(
        [(share.record.piece.name, share.dtype, share.record.piece.size, share.record.nbytes) for share, _ in parts],
        {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)},
    )
    head = np.frombuffer(header, np.uint8)
    storage.upload(file, [head, *(data for _, data in parts)], pace)
    return {
        "file": file,
        "nbytes": len(header) + sum(record.nbytes for record in records),
        "header_nbytes": len(header),
        "header_digest": digest_of(head),
        "pieces": [
            {
                "name": record.piece.name,
                "offset": record.piece.offset,
                "size": record.piece.size,
                "dtype": record.dtype,
                "start": start,
                "nbytes": record.nbytes,
                "digest": record.digest,
            }
            for record, start in zip(records, starts, strict=True)
        ],
    }


def damage(storage: Storage, entry: Mapping[str, Any]) -> list[str]:
    """What a read of every byte finds wrong with a file of the right size; one sentence each."""
    file = entry["file"]
    try:
        problems = []
        if digest_of(storage.read_range(file, 0, entry["header_nbytes"])) != entry["header_digest"]:
            problems.append(f"the header of {file} is damaged")
        for record in map(record_of, entry["pieces"]):
            if digest_of(storage.read_range(file, record.start, record.nbytes)) != record.digest:
                problems.append(f"{describe(record.piece)} is damaged in {file}")
        return problems
    except FileNotFoundError:
        return [f"{file} is missing"]
    except OSError as error:
        return [f"{file} cannot be read: {error.strerror}"]


def record_of(piece: Mapping[str, Any]) -> Record:
    """The record that a manifest's piece describes; it points into its file."""
    box = Piece(piece["name"], tuple(piece["offset"]), tuple(piece["size"]))
    return Record(box, piece["dtype"], piece["start"], piece["nbytes"], piece["digest"])
