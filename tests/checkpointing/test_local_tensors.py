"""Fused, padded, replicated and flat local tensors against tensors that numpy joins and cuts by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.boxes import overlap, volume
from checkpointing.flat import flat_places
from checkpointing.layout import Layout
from checkpointing.schema import Fused, LocalTensor, Piece, Schema, ShardMap, TensorSpec, pieces
from tests.checkpointing.node_keepers import cut

HEAD = 2  # rows of one attention head
WIDTH = 3


def numbered(name: str, *shape: int) -> np.ndarray:
    """A tensor whose elements say where they are, and are not -1."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1000 * (1 + "qkv".find(name))


def filled(local: LocalTensor, reference: dict[str, np.ndarray]) -> np.ndarray:
    """The local tensor as its places say; -1 where they say nothing."""
    array = np.full(local.size, -1, np.int64)
    for place in local.places:
        view = place.view(array)
        assert (view == -1).all(), "two places overlap"
        view[...] = cut(reference, place.piece)
    return array


def rows_of(array: np.ndarray, parts: int, index: int) -> np.ndarray:
    """torch.chunk, empty ones included."""
    step = max(1, -(-len(array) // parts))
    return array[index * step : (index + 1) * step]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("text", ["1", "tp2", "tp4", "tp8", "dp2·tp2", "dp3·tp4", "dp2·cp2·tp8"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_attention_under_gqa(groups: int, text: str, interleaved: bool) -> None:
    """Eight query heads in ``groups`` groups; with more ranks than groups a key/value head is held several times."""
    layout, num_heads = Layout.parse(text), 8
    reference = {name: numbered(name, h * HEAD, WIDTH) for name, h in (("q", num_heads), ("k", groups), ("v", groups))}
    blocks = (num_heads // groups * HEAD, HEAD, HEAD) if interleaved else None
    schema = Schema(
        (
            TensorSpec("q", (num_heads * HEAD, WIDTH), "int64", 0, "all", heads=num_heads),
            TensorSpec("k", (groups * HEAD, WIDTH), "int64", 0, "all", heads=groups),
            TensorSpec("v", (groups * HEAD, WIDTH), "int64", 0, "all", heads=groups),
        ),
        1,
        fused=(Fused("qkv", ("q", "k", "v"), blocks=blocks),),
    )
    shards = ShardMap(schema, layout)
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        heads = {name: array.reshape(-1, HEAD, WIDTH) for name, array in reference.items()}
        queries = np.array_split(heads["q"], layout.tp)[at.tp]
        first = at.tp * groups // layout.tp
        mine = slice(first, first + max(1, groups // layout.tp))
        keys, values = heads["k"][mine], heads["v"][mine]
        if interleaved:
            each = zip(np.array_split(queries, len(keys)), keys[:, None], values[:, None], strict=True)
            joined = np.concatenate([part for group in each for part in group])
        else:
            joined = np.concatenate([queries, keys, values])
        expected = rows_of(joined.reshape(-1, WIDTH), layout.dp * layout.cp, at.dp * layout.cp + at.cp)
        (local,) = shards.local(rank)
        assert local.name == "qkv" and local.size == expected.shape
        assert np.array_equal(filled(local, reference), expected), (text, rank)


@pytest.mark.parametrize("text", ["tp2", "tp3", "dp3·tp2"])
def test_fused_columns_of_a_transposed_weight(text: str) -> None:
    """Joined along dim 1, cut by FSDP along dim 0."""
    layout = Layout.parse(text)
    reference = {name: numbered(name, 7, 6) for name in "qk"}
    specs = tuple(TensorSpec(name, (7, 6), "int64", 1, "all") for name in "qk")
    shards = ShardMap(Schema(specs, 1, fused=(Fused("qk", ("q", "k"), dim=1),)), layout)
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        parts = [np.array_split(reference[name], layout.tp, axis=1)[at.tp] for name in "qk"]
        expected = rows_of(np.concatenate(parts, axis=1), layout.dp, at.dp)
        (local,) = shards.local(rank)
        assert np.array_equal(filled(local, reference), expected)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_a_padded_vocabulary(rows: int, pad_to: int, tp: int, dp: int) -> None:
    reference = {"v": numbered("v", rows, WIDTH)}
    layout = Layout(tp=tp, dp=dp)
    shards = ShardMap(Schema((TensorSpec("v", (rows, WIDTH), "int64", 0, "all", pad_to=pad_to),), 1), layout)
    total = -(-rows // (tp * pad_to)) * tp * pad_to
    padded = np.concatenate([reference["v"], np.full((total - rows, WIDTH), -1)])
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        expected = rows_of(padded.reshape(tp, -1, WIDTH)[at.tp], dp, at.dp)
        (local,) = shards.local(rank)
        assert local.size == expected.shape
        assert np.array_equal(filled(local, reference), expected)


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_flat_buffers(shapes: list[list[int]], num_ranks: int, padding: int) -> None:
    """ZeRO's bucket: tensors joined end to end, padded, cut evenly wherever that falls."""
    reference = {f"t{i}": numbered("", *shape) + 1000 * i for i, shape in enumerate(shapes)}
    boxes = [Piece(name, (0,) * array.ndim, array.shape) for name, array in reference.items()]
    joined = np.concatenate([*(array.reshape(-1) for array in reference.values()), np.full(padding, -1)])
    each = -(-len(joined) // num_ranks)
    for rank in range(num_ranks):
        expected = joined[rank * each : (rank + 1) * each]
        places = flat_places(boxes, rank * each, rank * each + len(expected))
        local = LocalTensor("bucket", (len(expected),), places)
        assert np.array_equal(filled(local, reference), expected)
        assert all(volume(place.piece) for place in places)
        for name, array in reference.items():
            assert sum(place.piece.name == name for place in places) <= max(1, 2 * array.ndim - 1)


@pytest.mark.parametrize("tp", range(1, 7))
def test_a_fused_tensor_is_refused_exactly_where_copies_of_its_heads_would_be_cut_differently(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped-query attention with any numbers of query and key heads, over one to three FSDP ranks."""
    refused = set()
    for queries, keys, dp in itertools.product(range(1, 10), range(1, 5), range(1, 4)):
        spec = TensorSpec("k", (2 * keys, 3), "float32", 0, "first", heads=keys)
        query = replace(spec, name="q", shape=(2 * queries, 3), heads=queries)
        schema = Schema((query, spec, replace(spec, name="v")), 0, fused=(Fused("qkv", ("q", "k", "v")),))
        layout = Layout(tp=tp, dp=dp)
        with monkeypatch.context() as unchecked:
            unchecked.setattr("checkpointing.schema._cuts_copies_differently", lambda unit, layout: False)
            boxes = {piece for rank in range(layout.size) for piece in pieces(schema, layout, rank)}
        pairs = itertools.combinations(sorted(boxes), 2)
        if any(one.name == other.name and overlap(one, other) for one, other in pairs):
            refused.add((queries, keys, dp))
            with pytest.raises(ValueError, match="repeats heads of qkv on ranks whose parts"):
                ShardMap(schema, layout)
        else:
            ShardMap(schema, layout)
    assert bool(refused) == (tp > 1), "(3, 1, 2) is one: a third query head, and one key head for two ranks"
