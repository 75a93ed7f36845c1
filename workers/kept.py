"""What a worker process keeps from one generation to the next, beside its imports."""

from __future__ import annotations

import gc

import torch

from workers.engine import Engine
from workers.plan import Order
from workers.snapshots import MappedArena


class Kept:
    """A worker process serves one job, whose program never changes: an engine fits if layout and rank do.

    arena  where this process writes its snapshots
    state  (generation, step) of the state that the engine's tensors are; None while they are written
    """

    def __init__(self) -> None:
        self.arena = MappedArena()
        self.state: tuple[int, int] | None = None
        self._engine: Engine | None = None

    def engine_for(self, order: Order, device: torch.device) -> Engine:
        """The engine that plays ``order``'s rank over the default process group: the last one, if it did so before."""
        if self._engine is not None and (self._engine.layout, self._engine.rank) == (order.layout, order.rank):
            self._engine.rejoin()
        else:
            self.drop_engine()
            self._engine = Engine(order.program, order.layout, order.rank, device)
        return self._engine

    def drop_engine(self) -> None:
        """Let go of the engine's memory; at once, since the next one wants it and an engine is full of cycles."""
        self._engine = self.state = None
        gc.collect()

    def release(self) -> None:
        """Let go of everything."""
        self.drop_engine()
        self.arena.unmap()
