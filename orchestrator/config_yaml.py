"""YAML in and out, and ``--set a.b=c``.

PyYAML reads YAML 1.1, where ``1e-3`` is text; people who write learning rates mean a number. The loader and the dumper
here share YAML 1.2's idea of a float, so that what is printed is read back as the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from orchestrator.config_errors import ConfigError

_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-3 as a number and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ConfigError(str(key), "is not text; keys of a job are text")
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(str(key), f"is given twice (line {node.start_mark.line + 1} onwards)")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that escapes what YAML takes for line breaks (PyYAML writes them plain and reads them as spaces)."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """Read one YAML document. Raises ConfigError with the line when it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"in line {mark.line + 1}" if mark else "somewhere"
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError("", f"this is not YAML: {problem} {where}") from None
    except RecursionError:
        raise ConfigError("", "this YAML is nested too deeply") from None


def dump_yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with each ``a.b=value`` (value in YAML) set. Missing and null sections are made."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError("", f"--set {override}: write it as key=value, for example training.max_steps=100")
        data = _with(data, key.split("."), load_yaml(text), key)
    return data


def _with(node: Any, path: list[str], value: Any, key: str) -> Any:
    if not path:
        return value
    if node is None:
        node = {}
    if isinstance(node, (list, tuple)) and path[0].isdigit() and int(path[0]) < len(node):
        index = int(path[0])
        return [*node[:index], _with(node[index], path[1:], value, key), *node[index + 1 :]]
    if not isinstance(node, dict):
        raise ConfigError(key, f"cannot be set: what holds {path[0]!r} is {node!r}, not a mapping")
    return {**node, path[0]: _with(node.get(path[0]), path[1:], value, key)}
