"""Protection: each set of lost nodes, for each scheme, is restored bitwise from memory or named as lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.arena import Arena
from checkpointing.cover import StateLost, newest_complete, tolerance
from checkpointing.decoded import with_decoded
from checkpointing.erasure import check_code
from checkpointing.holding import DigestMismatch, Holding, HoldingKey
from checkpointing.layout import Layout
from checkpointing.placement import protect
from checkpointing.redundancy import Protection
from checkpointing.schema import Piece, pieces
from checkpointing.transfer import Destination, plan_transfer
from tests.checkpointing.node_keepers import TINY, Nodes, random_reference, record_nbytes

NAMES = "abcdef"
WHOLE = Destination("new", pieces(TINY, Layout(), 0))
# layout, survive, scheme, what comes out of it
SCHEMES = {
    "natural": ("r6", 1, "auto", "natural", 5),
    "replica 1": ("dp6", 1, "replica", "replica", 1),
    "replica 2": ("dp3·tp2", 2, "replica", "replica", 2),
    "some natural": ("r2·dp3", 2, "replica", "replica", 2),
    "XOR 5+1": ("dp6", 1, "parity", "parity", 1),
    "RS 4+2": ("dp3·tp2", 2, "parity", "parity", 2),
    "RS 4+2, some natural": ("r2·dp3", 2, "parity", "parity", 2),
    "XOR, two ranks on a node": ("dp6·tp2", 1, "parity", "parity", 1),
}


def protection_of(layout: Layout, placement: Sequence[str], survive: int, scheme: str, names: str) -> Protection:
    held = [pieces(TINY, layout, rank) for rank in range(layout.size)]
    domains = {name: name for name in names}
    return protect(held, placement, domains, record_nbytes(TINY), survive, scheme)  # type: ignore[arg-type]


class Protected:
    """Six nodes with a layout's state at steps 1 and 2."""

    def __init__(self, text: str, survive: int, scheme: str, names: str = NAMES) -> None:
        self.layout, self.nodes = Layout.parse(text), Nodes(names)
        placement = [names[rank * len(names) // self.layout.size] for rank in range(self.layout.size)]
        self.protection = protection_of(self.layout, placement, survive, scheme, names)
        self.domains = {name: name for name in names}
        for step in (1, 2, 3):
            self.step(step, placement)

    def step(self, step: int, placement: Sequence[str]) -> None:
        made, reference = self.protection, random_reference(TINY, step)
        self.nodes.protect(TINY, reference, self.layout, placement, step=step, durable=step == 3, protection=made)

    def alive(self, lost: Iterable[str]) -> list[Holding]:
        return self.nodes.inventory([name for name in self.nodes.names if name not in set(lost)])

    def restore(self, holdings: Sequence[Holding]) -> set[str]:
        """Load the whole newest state on a new node, bit by bit; returns the roles that it came from."""
        usable = with_decoded(holdings)
        state = newest_complete(TINY, usable)
        assert state == (1, 3)
        source = [h for h in usable if (h.snapshot.generation, h.snapshot.step) == state]
        plan = plan_transfer(TINY, source, {0: WHOLE})
        self.nodes.load(plan, 0, WHOLE, random_reference(TINY, 3))
        return {part.holding.role for fetch in plan.fetches[0] for part in fetch.parts}


@pytest.fixture(params=SCHEMES.values(), ids=list(SCHEMES))
def protected(request: pytest.FixtureRequest):
    text, survive, scheme, used, survives = request.param
    made = Protected(text, survive, scheme)
    assert (made.protection.scheme, made.protection.survives) == (used, survives)
    yield made
    made.nodes.close()


def test_every_loss_up_to_the_number_that_is_survived_is_restored_bitwise(protected: Protected) -> None:
    for number in range(protected.protection.survives + 1):
        for lost in combinations(NAMES, number):
            left = protected.alive(lost)
            protected.restore(left)
            state = [h for h in left if h.snapshot.step == 3]
            assert tolerance(TINY, state, protected.domains) >= protected.protection.survives - number


def test_beyond_that_what_is_restored_is_right_and_what_is_lost_is_named(protected: Protected) -> None:
    """The guards, which are all that a run's folder knows, say the same as the keepers' memory."""
    num_lost = 0
    for lost in combinations(NAMES, protected.protection.survives + 1):
        left = protected.alive(lost)
        predicted = all(guard.source(lost) is not None for guard in protected.protection.guards)
        if predicted:
            protected.restore(left)
            continue
        num_lost += 1
        with pytest.raises(StateLost, match=r"the state of step 3 is lost: nobody holds \w|no snapshot of any step"):
            newest_complete(TINY, with_decoded(left))
    assert num_lost > 0


def test_each_role_of_what_is_left_is_used() -> None:
    for scheme, role in (("replica", "copy"), ("parity", "decoded")):
        made = Protected("dp6", 1, scheme)
        assert made.restore(made.alive("c")) == {"primary", role}
        made.nodes.close()


def flip(holding: Holding, index: int) -> None:
    record = holding.snapshot.records[index]
    record.data(Arena.attach(holding.locator).slot(holding.slot))[record.nbytes // 2] ^= 0x10  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["replica", "parity"])
def test_a_flipped_byte_in_any_arena_is_named_and_routed_around(scheme: str) -> None:
    """One node is lost and one byte of one record of one holding is wrong, while two losses are survived."""
    made = Protected("dp6", 2, scheme)
    noticed = set()
    assert {h.role for h in made.alive("")} == {"primary", "pin", "copy" if scheme == "replica" else "parity"}
    for lost in "ad":
        for damaged in [h for h in made.alive(lost) if h.snapshot.step == 3]:
            for index in range(len(damaged.snapshot.records)):
                flip(damaged, index)
                found = _restore_around(made, made.alive(lost))
                assert found in ([], [damaged.key]), "nobody else is to blame"
                noticed.update(key[1] for key in found)
                whole = 0, damaged.snapshot.nbytes
                with pytest.raises(DigestMismatch, match=f"is damaged in the {damaged}"):
                    made.nodes.keepers[damaged.node].read_shard(damaged.key, whole, [whole])
                flip(damaged, index)
    assert noticed == {"primary", "copy" if scheme == "replica" else "parity"}
    made.nodes.close()


def _restore_around(made: Protected, holdings: list[Holding]) -> list[HoldingKey]:
    """As a recovery does it: without the holdings that turn out to be damaged."""
    found: list[HoldingKey] = []
    while True:
        try:
            made.restore([holding for holding in holdings if holding.key not in found])
            return found
        except DigestMismatch as error:
            assert "is damaged in the" in str(error) and error.key not in found
            found.append(error.key)


def test_a_shard_that_arrives_damaged_leaves_the_parity_before_it() -> None:
    made = Protected("dp6", 1, "parity")
    keeper, (holding, *_) = made.nodes.keepers["b"], [h for h in made.alive("") if h.role == "parity" and h.node == "b"]
    assert holding.parity is not None
    number, shard = holding.parity.shards[0]
    torn = Arena.attach(made.alive("")[0].locator).slot(0)[: shard.snapshot.nbytes].copy()  # type: ignore[arg-type]
    later = replace(shard, snapshot=replace(shard.snapshot, step=4))
    with pytest.raises(DigestMismatch, match="shard of rank . sent to node b"):
        keeper.hold_shard(holding.parity.code, holding.parity.row, number, later, torn, {})
    rows = [h for h in keeper.inventory() if h.role == "parity" and h.snapshot.rank == holding.snapshot.rank]
    assert [row.snapshot.step for row in rows] == [3], "the slot of step 2 was being written over, that of step 3 stays"
    made.nodes.close()


# Placement

ONE_EACH = [Piece(f"w{index}", (0,), (8,)) for index in range(16 * 12)]


def survival(num_nodes: int, survive: int, scheme: str, widest: int, losses: Iterable[int]) -> list[float]:
    """Per cent of the sets of so many lost nodes that are survived, by enumeration of the guards."""
    names = [f"n{index:02d}" for index in range(num_nodes)]
    held = [ONE_EACH[rank::num_nodes] for rank in range(num_nodes)]
    protection = protect(
        held,
        names,
        {name: name for name in names},
        lambda piece: 64,
        survive,
        scheme,
        widest=widest,  # type: ignore[arg-type]
    )
    masks = [_masks(guard, names) for guard in protection.guards]
    found = []
    for number in losses:
        survived = 0
        for lost in combinations(range(num_nodes), number):
            gone = sum(1 << index for index in lost)
            survived += all(
                whole & ~gone or (shards and (shards & ~gone).bit_count() >= needed) for whole, shards, needed in masks
            )
        found.append(round(100 * survived / comb(num_nodes, number), 1))
    return found


def _masks(guard, names: list[str]) -> tuple[int, int, int]:
    def mask(nodes: Iterable[str]) -> int:
        return sum(1 << names.index(node) for node in set(nodes))

    return mask((*guard.primaries, *guard.copies)), mask(guard.shards), guard.needed


@pytest.mark.parametrize(
    ("survive", "scheme", "widest", "expected"),
    [
        (1, "replica", 8, [100, 93.3, 80.0, 61.5, 41.0]),
        (1, "parity", 4, [100, 80.0, 45.7, 14.1, 0]),
        (1, "parity", 8, [100, 53.3, 0, 0, 0]),
        (2, "parity", 8, [100, 100, 80.0, 43.1, 0]),
        (2, "parity", 4, [100, 100, 97.1, 89.2, 74.7]),
        (4, "parity", 16, [100, 100, 100, 100, 0]),
    ],
    ids=["pairs", "XOR 3+1", "XOR 7+1", "RS 6+2", "RS 2+2", "RS 12+4"],
)
def test_survival_of_sixteen_nodes_is_what_combinatorics_say(
    survive: int, scheme: str, widest: int, expected: list[float]
) -> None:
    assert survival(16, survive, scheme, widest, range(1, 6)) == expected


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.integers(0, 3),
    st.sampled_from(["auto", "replica", "parity"]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 2000),
)
def test_no_piece_shares_a_domain_with_its_protection(
    racks: list[int], survive: int, scheme: str, each: int, num_replicas: int, memory: int
) -> None:
    domains = {f"n{index}": f"rack-{rack}" for index, rack in enumerate(racks)}
    nodes = [node for node in domains for _ in range(each)]
    held = [[Piece(f"w{rank // num_replicas}.{i}", (0,), (8,)) for i in range(5)] for rank in range(len(nodes))]
    room = dict.fromkeys(domains, memory)
    made = protect(held, nodes, domains, lambda piece: 64, survive, scheme, room)  # type: ignore[arg-type]
    cut = min(survive, len(set(racks)) - 1)
    assert made.survives >= cut
    for rank, sends in enumerate(made.sends):
        sent = [piece for send in sends for piece in send.pieces]
        assert len(sent) == len(set(sent)) and set(sent) <= set(made.written[rank]) <= set(held[rank])
        for send in sends:
            if send.code is None:
                holding = {domains[nodes[r]] for r in range(len(nodes)) if set(send.pieces) & set(held[r])}
                assert not holding & {domains[node] for node in send.nodes}
            else:
                of = [domains[node] for node in send.code.nodes]
                assert len(of) == len(set(of)) and send.code.nodes[send.index] == nodes[rank]
                assert send.code.ranks[send.index] == rank and send.nodes == send.code.nodes[send.code.num_data :]
                assert 64 * len(send.pieces) <= send.code.nbytes
    for node in domains:
        ranks = [rank for rank, its in enumerate(nodes) if its == node]
        written = [piece for rank in ranks for piece in made.written[rank]]
        assert len(written) == len(set(written)), "once per node"
        assert set(written) == {piece for rank in ranks for piece in held[rank]}
    for number in range(cut + 1):
        for lost in combinations(sorted(set(domains.values())), number):
            gone = [node for node, domain in domains.items() if domain in lost]
            assert all(guard.source(gone) for guard in made.guards)
    worst = next(
        number
        for number in range(len(set(racks)) + 1)
        for lost in combinations(sorted(set(domains.values())), number)
        if not all(guard.source([n for n, d in domains.items() if d in lost]) for guard in made.guards)
    )
    assert made.survives == worst - 1


def test_replicas_of_a_node_write_a_part_of_the_state_each() -> None:
    held = [[Piece(f"w{index}", (0,), (8,)) for index in range(31)]] * 8
    made = protect(held, [f"n{rank // 2}" for rank in range(8)], {f"n{i}": f"n{i}" for i in range(4)}, lambda _: 64, 1)
    assert sorted(map(len, made.written)) == [15] * 4 + [16] * 4 and (made.scheme, made.survives) == ("natural", 3)


def test_parity_takes_less_memory_than_copies_and_auto_takes_copies_where_they_fit() -> None:
    held = [[Piece(f"{rank}.{index}", (0,), (8,)) for index in range(30)] for rank in range(6)]
    domains = {name: name for name in NAMES}

    def of(scheme: str, memory: int) -> Protection:
        room = dict.fromkeys(NAMES, memory)
        return protect(held, list(NAMES), domains, lambda piece: 64, 1, scheme, room)  # type: ignore[arg-type]

    parity = of("parity", 0)
    per_code = {send.code.number: send.code.nbytes for sends in parity.sends for send in sends if send.code}
    assert sum(per_code.values()) == 6 * 30 * 64 // 5, "a fifth, with 5+1"
    assert of("auto", 4 * 30 * 64).scheme == "replica" and of("auto", 4 * 30 * 64 - 1).scheme == "parity"


def test_what_no_code_can_do_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="there is no erasure code with 0 shards of data"):
        check_code(0, 1)
