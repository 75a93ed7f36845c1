"""Several writers in one folder: none removes what another one writes, and one of a step's becomes a checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpointing.difference import differences
from checkpointing.durable import checkpoint_holdings, verify
from checkpointing.layout import Layout
from checkpointing.publish import begin, list_checkpoints
from checkpointing.rewrite import rewrite, write_state
from checkpointing.schema import Piece
from checkpointing.storage import open_storage
from tests.checkpointing.node_keepers import TINY, cut, random_reference, save_checkpoint

Place = Callable[[], str]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        server = request.getfixturevalue("object_server")
        return lambda: server.url(f"rivals-{secrets.token_hex(4)}")
    return lambda: str(tmp_path / secrets.token_hex(4) / "deep")


def write(directory: str, source: str, rival: Callable[[], object]) -> str:
    """Another state of the step of ``source``; ``rival`` is at work while it is written."""
    state, done = random_reference(TINY, 99), []

    def read(boxes: Sequence[Piece]) -> list[np.ndarray]:
        if not done:
            done.append(rival())
        return [np.ascontiguousarray(cut(state, box)) for box in boxes]

    return write_state(directory, TINY, checkpoint_holdings(source)[0].snapshot, read)


def test_the_second_of_two_writers_says_that_it_was_second(place: Place, tmp_path: Path) -> None:
    source, target = save_checkpoint(str(tmp_path / "source"), 4, Layout(dp=2)), place()
    with pytest.raises(FileExistsError, match="step-00000004.* was written by somebody else just now"):
        write(target, source, lambda: rewrite(source, target, Layout(tp=2)))
    (there,) = list_checkpoints(target)
    assert verify(there, deep=True) == () and list(differences(there, source, None)) == []
    assert all(name.startswith("step-00000004/") for name in open_storage(target).sizes(""))


def test_a_writer_leaves_the_attempts_of_others_alone(place: Place, tmp_path: Path) -> None:
    source, target = save_checkpoint(str(tmp_path / "source"), 4, Layout(dp=2)), place()
    other = begin(target, 9)
    open_storage(other.url).write("data/half", b"half")
    rewrite(source, target, Layout(tp=2))
    assert open_storage(other.url).read("data/half") == b"half"


def test_a_writer_that_fails_leaves_nothing_but_what_was_there(place: Place, tmp_path: Path) -> None:
    source, target = save_checkpoint(str(tmp_path / "source"), 4, Layout(dp=2)), place()

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(target, source, fail)
    assert open_storage(target).sizes("") == {} and not Path(target).parent.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write(str(tmp_path / "empty"), source, fail)
    assert list((tmp_path / "empty").iterdir()) == []


def test_too_many_ranks_are_refused_at_once(tmp_path: Path) -> None:
    source = save_checkpoint(str(tmp_path / "source"), 4, Layout())
    with pytest.raises(ValueError, match="has 999999999 workers; a checkpoint is written for at most 4096"):
        rewrite(source, str(tmp_path / "target"), Layout.parse("r999999999"))
    assert not (tmp_path / "target").exists()
