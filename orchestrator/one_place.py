"""All four packages must come from one place: their names are ordinary, and a user may have a folder "workers"."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from orchestrator.environment import PACKAGES


def foreign_package() -> str | None:
    """A sentence about a package of ours that Python would take from elsewhere, or None."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if places == [home / name]:
            continue
        found = f"{places[0]} is in the way" if places else "it is not there"
        return (
            f"package {name!r} must come from {home}, where the rest of Planaria is, but {found}; "
            "rename that folder or start from another one"
        )
    return None
