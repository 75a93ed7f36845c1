"""What is left of the state, and which of it to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpointing.cover import StateLost, may_replace_others, newest_complete, tolerance
from checkpointing.decoded import with_decoded
from checkpointing.durable import checkpoint_holdings, newest_verified
from checkpointing.publish import list_checkpoints
from checkpointing.schema import Schema
from checkpointing.transfer import Holding
from orchestrator.generation import LAST_CALL_S, take_inventory
from orchestrator.ledger import Ledger
from orchestrator.nodes import Nodes
from orchestrator.recovery import Source
from workers.plan import Plan


class Survival:
    """Chooses sources: the newest complete snapshot in memory, else the newest verified checkpoint, else the beginning.

    ``directory`` is where the run's checkpoints are.
    """

    def __init__(self, schema: Schema, nodes: Nodes, directory: str, ledger: Ledger) -> None:
        self._schema, self._nodes, self._directory, self._ledger = schema, nodes, directory, ledger
        self._unusable: set[Any] = set()

    def distrust(self, key: Any) -> None:
        """A holding whose bytes are not what its digest says is no source any more."""
        self._unusable.add(key)

    def first(self) -> Source:
        """Fresh weights, or the newest verified checkpoint when the run's folder has any. Raises StateLost when it has
        some and none is whole: what was trained must not be trained anew without a word.
        """
        source = self._durable()
        if source is None:
            if list_checkpoints(self._directory):
                raise StateLost(
                    f"no checkpoint in {self._directory} is whole, so the run cannot go on; put one back, move them "
                    "away to begin again at step 1, or choose a new run.name"
                )
            return Source.fresh()
        self._ledger.event("resumed", step=source.step)
        return source

    def is_complete(self, holdings: Sequence[Holding]) -> bool:
        try:
            newest_complete(self._schema, with_decoded(holdings))
        except StateLost:
            return False
        return True

    def inventory(self) -> Sequence[Holding]:
        """What all keepers hold."""
        holdings, _ = take_inventory(self._nodes, set(self._nodes.domains))
        if not self.is_complete(holdings):  # a node that is only slow must not cost the state
            holdings, _ = take_inventory(self._nodes, set(self._nodes.domains), LAST_CALL_S)
        return holdings

    def newest(self, holdings: Sequence[Holding], made: int, plan: Plan | None) -> Source:
        """The source to go on from, when ``made`` steps are committed and ``plan`` was the last one.

        Raises StateLost when there is none, which names what is lost and the nodes that it was on.
        """
        trusted = [holding for holding in holdings if holding.key not in self._unusable]
        usable = [holding for holding in with_decoded(trusted) if holding.key not in self._unusable]
        try:
            state = newest_complete(self._schema, usable)
        except StateLost as lost:
            cause = f"{lost}{self._where(plan)}"
            source = self._durable()
            if source is not None:
                self._ledger.event("fallback", cause=cause, step=source.step)
                return source
            if made == 0:
                return Source.fresh()
            raise StateLost(cause, lost.missing) from None
        of_state = [h for h in trusted if (h.snapshot.generation, h.snapshot.step) == state]
        left = tolerance(self._schema, of_state, self._nodes.domains)
        self._ledger.event("exposed", step=state[1], survives=left)
        replaces = may_replace_others(self._schema, trusted, state, self._nodes.domains)
        return Source.of([h for h in usable if (h.snapshot.generation, h.snapshot.step) == state], "memory", replaces)

    def _where(self, plan: Plan | None) -> str:
        """Which nodes of those that are gone had what is lost, as the plan had it."""
        gone = [node for node in plan.all_nodes if node not in self._nodes] if plan else []
        lost = [guard for guard in plan.guards if guard.source(gone) is None] if plan else []
        nodes = sorted({node for guard in lost for node in guard.nodes if node in gone})
        return f"; it was on {', '.join(nodes)}" if nodes else ""

    def _durable(self) -> Source | None:
        checkpoint, problems = newest_verified(self._directory)
        for problem in problems:
            self._ledger.event("checkpoint_damaged", cause=problem)
        return Source.of(checkpoint_holdings(checkpoint), "disk") if checkpoint is not None else None
