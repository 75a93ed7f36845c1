"""Writes docs/configuration.md from the configuration itself: ``python docs/configuration.py``."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orchestrator.config import TUNING_KEYS, JobConfig

_HEAD = """# Configuration

Every key of a job, made from the code by `python docs/configuration.py` (a test compares). A job is a YAML file or a
`JobConfig` in Python, and `--set training.max_steps=50` sets any key. An unknown key, a wrong type or an impossible
value is one sentence that names the key, the value, what is allowed and the nearest known key.

Keys marked **t** may change when a run is taken up again. All others decide what is computed: a folder that holds a run
with other values is refused with the keys that differ. `RunConfig.callbacks` exists in Python only.
"""
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
_LIMITS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with its dotted prefix, outer ones first."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for section in sections_in(field.annotation):
            yield from sections(section, f"{prefix}{name}.")


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section types inside an annotation such as ``tuple[Group, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in sections_in(part)]


def type_text(annotation: Any) -> str:
    """An annotation in words: ``int | tuple[int, int]`` is "whole number or [whole number, whole number]"."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, parts))
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {type_text(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_text, parts))}]"
    if origin is dict:
        return "mapping"
    return "section" if sections_in(annotation) else _PLAIN[annotation]


def row(key: str, field: Any) -> str:
    """One line of a section's table."""
    limits = [
        f"{sign} {getattr(rule, name):g}" for rule in field.metadata for name, sign in _LIMITS if hasattr(rule, name)
    ]
    default = field.default if isinstance(field.default, (str, BaseModel)) else json.dumps(field.default)
    default = "" if isinstance(default, BaseModel) else f"`{default}`"
    tuning = "**t**" if any(f"{key}.".startswith(f"{tuned}.") for tuned in TUNING_KEYS) else ""
    about = " ".join(part for part in (tuning, field.description) if part)
    return f"| `{key}` | {', '.join([type_text(field.annotation), *limits])} | {default} | {about} |"


def markdown() -> str:
    parts, seen = [_HEAD], set()
    for prefix, model in sections(JobConfig):
        if model in seen:
            continue
        seen.add(model)
        about = " ".join((model.__doc__ or "").replace("``", "`").split())
        rows = [row(prefix + name, field) for name, field in model.model_fields.items() if not field.exclude]
        table = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"## {prefix.rstrip('.') or 'A job'}\n\n{about}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(markdown(), encoding="utf-8")
