"""Durable checkpoints, written by the keepers while training goes on; the driver only plans and commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from checkpointing.checks import violations
from checkpointing.config import CheckpointConfig, parse_size
from checkpointing.cover import StateLost
from checkpointing.decoded import with_decoded
from checkpointing.durable import commit
from checkpointing.holding import Holding, HoldingUnusable
from checkpointing.publish import begin, give_up, list_checkpoints, step_of, sweep
from checkpointing.retention import retain
from checkpointing.schema import Schema
from checkpointing.shares import plan_shares
from orchestrator.generation import take_inventory
from orchestrator.ledger import Ledger
from orchestrator.nodes import Nodes
from orchestrator.runfolder import RunFolder

_NAMED = 3  # of what is wrong with a state; it is mostly the same for all of its tensors


class Saver:
    """Writes one checkpoint at a time into the run's ``checkpoints`` and keeps those that ``config`` asks for."""

    def __init__(self, folder: RunFolder, config: CheckpointConfig, ledger: Ledger) -> None:
        self.directory = folder.location("checkpoints")
        self.folder = folder
        self._config = config
        self._max_bytes_per_s = parse_size(config.max_bandwidth) if config.max_bandwidth else None
        self._ledger = ledger
        self._thread: threading.Thread | None = None

    def check_shared(self, nodes: Nodes) -> None:
        """Raise ValueError when a node does not see the run's folder, since its keeper could not write there.

        All nodes see object storage. What an earlier driver left there unfinished is removed.
        """
        sweep(self.directory)
        if not self.folder.is_local:
            return
        with self.folder.probe() as path:
            seen = {node.name: node.keeper.sees.remote(path) for node in nodes}
            blind = [name for name, ref in seen.items() if not ray.get(ref)]
        if blind:
            raise ValueError(
                f"{', '.join(blind)} cannot see the run's folder {self.folder.url}; "
                "run.storage_path must be on storage that all nodes share"
            )

    def save_in_background(self, schema: Schema, nodes: Nodes, generation: int, step: int) -> None:
        """Save a step whose snapshots the workers pinned. Does nothing while the checkpoint before is being written."""
        if self._thread is not None and self._thread.is_alive():
            self._ledger.event("checkpoint_skipped", step=step, cause="the last one is still being written")
            return
        found, _ = take_inventory(nodes, set(nodes.domains))
        holdings = [holding for holding in found if holding.role == "pin"]  # the others are written over meanwhile
        keepers = {node.name: node.keeper for node in nodes}
        self._thread = threading.Thread(
            target=self._try, args=(schema, keepers, holdings, generation, step, True), name="saver", daemon=True
        )
        self._thread.start()

    def save(self, schema: Schema, nodes: Nodes, generation: int, step: int) -> str | None:
        """Save the last step of a generation that has stopped; returns the checkpoint's location, None when it failed.

        Step 0 is not worth a checkpoint, and a step that has one keeps it.
        """
        self.wait()
        if step == 0:
            return None
        there = [checkpoint for checkpoint in list_checkpoints(self.directory) if step_of(checkpoint) == step]
        if there:
            return there[-1]
        holdings, _ = take_inventory(nodes, set(nodes.domains))
        return self._try(schema, {node.name: node.keeper for node in nodes}, holdings, generation, step, False)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._thread is not None:
            self._thread.join()

    def _try(
        self, schema: Schema, keepers: dict, holdings: Sequence[Holding], generation: int, step: int, pinned: bool
    ) -> str | None:
        """A checkpoint that fails costs no training: the event says why, and the next one is tried."""
        started = time.monotonic()
        try:
            checkpoint = self._write(schema, keepers, holdings, generation, step)
        except (OSError, StateLost, HoldingUnusable, ray.exceptions.RayError) as error:
            # Pins make way for those of the next checkpoint, which may be due before this one is written.
            overtaken = pinned and isinstance(error, StateLost | HoldingUnusable)
            kind = "checkpoint_skipped" if overtaken else "checkpoint_failed"
            lost = isinstance(error, ray.exceptions.RayActorError)  # of which Ray tells at length
            self._ledger.event(kind, step=step, cause="a keeper died" if lost else str(error).splitlines()[-1])
            return None
        seconds = round(time.monotonic() - started, 3)
        self._ledger.event("checkpoint", step=step, path=checkpoint, seconds=seconds)
        return checkpoint

    def _write(self, schema: Schema, keepers: dict, holdings: Sequence[Holding], generation: int, step: int) -> str:
        state = [h for h in with_decoded(holdings) if (h.snapshot.generation, h.snapshot.step) == (generation, step)]
        wrong = [found for found in violations(schema, state) if found.kind != "missing"]  # else no attempt
        for violation in wrong[:_NAMED]:
            self._ledger.event("state_inconsistent", step=step, cause=str(violation))
        shares = plan_shares(schema, state)
        sweep(self.directory)
        attempt = begin(self.directory, step)
        writing = [
            keepers[node].write_durable.remote(step, generation, attempt.url, share, self._max_bytes_per_s)
            for node, share in shares.items()
        ]
        try:
            written = ray.get(writing)
            checkpoint = commit(attempt, schema, state[0].snapshot, [entry for entries in written for entry in entries])
        except Exception:  # an interrupt does not wait: the next driver sweeps
            ray.wait(writing, num_returns=len(writing))  # a keeper that still writes would make its files again
            give_up(attempt)  # on a full disk, half a checkpoint is in the way of what comes next
            raise
        try:
            retain(self.directory, self._config, self._metrics)
        except OSError as error:  # the checkpoint is there all the same
            self._ledger.event("retention_failed", step=step, cause=str(error))
        return checkpoint

    def _metrics(self) -> dict[int, dict[str, Any]]:
        self.folder.flush(force=True)
        return {line["step"]: line for line in self.folder.read_metrics()}
