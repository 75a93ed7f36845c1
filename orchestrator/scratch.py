"""A folder for the files of a Ray cluster that this process starts; Ray itself would leave them behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_PREFIX = "planaria-"


@contextlib.contextmanager
def ray_files() -> Iterator[str]:
    """Ray's files go to the folder that this yields, which is gone after the block."""
    _remove_abandoned()
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp")  # short: socket paths live below it
    os.mkdir(f"{folder}/ray")
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder  # else Ray notes this cluster as the machine's current one
    try:
        yield f"{folder}/ray"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("RAY_TMPDIR")
        if before is not None:
            os.environ["RAY_TMPDIR"] = before


def _remove_abandoned() -> None:
    """Remove the folders of clusters whose process was killed; their Ray processes ended with it."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
