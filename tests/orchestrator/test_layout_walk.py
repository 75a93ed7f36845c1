"""Changes of layout, one after the other, on eight workers of four Ray nodes: while they train, and with experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import orchestrator.trainer
from checkpointing.holding import Holding, ReadRequest
from checkpointing.layout import Layout
from checkpointing.load import KeeperReads, load_state
from checkpointing.schema import Schema, pieces
from checkpointing.snapshot import digest_of
from checkpointing.transfer import Destination, Planner, plan_transfer
from orchestrator.actors import KeeperActor
from orchestrator.cluster import connect
from orchestrator.controller import Controller
from orchestrator.local_cluster import LocalCluster
from orchestrator.recovery import NextGeneration, Source
from tests.checkpointing.node_keepers import Reference, cut, random_reference
from tests.orchestrator.jobs import Drive, assert_every_step_once, assert_same_course, job, write_text
from tests.orchestrator.movers import Mover, expert_schema
from workers.plan import Order, Plan

NUM_WORKERS = 8
STEPS_EACH = 2  # and one more, since a stop is asked for while a step is under way
SHORT_WALK = ["r2·dp4", "pp4·tp2", "dp2·tp2·pp2"]
MODEL = "model={dim: 32, num_layers: 4, num_heads: 4, num_kv_heads: 4, ffn_dim: 64}"


def long_walk() -> list[str]:
    """Every layout of eight workers that the model can have, and stages of unequal length, in a seeded order."""
    sizes = (1, 2, 4, 8)
    found = [Layout(pp=pp, r=r, dp=dp, tp=tp) for pp in sizes[:3] for r in sizes for dp in sizes for tp in sizes[:3]]
    texts = [str(layout) for layout in found if layout.size == NUM_WORKERS] + ["pp2:3+1·dp4", "pp2:1+3·dp2·tp2"]
    random.Random(0).shuffle(texts)
    return texts


class Walk(Controller):
    """The controller with another answer to the question which layout is next: the next one of the route.

    At the end of each leg it looks into the keepers. There is what every worker wrote right after it had taken over the
    state, and what it wrote last: here that is all that it holds, also what another worker of its node writes.
    """

    route: Sequence[Layout] = ()
    legs: list[tuple[Layout, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.legs = type(self).seen = []
        self._before: Reference | None = None

    def _replan(self, source: Source) -> NextGeneration | None:
        self._preferred = (self.route[len(self.legs)],)
        self._began = source.step
        return super()._replan(source)

    def _orders(self, upcoming: NextGeneration) -> list[Order]:
        orders = super()._orders(upcoming)
        return [replace(order, written=pieces(self._schema, order.layout, order.rank)) for order in orders]

    def _better_layout(self, plan: Plan) -> bool:
        return self.step >= self._began + STEPS_EACH and len(self.legs) + 1 < len(self.route)

    def _resized(self, plan: Plan) -> Source:
        self._look(plan)
        return super()._resized(plan)

    def _finish(self, generation: int, step: int) -> None:
        assert self._plan is not None
        self._look(self._plan)
        super()._finish(generation, step)

    def _look(self, plan: Plan) -> None:
        holdings = [h for h in self._survival.inventory() if h.snapshot.generation == plan.generation]
        if self._before is not None:
            first = [h for h in holdings if h.snapshot.step == self._began]
            assert_all_hold(self._before, first, self._schema, plan.layout)
        last = max(h.snapshot.step for h in holdings)
        self._before = self._whole([h for h in holdings if h.snapshot.step == last])
        self.legs.append((plan.layout, self._began))

    def _whole(self, holdings: Sequence[Holding]) -> Reference:
        """The unsharded state, from the keepers' memory."""
        keepers = {node.name: node.keeper for node in self._nodes}

        def read(node: str, requests: list[ReadRequest]) -> Any:
            return ray.get(keepers[node].read.remote(requests))

        whole = pieces(self._schema, Layout(), 0)
        into = {
            piece: np.empty(piece.size, spec.dtype) for piece, spec in zip(whole, self._schema.tensors, strict=True)
        }
        load_state(Planner(self._schema, holdings).fetches(Destination("driver", whole)), into, KeeperReads(read))
        return {piece.name: array for piece, array in into.items()}


