from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.batches import Batch, BatchBuilder, Cursor, RankBatch, deal_rows, num_micro_batches
from pipelines.config import DataConfig
from pipelines.corpus import Corpus
from pipelines.packing import IGNORED, PADDING, Rows
from pipelines.tokenizer import encode, load, train

SEQ_LEN = 16
CONFIG = DataConfig(seq_len=SEQ_LEN, window_documents=5, eval_fraction=0.1)
quick = settings(max_examples=25, deadline=None)

Chunks = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def run(builder: BatchBuilder, until: Cursor, cursor: Cursor = Cursor()) -> list[Batch]:  # noqa: B008
    batches = []
    while cursor < until:
        batches.append(builder.batch(cursor))
        cursor = batches[-1].next
    return batches


def same(one: Rows | RankBatch, other: Rows | RankBatch) -> bool:
    names = ("tokens", "targets", "positions", "segments")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def chunks_of_documents(corpus: Corpus, documents: tuple[int, ...], tokenizer_json: str) -> Chunks:
    chunks: Chunks = Counter()
    for ids in encode(load(tokenizer_json), [corpus.read(index) for index in documents]):
        tokens = ids.tolist()
        targets = [*tokens[1:], IGNORED]
        for start in range(0, len(tokens), SEQ_LEN):
            chunks[tuple(tokens[start : start + SEQ_LEN]), tuple(targets[start : start + SEQ_LEN])] += 1
    return chunks


def chunks_of_row(rows: Rows, row: int) -> Chunks:
    chunks: Chunks = Counter()
    for segment in range(rows.segments[row].max() + 1):
        there = rows.segments[row] == segment
        chunks[tuple(rows.tokens[row][there].tolist()), tuple(rows.targets[row][there].tolist())] += 1
    return chunks


@quick
@given(
    num_documents=st.integers(1, 23),
    window_documents=st.integers(1, 30),
    global_rows=st.integers(1, 50),
    eval_fraction=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_every_epoch_has_every_chunk_exactly_once(
    corpus: Corpus,
    tokenizer_json: str,
    num_documents: int,
    window_documents: int,
    global_rows: int,
    eval_fraction: float,
    seed: int,
) -> None:
    part = Corpus(corpus.roots, corpus.documents[:num_documents])
    config = DataConfig(seq_len=SEQ_LEN, window_documents=window_documents, eval_fraction=eval_fraction)
    batches = run(BatchBuilder(part, tokenizer_json, config, global_rows, seed), Cursor(epoch=2))
    found: dict[int, Chunks] = {0: Counter(), 1: Counter()}
    samples: list[Cursor] = []
    for batch in batches:
        assert len(batch.rows) == len(batch.samples) == global_rows
        assert batch.num_valid == int((batch.rows.targets != -100).sum())
        assert batch.samples[0] == batch.cursor
        samples += batch.samples
        for row, sample in enumerate(batch.samples):
            if sample.epoch in found:
                found[sample.epoch] += chunks_of_row(batch.rows, row)
    expected = chunks_of_documents(part, part.split(eval_fraction)[0], tokenizer_json)
    assert found == {0: expected, 1: expected}
    assert samples == sorted(set(samples))
    assert [batch.next for batch in batches[:-1]] == [batch.cursor for batch in batches[1:]]


@quick
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3))
def test_the_number_of_rows_per_batch_does_not_change_the_order(
    corpus: Corpus, tokenizer_json: str, one: int, other: int, seed: int
) -> None:
    def rows(global_rows: int) -> np.ndarray:
        batches = run(BatchBuilder(corpus, tokenizer_json, CONFIG, global_rows, seed), Cursor(epoch=1, window=1))
        return np.concatenate([batch.rows.tokens for batch in batches])

    left, right = rows(one), rows(other)
    length = min(len(left), len(right))
    assert length > 40 and np.array_equal(left[:length], right[:length])


def test_resuming_at_every_step_is_the_straight_run(corpus: Corpus, tokenizer_json: str) -> None:
    straight = run(BatchBuilder(corpus, tokenizer_json, CONFIG, 7, 3), Cursor(epoch=2))
    assert len(straight) > 20
    for step, expected in enumerate(straight):
        fresh = BatchBuilder(corpus, tokenizer_json, CONFIG, 7, 3)
        cursor = Cursor.from_list(expected.cursor.to_list())
        for batch, right in zip(run(fresh, Cursor(epoch=2), cursor)[:3], straight[step:], strict=False):
            assert (batch.digest, batch.next, batch.num_valid) == (right.digest, right.next, right.num_valid)
            assert same(batch.rows, right.rows)


