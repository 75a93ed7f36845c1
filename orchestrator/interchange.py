"""Checkpoints to and from other formats: Hugging Face folders, and torch's distributed checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from checkpointing.live import stored_as
from checkpointing.rewrite import WholeTensors, write_state
from checkpointing.safetensors_folder import SafetensorsFolder, Stored, convert, write_safetensors
from checkpointing.schema import Piece, Schema
from checkpointing.snapshot import Snapshot
from checkpointing.storage import LocalStorage, open_storage
from orchestrator.config import JobConfig
from orchestrator.hugging_face import check_llama_config, llama_config, llama_name
from orchestrator.matching import match
from orchestrator.new_folder import new_folder
from workers.config import DecoderConfig

_FILE_NBYTES = 1 << 30


class Tensors(Protocol):
    """Somebody's tensors by name."""

    tensors: dict[str, Stored]

    def read(self, name: str) -> np.ndarray: ...


def export_hugging_face(
    checkpoint: str, job: JobConfig, target: str, others: Mapping[str, bytes], file_nbytes: int = _FILE_NBYTES
) -> list[str]:
    """Write the checkpoint's model into the folder ``target`` as a Llama, and ``others`` (files by name) beside it;
    returns the names of the model's files. The folder appears whole or not at all.

    Raises ValueError for a model of the user's own or a folder that is not empty; DigestMismatch for damage.
    """
    model = job.model
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"model {model!r} is your own; only the built-in decoder has a counterpart at Hugging Face")
    whole = WholeTensors(checkpoint)
    ours = {llama_name(name): spec for name, spec in whole.specs.items() if "/" not in name}
    tensors = {name: Stored(spec.shape, spec.dtype) for name, spec in ours.items()}
    config = llama_config(model, job.data.vocab_size, job.data.seq_len, next(iter(tensors.values())).dtype)
    with new_folder(target) as storage:
        files = write_safetensors(
            storage, tensors, lambda name: whole.read(ours[name].name), {"format": "pt"}, file_nbytes
        )
        for name, data in {**others, "config.json": json.dumps(config, indent=2).encode()}.items():
            storage.write(name, data)
    return files


def import_tensors(source: Tensors, schema: Schema, directory: str) -> tuple[str, int]:
    """Make a checkpoint of step 0 in ``directory`` from ``source``; returns its location and the number of optimizer
    tensors that ``source`` had. Those that it has not are zero, as an optimizer begins.

    Raises ValueError when the source lacks a parameter, has more than the model, has one of another shape or kind, has
    two values for a tied one, or has values that the model's dtype cannot hold; nothing is left in ``directory`` then.
    """
    names = match(source.tensors, schema)
    for found in names.values():
        _check_tied(source, found)
    specs = {spec.name: spec for spec in schema.tensors}

    def read(boxes: Sequence[Piece]) -> list[np.ndarray]:
        arrays = []
        for box in boxes:  # of one rank without neighbours: whole tensors
            spec, found = specs[box.name], names.get(box.name)
            if found is None:
                arrays.append(np.zeros(spec.shape, stored_as(spec.dtype)))
            else:
                arrays.append(convert(source.read(found[0]), source.tensors[found[0]].dtype, spec.dtype, found[0]))
        return arrays

    snapshot = Snapshot(0, 0, 0, "1", (), {"cursor": [0, 0, 0], "tokens": 0})
    return write_state(directory, schema, snapshot, read), sum("/" in name for name in names)


def _check_tied(source: Tensors, names: Sequence[str]) -> None:
    """Raise ValueError unless what is one tensor in the job's model is the same under all its names."""
    for other in names[1:]:
        same = source.tensors[names[0]] == source.tensors[other]
        if not same or source.read(names[0]).tobytes() != source.read(other).tobytes():
            raise ValueError(f"{names[0]} and {other} are one tensor in the job's model, but differ in the source")


def check_source(source: str, job: JobConfig) -> None:
    """Raise ValueError when a Hugging Face folder says that its model is another one than the job's."""
    config = open_storage(source).read("config.json")
    if config is None or not isinstance(job.model, DecoderConfig):
        return
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json in {source} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config.json in {source} is not an object")
    check_llama_config(found, job.model)


def open_source(location: str) -> Tensors:
    """A Hugging Face folder or a DCP checkpoint. Raises ValueError for anything else."""
    from checkpointing.dcp import DcpFolder, is_dcp_folder

    storage = open_storage(location)
    if isinstance(storage, LocalStorage) and is_dcp_folder(storage.folder):
        return DcpFolder(storage.folder)
    return SafetensorsFolder(location)