def assert_all_hold(reference: Reference, holdings: Sequence[Holding], schema: Schema, layout: Layout) -> None:
    """Each rank wrote the boxes of its layout, bit by bit as in ``reference``, whoever holds them."""
    primaries = {h.snapshot.rank: h for h in holdings if h.role == "primary"}
    assert sorted(primaries) == list(range(layout.size))
    for rank, holding in primaries.items():
        assert {record.piece for record in holding.snapshot.records} == set(pieces(schema, layout, rank))
    for holding in holdings:
        for record in holding.snapshot.records:
            assert record.digest == digest_of(np.array(cut(reference, record.piece), order="C")), (
                holding,
                record.piece,
            )


def test_walk(tmp_path: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, prove: bool) -> None:
    """Parameters and optimizer state bitwise after every move, the loss curve that of one worker."""
    write_text(tmp_path)
    route = long_walk() if prove else SHORT_WALK
    num_steps = (STEPS_EACH + 2) * len(route)
    shape = (MODEL, "protection={survive: 1, snapshot_every: 1000}", f"training.max_steps={num_steps}")
    alone = Drive(job(tmp_path, "alone", *shape), cluster)
    assert alone.run().error is None

    monkeypatch.setattr(Walk, "route", [Layout.parse(text) for text in route])
    monkeypatch.setattr(orchestrator.trainer, "Controller", Walk)
    walk = Drive(job(tmp_path, "walk", *shape, f"scaling.num_workers={NUM_WORKERS}", "layout=auto"), cluster)
    end = walk.run()
    assert end.error is None
    assert [layout for layout, _ in Walk.seen] == list(Walk.route)
    assert_every_step_once(walk.metrics, num_steps)
    assert_same_course(walk.metrics, alone.metrics)
    for incident in walk.incidents:
        assert (incident["kind"], incident["source_tier"], incident["steps_run_again"]) == ("resize", "memory", 0)
        assert incident["bytes_moved"] == incident["bytes_lower_bound"]
        print(f"{incident['layout_before']} -> {incident['layout_after']}: {incident['phases']}")
    assert len(walk.incidents) == len(route) - 1


EXPERT_WALK = [
    "dp8·ep8",
    "pp2·dp2·tp2·ep4·v2",
    "dp2·cp2·tp2·ep2·etp2",
    "pp4:2+1+1+1·tp2·ep2",
    "r2·cp2·tp2·ep4",
    "pp2:1+1+2+1·cp4·ep2·etp2·v2",
    "dp4·tp2·ep8",
    "cp8",
]


def test_walk_with_experts(cluster: LocalCluster) -> None:
    """Expert, context and interleaved layouts: what every worker holds after a move is bitwise the unsharded state."""
    schema = expert_schema()
    reference = random_reference(schema, seed=4)
    with connect(cluster.address):
        places = [NodeAffinitySchedulingStrategy(node.node_id, soft=False) for node in cluster.nodes]
        names = [f"node-{index}" for index in range(len(places))]
        keepers = {
            name: KeeperActor.options(num_cpus=0, max_concurrency=16, scheduling_strategy=place).remote(name, 600.0)
            for name, place in zip(names, places, strict=True)
        }
        node_of = [names[rank * len(names) // NUM_WORKERS] for rank in range(NUM_WORKERS)]
        movers = [
            Mover.options(scheduling_strategy=places[names.index(node)]).remote(
                keepers, node, names[(names.index(node) + 1) % len(names)]
            )
            for node in node_of
        ]
        before = Layout.parse(EXPERT_WALK[0])
        ray.get([mover.fill.remote(1, before, rank, 4) for rank, mover in enumerate(movers)])
        for generation, text in enumerate(EXPERT_WALK[1:], start=2):
            layout = Layout.parse(text)
            held = _held_by(keepers, generation - 1)
            destinations = {rank: Destination(node, pieces(schema, layout, rank)) for rank, node in enumerate(node_of)}
            plan = plan_transfer(schema, held, destinations)
            assert plan.bytes_moved == plan.bytes_lower_bound
            moved = ray.get(
                [
                    mover.take_over.remote(generation, layout, rank, plan.fetches[rank])
                    for rank, mover in enumerate(movers)
                ]
            )
            assert sum(one.received for one in moved) == plan.bytes_moved
            assert_all_hold(reference, _held_by(keepers, generation), schema, layout)
            ray.get([keeper.release.remote(generation) for keeper in keepers.values()])
        for actor in (*movers, *keepers.values()):
            ray.kill(actor)


def _held_by(keepers: dict[str, Any], generation: int) -> list[Holding]:
    inventories = ray.get([keeper.inventory.remote() for keeper in keepers.values()])
    return [holding for found in inventories for holding in found if holding.snapshot.generation == generation]
