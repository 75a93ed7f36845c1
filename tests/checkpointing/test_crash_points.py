"""kill -9 at every write, fsync, rename and PUT of a save and of the removal after it: the newest checkpoint loads."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpointing import durable, s3
from checkpointing.config import CheckpointConfig
from checkpointing.layout import Layout
from checkpointing.publish import step_of
from checkpointing.retention import retain
from checkpointing.storage import LocalStorage, open_storage
from tests.checkpointing.faults import Faults, Stopped, kill
from tests.checkpointing.node_keepers import save_checkpoint
from tests.checkpointing.test_durable import load
from tests.object_server import ObjectServer

KEEP_ONE = CheckpointConfig(num_to_keep=1)
TWO = Layout.parse("dp2")


def save_and_thin_out(directory: str, step: int) -> None:
    save_checkpoint(directory, step, TWO, names="ab")
    retain(directory, KEEP_ONE, dict)


def save_and_be_killed(directory: str, at: int) -> None:
    """What the child process of the test below does."""
    s3._PARTS_FROM_NBYTES = 0
    with Faults(at, kill).injected():
        save_and_thin_out(directory, 2)


def assert_nothing_is_lost(directory: str) -> int:
    """After the stop: a new process finds a whole checkpoint; its first save leaves nothing of the dead one."""
    found, problems = durable.newest_verified(directory)
    assert found is not None and problems == ()
    load(found, Layout.parse("dp3"), step_of(found))
    save_and_thin_out(directory, 3)
    storage = open_storage(directory)
    hidden = list(storage.folder.glob(".*")) if isinstance(storage, LocalStorage) else []
    if not isinstance(storage, LocalStorage):
        assert storage._listed_uploads("") == []
    assert {name.partition("/")[0] for name in storage.sizes("")} == {"step-00000003"} and not hidden
    return step_of(found)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.setattr(s3, "_PARTS_FROM_NBYTES", 0)  # every file goes up in parts, or rather in one
    if request.param == "s3":
        server: ObjectServer = request.getfixturevalue("object_server")
        return lambda: server.url(f"crash-{secrets.token_hex(4)}")
    return lambda: str(tmp_path / secrets.token_hex(4))


def points_of_a_save(directory: str) -> list[str]:
    save_and_thin_out(directory, 1)
    faults = Faults()
    with faults.injected():
        save_and_thin_out(directory, 2)
    return faults.names


def test_a_stop_at_any_point(place: Callable[[], str], prove: bool, request: pytest.FixtureRequest) -> None:
    """Every point under `make prove`, otherwise a seeded sample of them, with both ends."""
    num_points = len(points_of_a_save(place()))
    assert num_points > 30
    every = range(1, num_points + 1)
    sampled = np.random.default_rng(0).choice(every, 5 if "s3" in request.node.name else 25, replace=False)
    reached = set()
    for at in every if prove else sorted({1, num_points, *map(int, sampled)}):
        directory = place()
        save_and_thin_out(directory, 1)
        with pytest.raises(Stopped), Faults(at).injected():
            save_and_thin_out(directory, 2)
        reached.add(assert_nothing_is_lost(directory))
    assert reached == {1, 2}


def test_kill_9_at_some_points(place: Callable[[], str], prove: bool) -> None:
    """The same with a real process and a real signal."""
    num_points = len(points_of_a_save(place()))
    for at in np.random.default_rng(1).choice(range(1, num_points + 1), 12 if prove else 2, replace=False):
        directory = place()
        save_and_thin_out(directory, 1)
        code = f"from {__name__} import save_and_be_killed; save_and_be_killed({directory!r}, {at})"
        code = code.replace(__name__, "tests.checkpointing.test_crash_points")
        killed = subprocess.run([sys.executable, "-c", code], cwd=Path.cwd())
        assert killed.returncode == -signal.SIGKILL
        assert_nothing_is_lost(directory)
