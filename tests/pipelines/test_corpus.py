from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import DataConfig
from pipelines.corpus import MAX_DOCUMENT_BYTES, Corpus, _cut


def test_stdlib_is_this_python_s_and_goes_through_a_manifest() -> None:
    corpus = Corpus.open("stdlib")
    paths = [document.path for document in corpus.documents]
    assert {"os.py", "json/decoder.py"} <= set(paths)
    assert paths == sorted(paths)
    assert not any(name in path for path in paths for name in ("site-packages", "dist-packages", "__pycache__"))
    there = Corpus.from_manifest(corpus.manifest())
    assert there == corpus and there.fingerprint == corpus.fingerprint
    assert there.read(paths.index("os.py")) == Path(os.__file__).read_bytes().decode()[:MAX_DOCUMENT_BYTES]


def test_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "b" / ".git").mkdir(parents=True)
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "b" / "empty").touch()
    (tmp_path / "b" / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "a").mkdir()
    (tmp_path / "b" / "a" / "one.md").write_text("één")
    (tmp_path / "three.txt").write_text("three")
    corpus = Corpus.open((str(tmp_path / "b"), str(tmp_path / "three.txt")))
    assert [corpus.read(index) for index in range(len(corpus))] == ["één", "two", "three"]
    assert len(Corpus.open((str(tmp_path / "three.txt"), str(tmp_path)))) == 3  # named twice, there once


def test_where_the_folder_lies_does_not_matter(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.txt").write_text("x")
    here, there = Corpus.open(str(tmp_path / "here")), Corpus.open(str(tmp_path / "there"))
    assert here.fingerprint == there.fingerprint
    (tmp_path / "there" / "x.txt").write_text("y")
    assert Corpus.open(str(tmp_path / "there")).fingerprint != here.fingerprint


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_what_cannot_be_used_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    sources = {
        str(tmp_path / "none.txt"): "neither a file nor a folder",
        write(tmp_path / "empty.txt", b""): "is empty",
        write(tmp_path / "binary.bin", b"a\0b"): "is not text",
        write(tmp_path / "latin.txt", "é".encode("latin-1")): "is not UTF-8 text",
        str(bad): "holds no text",
    }
    for source, words in sources.items():
        with pytest.raises(ValueError, match=words) as refusal:
            Corpus.open(source)
        assert source in str(refusal.value) and "\n" not in str(refusal.value)
    write(bad / "latin.txt", "né".encode("latin-1"))
    with pytest.raises(ValueError, match="bad/latin.txt' is not UTF-8"):
        Corpus.open(str(bad))
    with pytest.raises(ValueError, match="names no source"):
        Corpus.open(())
    for empty in ("", ("", str(bad))):
        with pytest.raises(ValueError, match="data.text is empty"):
            Corpus.open(empty)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # file modes do not stop root
    with pytest.raises(ValueError, match="cannot read '.*secret.txt'"):
        Corpus.open(str(tmp_path))


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("before")
    corpus = Corpus.open(str(tmp_path))
    manifest = corpus.manifest()
    file.write_text("beyond")
    with pytest.raises(ValueError, match="x.txt' has changed"):
        Corpus.from_manifest(manifest).read(0)
    file.write_text("longer now")
    with pytest.raises(ValueError, match="x.txt' has 10 bytes on this node, but 6"):
        Corpus.from_manifest(manifest)
    file.unlink()
    with pytest.raises(ValueError, match="cannot read '.*x.txt'"):
        corpus.read(0)
    with pytest.raises(ValueError, match="cannot read '.*x.txt' on this node"):
        Corpus.from_manifest(manifest)


def test_a_long_file_is_several_documents(tmp_path: Path) -> None:
    text = "".join(f"line {number} ünïcode\n" for number in range(20_000))
    file = tmp_path / "long.txt"
    file.write_text(text)
    corpus = Corpus.open(str(file))
    pieces = [corpus.read(index) for index in range(len(corpus))]
    assert len(pieces) > 3 and "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    train, held_out = corpus.split(0.02)
    assert held_out and train


@given(st.text("aé再😀\n", max_size=60))
def test_cuts_fall_between_characters(line: str) -> None:
    content = ("再" * (MAX_DOCUMENT_BYTES // 3 - 20) + line + "😀" * 30).encode()
    stop = _cut(content, 0)
    assert 0 < stop <= min(len(content), MAX_DOCUMENT_BYTES)
    assert content[:stop].decode() + content[stop:].decode() == content.decode()


def test_split(corpus: Corpus) -> None:
    train, held_out = corpus.split(0.2)
    assert len(held_out) == 5 and sorted(train + held_out) == list(range(len(corpus)))
    assert corpus.split(0.2) == (train, held_out)
    assert corpus.split(0) == (tuple(range(len(corpus))), ())
    assert len(corpus.split(0.001)[1]) == 1
    assert len(corpus.split(0.999)[0]) == 1
    one = Corpus(corpus.roots, corpus.documents[:1])
    assert one.split(0.5) == ((0,), ())


def test_config_takes_lists_from_yaml() -> None:
    assert DataConfig.model_validate({"text": ["a", "b"]}).text == ("a", "b")


def test_neither_torch_nor_ray_is_imported() -> None:
    code = "import sys, pipelines.reader, pipelines.client; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
