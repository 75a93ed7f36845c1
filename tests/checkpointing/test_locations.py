"""What a location may look like, and which folder it means."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.storage import LocalStorage, join, open_storage, split


def folder(location: str) -> Path:
    storage = open_storage(location)
    assert isinstance(storage, LocalStorage)
    return storage.folder


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_a_file_uri_means_its_path(name: str) -> None:
    path = Path("/tmp") / name.strip("/.")
    assert folder(path.as_uri()) == path


def test_other_ways_to_write_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert folder("a/b") == tmp_path / "a" / "b"
    assert folder("~/a") == Path("/home/me/a")
    assert folder("./~nobody-here/a") == tmp_path / "~nobody-here" / "a"
    assert split("file:///run") == ("file:///", "run") and folder(split("file:///run")[0]) == Path("/")
    assert join(*split("file:///a/run")) == "file:///a/run"


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("", "a location is empty"),
        (" ", "a location is empty"),
        ("file://out", "is not file:// with an absolute path"),
        ("file://host/out", "is not file:// with an absolute path"),
        ("file://", "is not file:// with an absolute path"),
        ("file:///q?x", "has a '?' or '#'"),
        ("file:///q#y", "has a '?' or '#'"),
        ("file:///q%00y", "has a zero byte"),
        ("~nobody-here/a", "there is no user 'nobody-here'; write ./~nobody-here for a folder of that name"),
    ],
)
def test_what_is_no_location_is_one_sentence(location: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        open_storage(location)
    assert sentence in str(error.value)