@quick
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6), st.integers(0, 3))
def test_any_number_of_ranks_gets_the_same_rows(
    corpus: Corpus, tokenizer_json: str, global_rows: int, data_size: int, micro_batch_rows: int, step: int
) -> None:
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, global_rows, 0)
    batch = run(builder, Cursor(epoch=3))[step]
    parts = [batch.for_rank(data_size, rank, micro_batch_rows) for rank in range(data_size)]
    num_rows = num_micro_batches(global_rows, data_size, micro_batch_rows) * micro_batch_rows
    for part in parts:
        assert part.tokens.shape == (num_rows, SEQ_LEN)
        assert (part.digest, part.num_valid, part.next) == (batch.digest, batch.num_valid, batch.next)
        assert (part.targets[part.segments == PADDING] == IGNORED).all() and part.tokens.min() >= 0
    assert sum(int((part.targets != IGNORED).sum()) for part in parts) == batch.num_valid
    for name in ("tokens", "targets", "positions", "segments"):
        real = [getattr(part, name)[(part.segments != PADDING).any(axis=1)] for part in parts]
        assert np.array_equal(np.concatenate(real), getattr(batch.rows, name))
    again = RankBatch.from_dict(parts[-1].to_dict())
    assert same(again, parts[-1]) and again.next == batch.next and again.tokens.flags.writeable


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 9))
def test_rows_are_dealt_evenly(num_rows: int, data_size: int, micro_batch_rows: int) -> None:
    shares = [deal_rows(num_rows, data_size, rank) for rank in range(data_size)]
    assert [row for share in shares for row in share] == list(range(num_rows))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    needed = num_micro_batches(num_rows, data_size, micro_batch_rows)
    assert needed * micro_batch_rows >= sizes[0] > (needed - 1) * micro_batch_rows or num_rows == needed == 0


def test_what_changes_the_digest(corpus: Corpus, tokenizer_json: str) -> None:
    def digest(seed: int = 0, cursor: Cursor = Cursor(), **changes: int) -> str:  # noqa: B008
        config = CONFIG.model_copy(update=changes)
        return BatchBuilder(corpus, tokenizer_json, config, 4, seed).batch(cursor).digest

    others = [digest(seed=1), digest(cursor=Cursor(1)), digest(cursor=Cursor(0, 0, 1)), digest(seq_len=17)]
    assert len({digest(), *others}) == 5
    assert digest(prefetch_steps=9, num_readers=5) == digest()


def test_epochs_have_different_orders(corpus: Corpus, tokenizer_json: str) -> None:
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, 40, 0)
    assert not np.array_equal(builder.batch(Cursor(0)).rows.tokens, builder.batch(Cursor(1)).rows.tokens)


def test_windows_are_built_once(corpus: Corpus, tokenizer_json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads: Counter[int] = Counter()
    read = Corpus.read

    def counting(self: Corpus, index: int) -> str:
        num_reads[index] += 1
        return read(self, index)

    monkeypatch.setattr(Corpus, "read", counting)
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, 3, 0)
    cursor = Cursor()
    while cursor.window < 3:  # of five
        batch = builder.batch(cursor)
        builder.build_window_after(cursor)
        cursor = batch.next
    assert len(num_reads) >= 4 * CONFIG.window_documents and set(num_reads.values()) == {1}


def test_cursors_of_another_order_are_refused(corpus: Corpus, tokenizer_json: str) -> None:
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, 3, 0)
    for cursor in (Cursor(0, 5, 0), Cursor(0, 0, 9999), Cursor(0, 0, -1), Cursor(-1, 0, 0)):
        with pytest.raises(ValueError, match="not in this global order"):
            builder.batch(cursor)


def test_evaluation_rows_are_held_out_and_fixed(corpus: Corpus, tokenizer_json: str) -> None:
    builders = [BatchBuilder(corpus, tokenizer_json, CONFIG, rows, seed) for rows, seed in ((3, 0), (8, 1))]
    one, other = (builder.eval_batch(500) for builder in builders)
    assert same(one.rows, other.rows) and one.digest == other.digest
    found: Chunks = Counter()
    for row in range(len(one.samples)):
        found += chunks_of_row(one.rows, row)
    assert found == chunks_of_documents(corpus, corpus.split(0.1)[1], tokenizer_json)
    assert len(one.rows) == 500 > len(one.samples)
    assert (one.rows.targets[len(one.samples) :] == IGNORED).all()
    assert same(builders[0].eval_batch(2).rows, one.rows[:2])
    nothing = BatchBuilder(corpus, tokenizer_json, CONFIG.model_copy(update={"eval_fraction": 0.0}), 3, 0)
    with pytest.raises(ValueError, match="nothing is held out"):
        nothing.eval_batch(1)


def test_padding_on_the_standard_library() -> None:
    corpus = Corpus.open("stdlib")
    tokenizer_json = train(Corpus(corpus.roots, corpus.documents[::20]), 1024)
    batches = run(BatchBuilder(corpus, tokenizer_json, DataConfig(), 256, 0), Cursor(window=2))
    segments = np.concatenate([batch.rows.segments for batch in batches])
    share = float((segments == PADDING).mean())
    print(f"padding on the standard library: {share:.3%} of {segments.size} tokens")
    assert share < 0.005
