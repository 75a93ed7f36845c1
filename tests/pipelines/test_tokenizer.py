from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.corpus import Corpus
from pipelines.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, cache_folder, encode, load, train, train_or_load

PROCESS = """
import sys
from pipelines.corpus import Corpus
from pipelines.tokenizer import train_or_load
sys.stdout.write(train_or_load(Corpus.open(sys.argv[1]), 320))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


def test_goes_there_and_back(corpus: Corpus, tokenizer_json: str) -> None:
    tokenizer = load(tokenizer_json)
    texts = [corpus.read(index) for index in range(len(corpus))] + ["", "\r\n\t 🐛"]
    for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
        assert ids[-1] == END_OF_TEXT_ID and END_OF_TEXT_ID not in ids[:-1]
        assert tokenizer.decode(list(ids[:-1])) == text


def test_a_special_token_in_a_text_is_text(tokenizer_json: str) -> None:
    (ids,) = encode(load(tokenizer_json), [f"a {END_OF_TEXT} b"])
    assert list(ids).count(END_OF_TEXT_ID) == 1


def test_a_small_corpus_does_not_reach_the_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a")
    tokenizer = load(train(Corpus.open(str(tmp_path)), 5000))
    assert tokenizer.get_vocab_size() == 257
    assert max(map(max, encode(tokenizer, ["any other text"]))) < 257


def test_is_cached_by_content(corpus: Corpus, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_or_load(corpus, 310)
    (file,) = cache.iterdir()
    train_or_load(corpus, 311)
    train_or_load(Corpus(corpus.roots, corpus.documents[:-1]), 310)
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr("pipelines.tokenizer.train", lambda *_: pytest.fail("trained again"))
    assert train_or_load(corpus, 310) == first
    monkeypatch.undo()
    content = file.read_bytes()
    for broken in (content[:-100], content[:-1] + b" ", b"", b"\xff"):
        file.write_bytes(broken)
        assert train_or_load(corpus, 310) == first


def test_a_cache_that_cannot_be_written_is_done_without(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert train_or_load(corpus, 310) == train(corpus, 310)


def test_processes_at_once_with_and_without_threads_agree(text_folder: Path, tmp_path: Path) -> None:
    def begin(cache: str, threads: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache), "TOKENIZERS_PARALLELISM": threads}
        command = [sys.executable, "-c", PROCESS, str(text_folder)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)

    processes = [begin("shared", "true"), begin("shared", "true"), begin("alone", "false")]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1 and b"endoftext" in answers.pop()
    assert len(list((tmp_path / "shared" / "planaria" / "tokenizers").iterdir())) == 1
