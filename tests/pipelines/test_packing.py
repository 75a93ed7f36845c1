from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.packing import IGNORED, PADDING, Rows, best_fit, pack

lengths = st.lists(st.integers(1, 90), min_size=1, max_size=40)


def documents_of(sizes: list[int]) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that each can be followed."""
    stops = np.cumsum(sizes)
    return [np.arange(stop - size + 1, stop + 1, dtype=np.int32) for stop, size in zip(stops, sizes, strict=True)]


def pieces_of(rows: Rows) -> list[dict[str, np.ndarray]]:
    """The chunks of packed rows, by segment number."""
    pieces = []
    for row in range(len(rows)):
        for segment in range(rows.segments[row].max() + 1):
            there = rows.segments[row] == segment
            names = ("tokens", "targets", "positions")
            pieces.append({name: getattr(rows, name)[row][there] for name in names})
    return pieces


@given(lengths, st.integers(8, 32), st.integers(0, 2**64 - 1))
def test_every_token_is_an_input_once_and_predicted_once_but_for_the_first(
    sizes: list[int], seq_len: int, key: int
) -> None:
    documents = documents_of(sizes)
    rows = pack(documents, seq_len, key)
    inputs = rows.tokens[rows.segments != PADDING]
    assert sorted(inputs) == list(range(1, sum(sizes) + 1))
    firsts = {int(document[0]) for document in documents}
    predicted = rows.targets[rows.targets != IGNORED]
    assert sorted(predicted) == [token for token in range(1, sum(sizes) + 1) if token not in firsts]
    assert rows.num_valid == len(predicted)


@given(lengths, st.integers(8, 32), st.integers(0, 2**64 - 1))
def test_chunks_are_the_documents_cut_at_seq_len(sizes: list[int], seq_len: int, key: int) -> None:
    expected: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for document in documents_of(sizes):
        tokens = [int(token) for token in document]
        pairs = list(zip(tokens, [*tokens[1:], IGNORED], strict=True))
        for start in range(0, len(pairs), seq_len):
            expected[tuple(zip(*pairs[start : start + seq_len], strict=True))] += 1  # type: ignore[index]
    found = pieces_of(pack(documents_of(sizes), seq_len, key))
    assert Counter((tuple(map(int, p["tokens"])), tuple(map(int, p["targets"]))) for p in found) == expected
    for piece in found:
        assert list(piece["positions"]) == list(range(len(piece["tokens"])))


@given(lengths, st.integers(8, 32))
def test_padding_predicts_nothing_and_lies_behind(sizes: list[int], seq_len: int) -> None:
    rows = pack(documents_of(sizes), seq_len, 0)
    padding = rows.segments == PADDING
    assert (rows.targets[padding] == IGNORED).all()
    assert (rows.tokens[padding] == 0).all()
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()
    for array in (rows.tokens, rows.targets, rows.positions, rows.segments):
        assert array.dtype == np.int32 and array.shape == (len(rows), seq_len)


def slow_best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [b for b in bins if sum(sizes[i] for i in b) + sizes[item] <= capacity]
        if fitting:
            max(fitting, key=lambda b: sum(sizes[i] for i in b)).append(item)
        else:
            bins.append([item])
    return bins


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_is_the_textbook_s(sizes: list[int]) -> None:
    assert best_fit(sizes, 20) == slow_best_fit(sizes, 20)


def test_the_key_orders_the_rows_and_changes_nothing_else() -> None:
    documents = documents_of([40] * 30)
    one, other = pack(documents, 16, 1), pack(documents, 16, 2)
    assert not np.array_equal(one.tokens, other.tokens)
    assert sorted(map(bytes, one.tokens)) == sorted(map(bytes, other.tokens))
