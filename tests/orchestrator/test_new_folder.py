"""A folder for others is there whole or not at all: after a failure, and with a rival."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.storage import open_storage
from orchestrator.new_folder import new_folder
from tests.object_server import ObjectServer


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nothing is yet."""
    if request.param == "local":
        return str(tmp_path / "deep" / "er" / "new")
    server: ObjectServer = request.getfixturevalue("object_server")
    return server.url(f"new-folder/{tmp_path.name}")


def test_it_is_there_when_all_is_written(place: str, tmp_path: Path) -> None:
    with new_folder(place) as storage:
        storage.write("a", b"1")
        storage.write("b/c", b"22")
        assert "a" not in open_storage(place).sizes("") or "unfinished" in open_storage(place).sizes("")
    assert open_storage(place).sizes("") == {"a": 1, "b/c": 2}
    assert not list(tmp_path.rglob("*.tmp"))


def test_nothing_is_left_of_one_that_failed_and_it_can_be_made_again(place: str, tmp_path: Path) -> None:
    for error in (OSError("full"), KeyboardInterrupt()):
        with pytest.raises(type(error)), new_folder(place) as storage:
            storage.write("a", b"1")
            raise error
        assert not open_storage(place).sizes("") and not list(tmp_path.iterdir())
    with new_folder(place) as storage:
        storage.write("b", b"22")
    assert open_storage(place).sizes("") == {"b": 2}


def test_of_two_at_once_one_is_there_and_the_other_is_told(place: str, tmp_path: Path) -> None:
    written = []
    with pytest.raises(ValueError, match="is not empty; choose a new folder"), new_folder(place) as first:
        first.write("a", b"1")
        with new_folder(place) as second:  # on object storage this one is refused, else the other
            second.write("b", b"22")
            written.append("b")
        first.write("c", b"333")
    left = open_storage(place).sizes("")
    assert left == ({"b": 2} if written else {})
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_is_there_stays(place: str, tmp_path: Path) -> None:
    open_storage(place).write("theirs", b"1")
    with pytest.raises(ValueError, match="is not empty"), new_folder(place):
        pytest.fail("not reached")
    assert open_storage(place).sizes("") == {"theirs": 1}


def test_an_empty_folder_a_link_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("far/away")
    for name in ("empty", "link"):
        with new_folder(str(tmp_path / name)) as storage:
            storage.write("a", b"1")
        assert (tmp_path / name / "a").read_bytes() == b"1"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "far" / "away" / "a").exists()
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(ValueError, match="file is not empty"), new_folder(str(tmp_path / "file")):
        pytest.fail("not reached")
    assert (tmp_path / "file").read_bytes() == b"1"
