"""All four packages must come from one place: their names are ordinary, and a user may have a folder "workers"."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from orchestrator.environment import PACKAGES

_HOME = Path(__file__).resolve().parent.parent


def foreign_package() -> str | None:
    """A sentence about a package of ours that Python would take from elsewhere in this process, or None."""
    return next((found for name in PACKAGES if (found := _problem(name, importlib.util.find_spec(name)))), None)


def package_in_the_way() -> str | None:
    """The same for the processes that Ray starts: they look into the current folder before anywhere else."""
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(Path.cwd())])
        if spec is not None and spec.origin is not None and (found := _problem(name, spec)):
            return found
    return foreign_package()


def _problem(name: str, spec: ModuleSpec | None) -> str | None:
    place = None if spec is None else next(iter(spec.submodule_search_locations or ()), spec.origin)
    if place is not None and Path(place).resolve() == _HOME / name:
        return None
    found = f"{place} is in the way; rename that or start from another folder" if place else "it is not there"
    return f"package {name!r} must come from {_HOME}, where the rest of Planaria is, but {found}"
