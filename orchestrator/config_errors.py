"""What a user got wrong, as one sentence: the key, the value, what is allowed and the nearest known key."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


class ConfigError(ValueError):
    """One sentence about one key of a job. ``key`` is dotted ("training.max_steps"; "" for the job as a whole)."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key} {problem}".strip())
        self.key = key
        self.problem = problem

    def under(self, prefix: str) -> ConfigError:
        """The same problem seen from the section that holds this one."""
        return ConfigError(".".join(part for part in (prefix, self.key) if part), self.problem)


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Turn pydantic's list of findings into the one that names a key most precisely."""
    findings = [_finding(model, dict(details)) for details in error.errors(include_url=False)]
    return max(findings, key=lambda finding: finding.key.count("."))


def _finding(model: type[BaseModel], details: Mapping[str, Any]) -> ConfigError:
    path, owner, name = _walk(model, details["loc"])
    key = ".".join(path)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.under(key)
    if details["type"] == "extra_forbidden":
        unknown = str(details["loc"][-1])
        return unknown_key(model, ".".join((*path, unknown)), details["input"])
    if details["type"] == "missing":
        return ConfigError(key, "is missing")
    if name is None:
        return ConfigError(key, f"is {details['input']!r}: {cause or details['msg']}")
    return ConfigError(key, f"is {details['input']!r}; allowed: {_allowed(owner, name)}")


def unknown_key(model: type[BaseModel], key: str, value: object) -> ConfigError:
    """``key`` (dotted) is no key of ``model``: name the nearest known one, in the same section first."""
    section, _, name = key.rpartition(".")
    siblings: list[str] = []
    elsewhere: dict[str, str] = {}
    for known in known_keys(model):
        place, _, known_name = known.rpartition(".")
        if place == section:
            siblings.append(known_name)
        elsewhere.setdefault(known_name, known)
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7) or [
        elsewhere[match] for match in difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.7)
    ]
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(siblings)}"
    return ConfigError(key, f"(value {value!r}) is not a known key; {hint}")


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of ``model``, sections before what they hold; not what exists in Python only."""
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        yield prefix + name
        section = _section(field.annotation)
        if section is not None:
            yield from known_keys(section, f"{prefix}{name}.")


def _walk(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel], str | None]:
    """Follow pydantic's location, leaving out its union tags: (path, owning section, field of that section)."""
    path: list[str] = []
    inside: type[BaseModel] | None = model
    owner, name = model, None
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
        elif inside is not None and part in inside.model_fields:
            owner, name = inside, part
            path.append(part)
            inside = _section(inside.model_fields[part].annotation)
    return path, owner, name


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section type inside an annotation such as ``tuple[Group, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _section(argument))), None)


def _allowed(owner: type[BaseModel], name: str) -> str:
    field = owner.model_fields[name]
    bounds = [
        f"{words} {getattr(item, bound)}"
        for item in field.metadata
        for bound, words in _BOUNDS.items()
        if getattr(item, bound, None) is not None
    ]
    return _describe(field.annotation, " and ".join(bounds))


def _describe(annotation: Any, bounds: str = "") -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return ", or ".join(_describe(argument, bounds) for argument in arguments)
    if origin is tuple:
        count = "" if Ellipsis in arguments else f" of {len(arguments)}"
        return f"a list{count}, each {_describe(arguments[0])}"
    if origin is dict:
        return f"a mapping from {_describe(arguments[0])} to {_describe(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    name = _NAMES.get(annotation, str(annotation))
    return f"{name} ({bounds})" if bounds and annotation in (int, float) else name
