"""A small corpus with a prime number of ragged documents, and a tokenizer trained on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipelines.corpus import Corpus
from pipelines.tokenizer import train

NUM_DOCUMENTS = 23


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    chance = random.Random(5)
    words = [
        "a",
        "worm",
        "cut",
        "in",
        "half",
        "grows",
        "whole",
        "again",
        "from",
        "any",
        "piece",
        "über",
        "ночь",
        "再生",
    ]
    for number in range(NUM_DOCUMENTS):
        num_words = chance.choice([1, 2, 5, 20, 60, 200])
        (folder / f"{number:02}.txt").write_text(" ".join([str(number), *chance.choices(words, k=num_words)]))
    return folder


@pytest.fixture(scope="session")
def corpus(text_folder: Path) -> Corpus:
    return Corpus.open(str(text_folder))


@pytest.fixture(scope="session")
def tokenizer_json(corpus: Corpus) -> str:
    return train(corpus, 300)
