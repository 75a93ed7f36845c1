"""What is left of the state, and which of it to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpointing.cover import StateLost, may_replace_others, newest_complete
from checkpointing.decoded import with_decoded
from checkpointing.durable import checkpoint_holdings, newest_verified
from checkpointing.schema import Schema
from checkpointing.transfer import Holding
from orchestrator.generation import LAST_CALL_S, take_inventory
from orchestrator.ledger import Ledger
from orchestrator.nodes import Nodes
from orchestrator.recovery import Source


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
        """Fresh weights, or the newest verified checkpoint when the run's folder has one."""
        source = self._durable()
        if source is None:
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

    def newest(self, holdings: Sequence[Holding], made: int) -> Source:
        """The source to go on from, when ``made`` steps are committed. Raises StateLost when there is none."""
        trusted = [holding for holding in holdings if holding.key not in self._unusable]
        usable = [holding for holding in with_decoded(trusted) if holding.key not in self._unusable]
        try:
            state = newest_complete(self._schema, usable)
        except StateLost as lost:
            source = self._durable()
            if source is not None:
                self._ledger.event("fallback", cause=str(lost), step=source.step)
                return source
            if made == 0:
                return Source.fresh()
            raise
        replaces = may_replace_others(self._schema, trusted, state, self._nodes.domains)
        return Source.of([h for h in usable if (h.snapshot.generation, h.snapshot.step) == state], "memory", replaces)

    def _durable(self) -> Source | None:
        checkpoint, problems = newest_verified(self._directory)
        for problem in problems:
            self._ledger.event("checkpoint_damaged", cause=problem)
        return Source.of(checkpoint_holdings(checkpoint), "disk") if checkpoint is not None else None
