"""Erasure codes: every loss that a code allows, on both back ends, against arithmetic written out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import erasure, galois
from checkpointing.erasure import accumulate, check_code, decode, encode

BACK_ENDS = ("isal", "numpy")
# Around a word, a vector and a block of either back end, and what is none of them.
LENGTHS = st.sampled_from((0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 255, 1000, (1 << 17) - 1, (1 << 17) + 17))


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(erasure, "isal", lambda: None)
    else:
        assert galois.isal() is not None, "the wheel of pyeclib no longer has ISA-L where it is looked for"
    return request.param


@st.composite
def codes(draw: st.DrawFn, max_parity: int = 4) -> tuple[int, int]:
    return draw(st.integers(1, 12)), draw(st.integers(1, max_parity))


def _shards(count: int, length: int, seed: int) -> list[np.ndarray]:
    """Random shards, each at an address of its own kind."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, (count, length + 8), np.uint8)
    return [row[index % 8 :][:length] for index, row in enumerate(memory)]


def _times(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    result = 0
    while b:
        result ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return result


def _reference(matrix: np.ndarray, data: Sequence[np.ndarray]) -> list[list[int]]:
    rows = []
    for coefficients in matrix.tolist():
        row = [0] * len(data[0])
        for coefficient, shard in zip(coefficients, data, strict=True):
            row = [sofar ^ _times(coefficient, byte) for sofar, byte in zip(row, shard.tolist(), strict=True)]
        rows.append(row)
    return rows


def test_the_field_is_a_field() -> None:
    table = galois.products()
    assert table.tolist() == [[_times(a, b) for b in range(256)] for a in range(256)]


@given(codes(), LENGTHS, st.integers(0, 2**32), st.data())
def test_both_back_ends_give_the_bytes_of_plain_arithmetic(
    code: tuple[int, int], length: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, data.draw(st.sampled_from((2, 16, 256))), code[::-1], np.uint8)
    sources, add = _shards(code[0], length, seed), data.draw(st.booleans())
    found = []
    for multiply in (galois.isal(), galois.numpy_multiply):
        assert multiply is not None
        targets = _shards(code[1], length, seed + 1)
        before = [target.copy() for target in targets]
        multiply(matrix, sources, targets, add)
        found.append([target ^ old if add else target for target, old in zip(targets, before, strict=True)])
    np.testing.assert_array_equal(*found)
    some = slice(max(0, length - 70), length)  # plain arithmetic is slow
    assert [row[some].tolist() for row in found[0]] == _reference(matrix, [source[some] for source in sources])


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (5, 2), (8, 2), (12, 2), (40, 2)])
def test_any_k_shards_give_back_all(back_end: str, k: int, m: int) -> None:
    _every_loss(k, m)


@pytest.mark.parametrize(("k", "m"), [(1, 4), (2, 3), (3, 3), (6, 3), (12, 4), (4, 8)])
def test_any_k_shards_give_back_all_of_codes_that_need_the_library(k: int, m: int) -> None:
    _every_loss(k, m)


def _every_loss(k: int, m: int) -> None:
    shards = _shards(k + m, 41, k)
    encode(shards[:k], shards[k:])
    for lost in itertools.chain.from_iterable(itertools.combinations(range(k + m), n) for n in range(m + 1)):
        left = {number: shard for number, shard in enumerate(shards) if number not in lost}
        rebuilt = decode(k, m, left, lost)
        assert [shard.tobytes() for shard in rebuilt] == [shards[number].tobytes() for number in lost]


@given(codes(2), LENGTHS, st.integers(0, 2**32), st.randoms())
@pytest.mark.parametrize("numpy_alone", [False, True])
def test_parity_grows_shard_by_shard_in_any_order(
    numpy_alone: bool, code: tuple[int, int], length: int, seed: int, random: object
) -> None:
    k, m = code
    data, parity, grown = _shards(k, length, seed), _shards(m, length, seed + 1), _shards(m, length, seed + 2)
    with pytest.MonkeyPatch.context() as patch:
        if numpy_alone:
            patch.setattr(erasure, "isal", lambda: None)
        encode(data, parity)
        for shard in grown:
            shard[:] = 0
        order = [*range(k), 0, 0]  # the first is taken out and added again
        random.shuffle(order)  # type: ignore[attr-defined]
        for index in order:
            accumulate(k, m, index, data[index], grown)
    np.testing.assert_array_equal(grown, parity)
    np.testing.assert_array_equal(parity[0], np.bitwise_xor.reduce(data))


@given(codes(), st.integers(1, 300), st.integers(0, 2**32), st.data())
def test_a_range_of_lost_shards_comes_from_that_range_of_others(
    code: tuple[int, int], length: int, seed: int, data: st.DataObject
) -> None:
    k, m = code
    shards = _shards(k + m, length, seed)
    encode(shards[:k], shards[k:])
    for shard in shards:
        shard.flags.writeable = False  # as readers of a keeper's memory get them
    start = data.draw(st.integers(0, length - 1))
    some = slice(start, data.draw(st.integers(start, length)))
    kept = data.draw(st.permutations(range(k + m)))[: data.draw(st.integers(k, k + m))]
    wanted = data.draw(st.lists(st.integers(0, k + m - 1), max_size=5))
    found = decode(k, m, {number: shards[number][some] for number in kept}, wanted)
    assert [shard.tobytes() for shard in found] == [shards[number][some].tobytes() for number in wanted]


def test_any_two_losses_can_be_told_apart_in_any_two_rows_of_parity() -> None:
    for k, m in ((255 - 2, 2), (60, 3), (20, 4)):
        matrix = erasure._parity_matrix(k, m)
        assert (matrix[0] == 1).all() and matrix.all()
        for rows in itertools.combinations(range(m), 2):
            a, b = matrix[list(rows)]
            assert len(np.unique(galois.products()[b, galois.inverse_of(a)])) == k  # no two columns are proportional


def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for k, m in ((0, 1), (1, 0), (250, 6)):
        with pytest.raises(ValueError, match="there is no erasure code with"):
            check_code(k, m)
    with pytest.raises(ValueError, match="3 shards are left of a code that needs 4"):
        decode(4, 2, dict(enumerate(_shards(3, 5, 0))), [4])
    check_code(200, 55)
    monkeypatch.setattr(erasure, "isal", lambda: None)
    check_code(200, 2)
    with pytest.raises(ValueError, match="parity against 3 losses needs ISA-L"):
        encode(_shards(4, 5, 0), _shards(3, 5, 1))


def test_a_library_that_has_moved_is_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(galois.importlib.util, "find_spec", lambda name: None)
    assert galois.isal.__wrapped__() is None
