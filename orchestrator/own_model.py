"""A user's own model: find its build function, and see that it can travel to workers that may not have its file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from orchestrator.environment import PACKAGES

Build = Callable[[int, int], Any]


def find_build(name: str, folders: Sequence[Path]) -> Build:
    """The function that ``"package.module:build"`` names, looked for in ``folders`` first. Raises ValueError."""
    module_name, _, function = name.partition(":")
    places = [str(folder) for folder in folders]
    before = sys.path[:]
    sys.path[:0] = places
    try:
        build = getattr(importlib.import_module(module_name), function)
    except (Exception, SystemExit) as error:  # it is the user's code that runs
        what = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"model {name!r} cannot be imported from {' or '.join(places)}: {what}") from None
    finally:
        sys.path[:] = before
    if not callable(build):
        raise ValueError(f"model {name!r} is {type(build).__name__}; it must be a function build(vocab_size, seq_len)")
    return build


def send_by_value(build: Build) -> None:
    """Have ``build``'s module, and the user's own modules beside it, pickled whole instead of by name."""
    module = sys.modules.get(build.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or _is_installed(file):
        return
    depth = build.__module__.count(".")
    home = Path(file).resolve().parents[depth]
    for other in list(sys.modules.values()):
        if other is module or _lies_below(other, home):
            ray.cloudpickle.register_pickle_by_value(other)


def _lies_below(module: ModuleType, home: Path) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__.split(".")[0] in PACKAGES or _is_installed(file):
        return False
    return Path(file).resolve().is_relative_to(home) and sys.modules.get(module.__name__) is module


def _is_installed(file: str) -> bool:
    """Whether workers can import it by name."""
    return "site-packages" in file or "dist-packages" in file
