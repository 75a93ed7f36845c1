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
from checkpointing.storage import open_storage
from orchestrator.config import JobConfig
from orchestrator.hugging_face import check_llama_config, llama_config, llama_name
from workers.config import DecoderConfig

_FILE_NBYTES = 1 << 30
_PREFIXES = ("", "model.", "state_dict.", "app.model.")  # before a parameter's name in checkpoints of others


class Tensors(Protocol):
    """Somebody's tensors by name."""

    tensors: dict[str, Stored]

    def read(self, name: str) -> np.ndarray: ...


def export_hugging_face(checkpoint: str, job: JobConfig, target: str, file_nbytes: int = _FILE_NBYTES) -> list[str]:
    """Write the checkpoint's model into the folder ``target`` as a Llama; returns the names of its files.

    Raises ValueError for a model of the user's own or a folder that is not empty; DigestMismatch for damage.
    """
    model = job.model
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"model {model!r} is your own; only the built-in decoder has a counterpart at Hugging Face")
    storage = open_storage(target)
    if storage.sizes(""):
        raise ValueError(f"{target} is not empty; choose a new folder")
    whole = WholeTensors(checkpoint)
    ours = {llama_name(name): spec for name, spec in whole.specs.items() if "/" not in name}
    tensors = {name: Stored(spec.shape, spec.dtype) for name, spec in ours.items()}
    config = llama_config(model, job.data.vocab_size, job.data.seq_len, next(iter(tensors.values())).dtype)
    files = write_safetensors(storage, tensors, lambda name: whole.read(ours[name].name), {"format": "pt"}, file_nbytes)
    storage.write("config.json", json.dumps(config, indent=2).encode())
    return files


def import_tensors(source: Tensors, schema: Schema, directory: str) -> tuple[str, int]:
    """Make a checkpoint of step 0 in ``directory`` from ``source``; returns its location and the number of optimizer
    tensors that ``source`` had. Those that it has not are zero, as an optimizer begins.

    Raises ValueError when the source lacks a parameter, has more than the model, or has one of another shape.
    """
    names = _matched(source.tensors, schema)
    specs = {spec.name: spec for spec in schema.tensors}

    def read(boxes: Sequence[Piece]) -> list[np.ndarray]:
        arrays = []
        for box in boxes:  # of one rank without neighbours: whole tensors
            spec, name = specs[box.name], names.get(box.name)
            if name is None:
                arrays.append(np.zeros(spec.shape, stored_as(spec.dtype)))
            else:
                arrays.append(convert(source.read(name), source.tensors[name].dtype, spec.dtype))
        return arrays

    snapshot = Snapshot(0, 0, 0, "1", (), {"cursor": [0, 0, 0], "tokens": 0})
    return write_state(directory, schema, snapshot, read), sum("/" in name for name in names)


def check_source(source: str, job: JobConfig) -> None:
    """Raise ValueError when a Hugging Face folder says that its model is another one than the job's."""
    config = open_storage(source).read("config.json")
    if config is not None and isinstance(job.model, DecoderConfig):
        check_llama_config(json.loads(config), job.model)


def open_source(location: str) -> Tensors:
    """A Hugging Face folder or a DCP checkpoint. Raises ValueError for anything else."""
    from checkpointing.dcp import DcpFolder, is_dcp_folder

    return DcpFolder(location) if is_dcp_folder(location) else SafetensorsFolder(location)


def _matched(there: Mapping[str, Stored], schema: Schema) -> dict[str, str]:
    """Our tensor -> its name in the source, for all parameters and what there is of the optimizer's state."""
    parameters = [spec for spec in schema.tensors if "/" not in spec.name]
    candidates = [{spec.name: prefix + spec.name for spec in parameters} for prefix in _PREFIXES]
    try:
        llama = {spec.name: llama_name(spec.name) for spec in parameters}
    except KeyError:  # a model of the user's own
        llama = {}
    if llama and llama["output.weight"] not in there:
        llama["output.weight"] = llama["embedding.weight"]  # tied there; here they are two, which begin equal
    names = max([llama, *candidates], key=lambda found: sum(name in there for name in found.values()))
    missing = [name for name in names.values() if name not in there]
    if missing or not names:
        wanted = missing[0] if missing else parameters[0].name
        raise ValueError(f"the source has no {wanted} ({len(missing)} of {len(parameters)} parameters are missing)")
    used = set(names.values())
    for spec in schema.tensors:
        state, slash, parameter = spec.name.rpartition("/")
        endings = (f".{names.get(parameter)}.{state}", f".{parameter}.{state}")
        found = [name for name in there if slash and name.endswith(endings)]
        if found:
            names[spec.name] = found[0]
    extra = sorted(there.keys() - used - set(names.values()))
    more = [name for name in extra if not _is_of_an_optimizer(name)]
    if more:
        raise ValueError(f"the source has {more[0]}, which the job's model has not ({len(more)} such tensors)")
    for spec in schema.tensors:
        if spec.name in names and there[names[spec.name]].shape != spec.shape:
            shapes = f"{list(there[names[spec.name]].shape)} in the source, not {list(spec.shape)} as in the job"
            raise ValueError(f"{names[spec.name]} has shape {shapes}")
    return names


def _is_of_an_optimizer(name: str) -> bool:
    return name.startswith(("optim", "state.")) or ".state." in name or ".param_groups." in name
