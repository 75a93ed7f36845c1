"""What a run was made with: versions and a digest of our own code. No names, no secrets."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("checkpointing", "orchestrator", "pipelines", "workers")
_DISTRIBUTIONS = ("planaria", "ray", "torch", "numpy", "pyarrow", "pydantic", "tokenizers", "safetensors", "xxhash")


def describe_environment(seed: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name))},
        "code_digest": code_digest(),
        "seed": seed,
    }


def code_digest() -> str:
    """Hash (32 hex digits) of the source files of the four packages, wherever they are installed."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
