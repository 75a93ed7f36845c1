"""A schema as JSON, so that a checkpoint can be cut for any layout without the program that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from checkpointing.schema import Fused, Schema, TensorSpec

_DEFAULTS = {f.name: f.default for f in fields(TensorSpec) if f.default is not MISSING}


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """What ``schema_from_json`` needs; fields of a tensor that have their default are left out."""
    return {
        "num_layers": schema.num_layers,
        "aliases": dict(schema.aliases),
        "fused": [asdict(one) for one in schema.fused],
        "tensors": {spec.name: _tensor(spec) for spec in schema.tensors},
    }


def schema_from_json(data: Mapping[str, Any]) -> Schema:
    """The inverse, from a mapping that may hold other keys too (a manifest)."""
    tensors = [
        TensorSpec(name, **{key: _tuples(value) for key, value in tensor.items()})
        for name, tensor in data["tensors"].items()
    ]
    fused = [Fused(**{key: _tuples(value) for key, value in one.items()}) for one in data["fused"]]
    return Schema(tuple(tensors), data["num_layers"], tuple(data["aliases"].items()), tuple(fused))


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    found = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "name"}
    return {key: value for key, value in found.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
