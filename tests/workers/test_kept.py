"""What a worker process keeps for the next generation, and what it lets go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.layout import Layout
from tests.workers.engine_ranks import CPU, program
from workers.kept import Kept


@contextmanager
def a_generation() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def order(layout: Layout) -> Any:
    return SimpleNamespace(program=program(), layout=layout, rank=0)


def test_the_engine_of_the_same_rank_and_layout_is_kept_with_its_state() -> None:
    kept = Kept()
    with a_generation():
        engine = kept.engine_for(order(Layout()), CPU)
        engine.initialize()
        kept.state = 1, 0
        before = {piece: tensor.clone() for piece, tensor in engine.local_state().items()}
    with a_generation():
        assert kept.engine_for(order(Layout()), CPU) is engine
        assert kept.state == (1, 0)
        assert all(torch.equal(tensor, before[piece]) for piece, tensor in engine.local_state().items())
    with a_generation():
        other = kept.engine_for(order(Layout(layers=(5,))), CPU)
        assert other is not engine and other.layout == Layout(layers=(5,))
        assert kept.state is None, "its memory holds nothing yet"
