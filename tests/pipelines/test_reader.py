from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from pipelines.batches import BatchBuilder, Cursor, RankBatch
from pipelines.config import DataConfig
from pipelines.corpus import Corpus
from pipelines.reader import Reader

CONFIG = DataConfig(seq_len=16, window_documents=5, eval_fraction=0.1)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def readers(corpus: Corpus, tokenizer_json: str) -> Any:
    """Two readers that build ahead differently."""
    configs = [CONFIG, CONFIG.model_copy(update={"prefetch_steps": 1})]
    made = [Reader(corpus.manifest(), tokenizer_json, config, 7, 0) for config in configs]
    yield made
    for reader in made:
        reader.close()


def test_any_reader_answers_the_same_in_any_order(readers: list[Reader], corpus: Corpus, tokenizer_json: str) -> None:
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, 7, 0)
    cursors = [Cursor()]
    while cursors[-1].epoch < 2:
        cursors.append(builder.batch(cursors[-1]).next)
    one, other = readers
    assert one.ready([0, 0, 0]) and other.ready()
    backwards = {cursor: other.batch(cursor.to_list(), 2, 1, 2) for cursor in reversed(cursors)}
    for cursor in cursors:
        answer = one.batch(cursor.to_list(), 2, 1, 2)
        assert equal(answer, backwards[cursor])
        assert equal(answer, builder.batch(cursor).for_rank(2, 1, 2).to_dict())
    assert equal(one.eval_batch(9, 3, 2, 2), other.eval_batch(9, 3, 2, 2))


def test_ranks_that_ask_at_once_share_one_build(readers: list[Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Cursor] = []
    batch = BatchBuilder.batch

    def counting(self: BatchBuilder, cursor: Cursor) -> Any:
        built.append(cursor)
        return batch(self, cursor)

    monkeypatch.setattr(BatchBuilder, "batch", counting)
    num_ranks, num_steps = 5, 12
    together = Barrier(num_ranks)

    def rank(number: int) -> list[str]:
        cursor, digests = Cursor(), []
        for _ in range(num_steps):
            together.wait()
            answer = RankBatch.from_dict(readers[0].batch(cursor.to_list(), num_ranks, number, 1))
            digests.append(answer.digest)
            cursor = answer.next
        return digests

    with ThreadPoolExecutor(num_ranks) as pool:
        digests = list(pool.map(rank, range(num_ranks)))
    assert all(seen == digests[0] for seen in digests) and len(set(digests[0])) == num_steps
    assert len(built) == len(set(built)) <= num_steps + CONFIG.prefetch_steps


def test_errors_reach_the_request_and_end_nothing(tmp_path: Path, tokenizer_json: str) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 30)
    reader = Reader(Corpus.open(str(tmp_path)).manifest(), tokenizer_json, CONFIG, 4, 0)
    with pytest.raises(ValueError, match="not in this global order"):
        reader.batch([0, 99, 0], 1, 0, 1)
    texts = {file: file.read_text() for file in tmp_path.iterdir()}
    for file in texts:
        file.write_text("other")
    with pytest.raises(ValueError, match=r"\d.txt' has changed"):
        reader.batch([0, 0, 0], 1, 0, 1)
    for file, text in texts.items():
        file.write_text(text)
    assert reader.batch([0, 0, 0], 1, 0, 1)["cursor"] == [0, 0, 0]
    reader.close()
