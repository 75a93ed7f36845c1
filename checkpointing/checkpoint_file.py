"""One safetensors file of a checkpoint: written from records, described for the manifest, checked against it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from checkpointing.boxes import describe
from checkpointing.holding import Holding
from checkpointing.schema import Piece
from checkpointing.snapshot import Record, digest_of


@dataclass(frozen=True)
class Share:
    """One record that a keeper writes: its ``dtype`` as stored (a safetensors name) and its file inside the folder."""

    holding: Holding
    record: Record
    dtype: str
    file: str


def write_file(attempt: Path, file: str, parts: Sequence[tuple[Share, np.ndarray]]) -> dict[str, Any]:
    """Write ``parts`` (shares of this file, each with its record's bytes) and fsync; return the manifest entry."""
    path = attempt / file
    tensors = {
        share.record.piece.name: safetensors.TensorSpec(
            dtype=share.dtype, shape=list(share.record.piece.size), data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        for share, data in parts
    }
    assert len(tensors) == len(parts), f"two boxes of one tensor in {file}"
    offsets = {share.record.piece.name: {"saved_offsets": share.record.piece.offset} for share, _ in parts}
    safetensors.serialize_file(tensors, path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
    with path.open("rb") as written:
        os.fsync(written.fileno())
        header = _read_header(written)
    places = json.loads(header[8:])
    pieces = [
        {
            "name": share.record.piece.name,
            "offset": share.record.piece.offset,
            "size": share.record.piece.size,
            "dtype": share.record.dtype,
            "start": len(header) + places[share.record.piece.name]["data_offsets"][0],
            "nbytes": share.record.nbytes,
            "digest": share.record.digest,
        }
        for share, _ in parts
    ]
    return {
        "file": file,
        "nbytes": path.stat().st_size,
        "header_nbytes": len(header),
        "header_digest": digest_of(np.frombuffer(header, np.uint8)),
        "pieces": sorted(pieces, key=lambda piece: piece["start"]),
    }


def _read_header(file: Any) -> bytes:
    """A safetensors file's header with the 8 bytes of its length before it. Header and pieces are the whole file."""
    length = file.read(8)
    return length + file.read(int.from_bytes(length, "little"))


def damage(path: Path, entry: Mapping[str, Any]) -> list[str]:
    """What a read of every byte finds wrong with a file of the right size; one sentence each."""
    content = np.memmap(path, np.uint8, mode="r")
    problems = []
    if digest_of(content[: entry["header_nbytes"]]) != entry["header_digest"]:
        problems.append(f"the header of {entry['file']} is damaged")
    for record in map(record_of, entry["pieces"]):
        if digest_of(record.data(content)) != record.digest:
            problems.append(f"{describe(record.piece)} is damaged in {entry['file']}")
    return problems


def record_of(piece: Mapping[str, Any]) -> Record:
    """The record that a manifest's piece describes; it points into its file."""
    box = Piece(piece["name"], tuple(piece["offset"]), tuple(piece["size"]))
    return Record(box, piece["dtype"], piece["start"], piece["nbytes"], piece["digest"])
