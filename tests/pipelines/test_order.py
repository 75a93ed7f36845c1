from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipelines.order import Permutation, derive_key

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 700), keys)
def test_is_a_bijection(num_items: int, key: int) -> None:
    order = Permutation(num_items, key)
    assert sorted(order(position) for position in range(num_items)) == list(range(num_items))


@given(st.integers(1, 2**60), keys, st.data())
def test_works_on_sizes_that_no_array_could_hold(num_items: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, num_items - 1), max_size=20))
    order = Permutation(num_items, key)
    items = {order(position) for position in positions}
    assert len(items) == len(positions)
    assert all(0 <= item < num_items for item in items)


def test_every_item_is_equally_likely_at_every_position() -> None:
    num_items, num_keys = 7, 4200
    seen = Counter(
        (position, Permutation(num_items, derive_key("test", key))(position))
        for key in range(num_keys)
        for position in range(num_items)
    )
    expected = num_keys / num_items
    chi_square = sum((seen[p, i] - expected) ** 2 / expected for p in range(num_items) for i in range(num_items))
    assert chi_square < 81  # 99.999th percentile for 36 degrees of freedom


def test_neighbours_are_spread() -> None:
    order = Permutation(10_007, 1)
    kept = sum(abs(order(position + 1) - order(position)) < 100 for position in range(10_006))
    assert kept < 2 * 2 * 100  # a random order has about 200 of them


def test_keys_of_other_purposes_differ() -> None:
    assert len({derive_key(*parts) for parts in [("a", 1, 2), ("a", 12), ("a", 2, 1), ("b", 1, 2), ("a", "1", 2)]}) == 5
