"""Any tensors, any layout to any layout, any holders lost: bitwise the unsharded reference, and no byte too many.

All in one process: what the ranks hold are local numpy tensors, fused and padded as a model would have them, and the
plan is carried out as its byte runs, in waves.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import slices, volume
from checkpointing.checks import violations
from checkpointing.cover import StateLost, newest_complete
from checkpointing.holding import Holding, HoldingKey
from checkpointing.layout import Layout
from checkpointing.moves import moves, waves
from checkpointing.optimizer_state import optimizer_specs
from checkpointing.schema import Fused, Piece, Schema, ShardMap, TensorSpec
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, Fetch, plan_transfer
from tests.checkpointing.node_keepers import Reference, cut, random_reference

NUM_CASES = 10_000 if os.environ.get("PLANARIA_PROVE") == "1" else 300
LIMITS = settings(max_examples=NUM_CASES, deadline=None, suppress_health_check=list(HealthCheck))

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 11])
DTYPES = st.sampled_from(["float32", "bfloat16", "float64", "int64", "uint8", "float16"])
EVERY_LAYOUT = [
    Layout(pp, r, dp, tp, cp, ep, etp, v)
    for pp, r, dp, cp, tp, v in product((1, 2, 3), (1, 2), (1, 2, 3, 5), (1, 2), (1, 2, 3, 4), (1, 2))
    if pp * r * dp * cp * tp <= 16
    for ep, etp in product((1, 2, 3, 4, 6, 8), (1, 2, 4))
    if dp * cp * tp % (ep * etp) == 0
]
POISON = 0xA5
# Scalars that every rank holds, and generators by logical coordinate (here 5 streams), dealt to ranks as rows are.
BESIDE = (
    TensorSpec("cursor", (3,), "int64", None, "all", fsdp_dims=()),
    TensorSpec("options/decayed/lr", (), "float64", None, "all"),
    TensorSpec("generators", (5, 8), "uint8", None, "all"),
)
ADDRESS = ArenaAddress(0, (), 0, "")


def states_of(shape: tuple[int, ...]) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """An optimizer with a moment, a scalar and Adafactor's factors, one of which keeps the dim that it sums over."""
    found: dict[str, tuple[tuple[int, ...], str]] = {"momentum": (shape, "bfloat16"), "count": ((), "int64")}
    if len(shape) > 1:
        found |= {"row": ((*shape[:-1], 1), "float32"), "column": ((*shape[:-2], shape[-1]), "float32")}
    return found


@st.composite
def parameters(draw: st.DrawFn, name: str, num_layers: int) -> list[TensorSpec]:
    """One parameter; or a fused group of three."""
    kind = draw(st.sampled_from(["plain", "plain", "padded", "heads", "expert", "fused"]))
    where = draw(st.sampled_from(["layer", "layer", "first", "last", "ends", "all"]))
    layer = draw(st.integers(0, num_layers - 1)) if where == "layer" else None
    dtype = draw(DTYPES)
    if kind == "fused":
        num_heads, rows, width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3])), draw(SIZES)
        spec = TensorSpec(name, (num_heads * rows, width), dtype, 0, where, layer, heads=num_heads)
        queries = replace(spec, name=f"{name}.q", shape=(2 * num_heads * rows, width), heads=2 * num_heads)
        return [queries, replace(spec, name=f"{name}.k"), replace(spec, name=f"{name}.v")]
    num_dims = {"padded": 2, "heads": 2, "expert": 3}.get(kind) or draw(st.integers(0, 3))
    shape = tuple(draw(SIZES) for _ in range(num_dims))
    tp_dim = draw(st.sampled_from([None, *range(num_dims)]))
    if kind == "padded":
        return [TensorSpec(name, shape, dtype, 0, where, layer, pad_to=draw(st.integers(1, 3)))]
    if kind == "heads":
        heads = draw(st.integers(1, 5))
        return [TensorSpec(name, (heads * shape[0], shape[1]), dtype, 0, where, layer, heads=heads)]
    if kind == "expert":
        tp_dim = draw(st.sampled_from([None, 1, 2]))
        dims = draw(st.sampled_from([(0,), (0, 1), (1,)]))
        return [TensorSpec(name, shape, dtype, tp_dim, where, layer, dims, ep_dim=0)]
    dims = draw(st.sampled_from([(0,), (0,), ()])) if shape else ()
    return [TensorSpec(name, shape, dtype, tp_dim, where, layer, dims)]


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    num_layers = draw(st.integers(1, 5))
    found, fused = [], []
    for index in range(draw(st.integers(1, 3))):
        group = draw(parameters(f"p{index}", num_layers))
        found += group
        if len(group) > 1:
            rows = group[1].shape[0] // (group[1].heads or 1)
            blocks = draw(st.sampled_from([None, (2 * rows, rows, rows)]))
            for state in ("", "momentum/"):
                fused.append(Fused(f"{state}p{index}", tuple(state + spec.name for spec in group), 0, blocks))
    return Schema((*found, *optimizer_specs(found, states_of), *BESIDE), num_layers, fused=tuple(fused))


