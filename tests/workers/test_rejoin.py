"""An engine that goes on over the groups of another generation, wherever in a step the one before came to its end."""

from __future__ import annotations

import itertools

import pytest
import torch

from checkpointing.layout import Layout
from tests.workers.engine_ranks import CPU, Rows, program
from tests.workers.fenced_ranks import Pool, Rank
from workers.engine import Engine

# Blocks are counted over all forward passes of a step: before the later ones, gradients have been accumulated.
PARTS = (0, 3, 7, "layers.3.attention", "layers.1.feed_forward", "norm")


class Interrupted(Exception):
    pass


def interrupt(rank: Rank, engine: Engine, rows: Rows, part: int | str) -> bool:
    """Begin a step that ends before that block of the forward pass, or in that module's backward pass.

    The fence gets the other ranks out. Returns whether the step ended here or there.
    """
    num_blocks = itertools.count()

    def stop(*_: object) -> None:
        raise Interrupted

    def check() -> None:
        if next(num_blocks) == part:
            stop()

    engine.check = check
    modules = [module for name, module in engine._module.named_modules() if name == part]
    hooks = [module.register_full_backward_pre_hook(stop) for module in modules]
    try:
        engine.forward_backward(rows)
        engine.vote(stop=False)
        return False
    except (Interrupted, RuntimeError) as error:  # schedules wrap what is raised
        rank.fence.trip(error)
        return True
    finally:
        engine.check = lambda: None
        for hook in hooks:
            hook.remove()


def go_on(rank: Rank, number: int, index: int, world_size: int, layout: Layout) -> float:
    """Asserts that a step over new groups gives what it gave before, bitwise; returns the sum of all gradients."""
    numbers = itertools.count(number * 100)
    generation = rank.form(next(numbers), index, world_size)
    engine = Engine(program(), layout, index, CPU)
    engine.initialize()
    state = {piece: tensor.clone() for piece, tensor in engine.local_state().items()}
    rows = Rows.random(8, 0).part(layout, index, 1)
    engine.forward_backward(rows)
    expected = engine.vote(stop=False)
    gradients = {name: engine.gradient(name).clone() for name in engine._leaves}
    for part in PARTS:
        assert interrupt(rank, engine, rows, part), part
        generation.dissolve()
        generation = rank.form(next(numbers), index, world_size)
        engine.rejoin()
        assert all(torch.equal(tensor, state[piece]) for piece, tensor in engine.local_state().items()), part
        engine.forward_backward(rows)
        assert engine.vote(stop=False) == expected, part
        assert all(torch.equal(engine.gradient(name), gradient) for name, gradient in gradients.items()), part
    generation.dissolve()
    return sum(gradient.abs().sum().item() for gradient in gradients.values())


@pytest.mark.parametrize("text", ["dp3", "r2·dp2", "r2", "dp2·tp2", "pp2·dp2", "pp2·tp2"])
def test_an_engine_goes_on_over_new_groups(pool: Pool, text: str) -> None:
    layout = Layout.parse(text)
    assert all(total > 0 for total in pool.run(layout.size, go_on, layout))
