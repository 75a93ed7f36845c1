"""Ray Train's own configuration dataclasses, read without importing ``ray.train`` (which takes seconds)."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel

from orchestrator.config_errors import ConfigError


def from_ray(value: object, name: str, section: type[BaseModel]) -> object:
    """A dict for ``section`` when ``value`` is Ray's dataclass called ``name``, else ``value`` itself.

    What is set away from Ray's default is taken over; a field left at Ray's default takes ours. Raises ConfigError for
    a field that is set and that we do not have.
    """
    kind = type(value)
    if kind.__name__ != name or not kind.__module__.startswith("ray.") or not dataclasses.is_dataclass(value):
        return value
    untouched = kind()
    taken: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        if setting == getattr(untouched, field.name):
            continue
        if field.name not in section.model_fields:
            raise ConfigError(field.name, f"is {setting!r} in ray.train.{name}; Planaria has no such setting")
        taken[field.name] = setting
    return taken