@st.composite
def layouts(draw: st.DrawFn, num_layers: int) -> Layout:
    layout = draw(st.sampled_from(EVERY_LAYOUT))
    if draw(st.booleans()):
        cuts = sorted(draw(st.integers(0, num_layers)) for _ in range(layout.num_stages - 1))
        listed = tuple(int(size) for size in np.diff([0, *cuts, num_layers]))
        layout = replace(layout, layers=listed)
    return layout


def local_tensors(
    shards: ShardMap, rank: int, reference: Reference
) -> tuple[list[np.ndarray], dict[Piece, np.ndarray]]:
    """The local tensors of a rank, full of poison, and the views of its pieces in them."""
    arrays, views = [], {}
    for local in shards.local(rank):
        if local.places:
            dtype = reference[local.places[0].piece.name].dtype
            poison = np.full(math.prod(local.size) * dtype.itemsize, POISON, np.uint8)
            arrays.append(poison.view(dtype).reshape(local.size))
            views |= {place.piece: place.view(arrays[-1]) for place in local.places}
    return arrays, views


def hold(
    shards: ShardMap, reference: Reference, placement: Sequence[str], copies: Mapping[str, str], slot: int = 0
) -> tuple[list[Holding], dict[HoldingKey, np.ndarray]]:
    """Holdings of every rank and, by key, the buffers that they point into. ``copies``: node -> another, or "disk"."""
    holdings, buffers = [], {}
    for rank, node in enumerate(placement):
        _, views = local_tensors(shards, rank, reference)
        for piece, view in views.items():
            view[...] = cut(reference, piece)
        buffer = np.zeros(snapshot_nbytes(views), np.uint8)
        snapshot = Snapshot(1, 1, rank, str(shards.layout), write_snapshot(buffer, views), {})
        file = f"{slot}/{rank}"
        for role, where in (("primary", node), ("copy", copies.get(node))):
            if where == "disk":
                holdings.append(Holding(snapshot, 0, "", "primary", "disk", file))
            elif where is not None:
                holdings.append(Holding(snapshot, slot, where, role, "memory", ADDRESS))
            buffers[holdings[-1].key] = buffer
    return holdings, buffers


def carry_out(
    fetches: Sequence[Fetch], views: Mapping[Piece, np.ndarray], buffers: Mapping[HoldingKey, np.ndarray], budget: int
) -> None:
    """Read a rank's byte runs, wave by wave, and put each part where it belongs."""
    for wave in waves(moves(fetches), budget):
        assert sum(move.nbytes for move in wave) <= budget
        for move in wave:
            starts, lengths = move.runs()
            assert (starts[1:] != (starts + lengths)[:-1]).all(), "runs that follow one another are one"
            source = buffers[move.holding.key]
            data = np.concatenate([source[start:stop] for start, stop in zip(starts, starts + lengths, strict=True)])
            for piece, part in move.parts:
                nbytes = volume(part.box) * part.record.itemsize
                target = views[piece][(..., *slices(part.box, piece))]
                target[...] = data[:nbytes].view(part.record.dtype).reshape(target.shape)
                data = data[nbytes:]
            assert not data.size


def mask_of(reference: Reference, boxes: Iterable[Piece]) -> dict[str, np.ndarray]:
    """Per tensor, how often each element is in ``boxes``."""
    masks = {name: np.zeros(array.shape, np.int32) for name, array in reference.items()}
    for box in boxes:
        cut(masks, box)[...] += 1
    return masks


@LIMITS
@given(st.data())
def test_the_state_is_bitwise_the_reference_and_no_more_moves_than_must(data: st.DataObject) -> None:
    schema = data.draw(schemas(), label="schema")
    before, after = (ShardMap(schema, data.draw(layouts(schema.num_layers), label=which)) for which in ("from", "to"))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32), label="seed"))
    reference = random_reference(schema, seed=before.layout.size)
    names = [f"n{index}" for index in range(data.draw(st.integers(1, 4), label="num_nodes"))]
    next_to = dict(zip(names, [*names[1:], names[0]], strict=True))
    copies = data.draw(st.sampled_from([{}, next_to, dict.fromkeys(names, "disk")]), label="copies")
    placement = [str(name) for name in rng.choice(names, before.layout.size)]
    everyone, buffers = hold(before, reference, placement, copies)
    if data.draw(st.sampled_from([False, False, True]), label="another group with another layout"):
        other = ShardMap(schema, data.draw(layouts(schema.num_layers), label="its layout"))
        more = hold(other, reference, [str(name) for name in rng.choice(names, other.layout.size)], copies, slot=1)
        everyone, buffers = everyone + more[0], buffers | more[1]
    assert violations(schema, everyone) == ()
    num_lost = data.draw(st.sampled_from([0, 0, 1, 2, 5]), label="num_lost")
    lost = set(rng.choice(len(everyone), min(num_lost, len(everyone)), replace=False))
    holdings = [holding for index, holding in enumerate(everyone) if index not in lost]

    survives = mask_of(reference, {record.piece for holding in holdings for record in holding.snapshot.records})
    missing = {name for name, mask in survives.items() if (mask == 0).any()}
    if missing or not holdings:
        with pytest.raises(StateLost) as error:
            newest_complete(schema, holdings)
        gaps = mask_of(reference, error.value.missing)
        assert not holdings or all((gaps[name] == (mask == 0)).all() for name, mask in survives.items())
        return

    domains = {name: str(rng.choice(["rack1", "rack2"])) for name in names}
    destinations = {}
    for rank in range(after.layout.size):
        own = next((h for h in holdings if h.role == "primary" and rng.integers(4) == 0 and h.node), None)
        node = own.node if own is not None else str(rng.choice([*names, "newcomer"]))
        destinations[rank] = Destination(node, after.pieces(rank), own and own.key)
    plan = plan_transfer(schema, holdings, destinations, domains)
    assert plan == plan_transfer(schema, holdings[::-1], dict(reversed(destinations.items())), domains)

    on_node = {
        node: mask_of(reference, (r.piece for h in holdings if h.node == node for r in h.snapshot.records))
        for node in (*names, "newcomer")
    }
    needed = 0
    for rank, destination in destinations.items():
        arrays, views = local_tensors(after, rank, reference)
        assert tuple(views) == destination.pieces == tuple(fetch.piece for fetch in plan.fetches[rank])
        carry_out(plan.fetches[rank], views, buffers, budget=int(rng.choice([8, 64, 1 << 20])))
        for piece, view in views.items():
            assert view.tobytes() == cut(reference, piece).tobytes(), piece
            needed += int((cut(on_node[destination.node], piece) == 0).sum()) * view.itemsize
            view[...] = np.frombuffer(bytes([POISON]) * view.itemsize, view.dtype)[0]
        assert all((array.reshape(-1).view(np.uint8) == POISON).all() for array in arrays), "padding was written"
    assert plan.bytes_moved == plan.bytes_lower_bound == needed
    taken = {part.holding.tier for fetches in plan.fetches.values() for fetch in fetches for part in fetch.parts}
    assert plan.tier == ("disk" if "disk" in taken else "memory")
    event(f"moved {plan.bytes_moved > 0} from {plan.tier}, {len({h.snapshot.layout for h in holdings})} layouts")


@LIMITS
@given(st.data())
def test_a_layout_holds_every_element_equally_often_and_moves_nothing_to_itself(data: st.DataObject) -> None:
    schema = data.draw(schemas(), label="schema")
    shards = ShardMap(schema, data.draw(layouts(schema.num_layers), label="layout"))
    size = shards.layout.size
    held = [shards.pieces(rank) for rank in range(size)]
    for rank, pieces in enumerate(held):
        assert pieces == tuple(place.piece for local in shards.local(rank) for place in local.places)
    whole = {spec.name: np.zeros(spec.shape) for spec in schema.tensors}
    masks = mask_of(whole, (piece for pieces in held for piece in pieces))
    for spec in schema.tensors:
        num_held = Counter(masks[spec.name].flat)
        assert 0 not in num_held, spec
        assert len(num_held) <= 1 or spec.heads is not None, (spec, num_held)
    nodes = [f"n{rank}" for rank in range(size)]
    holdings, _ = hold(shards, random_reference(schema, 0), nodes, {})
    plan = plan_transfer(schema, holdings, {rank: Destination(nodes[rank], held[rank]) for rank in range(size)})
    assert plan.bytes_moved == plan.bytes_lower_bound == 0
