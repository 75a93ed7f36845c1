"""Every layout does what one plain process does: the same loss, the same gradients, the same first weights."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from checkpointing.layout import Layout
from tests.workers.engine_ranks import (
    MODEL,
    NUM_RANKS,
    OPTIMIZER,
    VOCAB,
    Ranks,
    Rows,
    gather,
    problem_of,
    program,
    train,
)
from workers.models.decoder import Decoder

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
ALWAYS = "1 tp2 dp7 pp5 r2·pp2 pp3·tp2 r2·dp2·tp2 dp2·tp2·pp2"


def possible_layouts() -> list[Layout]:
    layouts = []
    for pp, r, dp, tp in itertools.product(range(1, NUM_RANKS + 1), repeat=4):
        layout = Layout(pp=pp, r=r, dp=dp, tp=tp)
        if layout.size <= NUM_RANKS and problem_of(program(), layout) is None:
            layouts.append(layout)
    return layouts


def chosen_layouts() -> list[Layout]:
    always = [Layout.parse(text) for text in ALWAYS.split()]
    others = [layout for layout in possible_layouts() if layout not in always]
    proving = os.environ.get("PLANARIA_PROVE") == "1"
    return always + (others if proving else random.Random(0).sample(others, 2))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


class Reference:
    """The decoder run directly: one process, no engine, torch's own AdamW and clipping over whole tensors."""

    def __init__(self, weights: dict[str, np.ndarray], precision: str, num_rows: int, num_steps: int) -> None:
        dtype = torch.float64 if precision == "fp64" else torch.float32
        model = Decoder(MODEL, VOCAB, range(MODEL.num_layers)).to(dtype)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        decayed = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
        )
        self.losses, self.grad_norms = [], []
        # Two warm-up steps to 1e-2, then a cosine to a tenth of it at step 5.
        self.rates = [0.005, 0.01, 0.01 * (0.1 + 0.9 * 0.75), 0.01 * (0.1 + 0.9 * 0.25), 0.001][:num_steps]
        self.gradients: dict[str, np.ndarray] = {}
        for step, rate in enumerate(self.rates):
            loss = self._loss(model, Rows.random(num_rows, step))
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                self.gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
            self.losses.append(loss.item())
            self.grad_norms.append(norm.item())
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.final = {name: p.detach().numpy() for name, p in model.named_parameters()}
        with torch.no_grad():
            self.eval_loss = self._loss(model, Rows.random(6, 1000)).item()

    @staticmethod
    def _loss(model: Decoder, rows: Rows) -> torch.Tensor:
        arrays = (rows.tokens, rows.positions, rows.segments, rows.targets)
        tokens, positions, segments, targets = (torch.from_numpy(array).long() for array in arrays)
        logits = model(tokens, positions, segments)
        picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return -picked[targets >= 0].sum() / rows.num_valid


@cache
def first_weights(precision: str) -> tuple[tuple[str, np.ndarray], ...]:
    """What the one-worker layout starts from; the reference and all other layouts are held to it."""
    ranks = Ranks()
    try:
        (alone,) = ranks.run(train, Layout(), program(precision=precision), 0)
    finally:
        ranks.close()
    return tuple(gather([alone.weights], program(precision=precision)).items())


@cache
def reference(precision: str, num_rows: int, num_steps: int) -> Reference:
    return Reference(dict(first_weights(precision)), precision, num_rows, num_steps)


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> None:
    """DESIGN.md's invariant 3."""
    assert ours.keys() >= theirs.keys()
    total = np.sqrt(sum((array**2).sum() for array in theirs.values()))
    for name, array in theirs.items():
        error = np.linalg.norm(ours[name] - array)
        assert error <= tolerance * (np.linalg.norm(array) + 1e-3 * total), f"{name}: {error}"


def assert_parity(ranks: Ranks, layout: Layout, precision: str, num_rows: int, num_steps: int, **training) -> None:
    job = program(num_rows=num_rows, precision=precision, **training)
    expected = reference(precision, num_rows, num_steps)
    results = ranks.run(train, layout, job, num_steps)
    tolerance = TOLERANCE[precision]

    weights = gather([result.weights for result in results], job)
    first = dict(first_weights(precision))
    assert weights.keys() == first.keys()
    for name, array in first.items():
        assert np.array_equal(weights[name], array), f"{layout}: {name} starts from other weights"

    assert_close(gather([r.gradients for r in results], job), expected.gradients, tolerance)
    if precision == "fp64":
        assert_close(gather([r.final for r in results], job), expected.final, tolerance)
    for result in results:
        assert result.losses == results[0].losses and result.grad_norms == results[0].grad_norms
        np.testing.assert_allclose(result.losses, expected.losses, rtol=tolerance)
        np.testing.assert_allclose(result.grad_norms, expected.grad_norms, rtol=max(tolerance, 1e-9))
        np.testing.assert_allclose(result.rates, expected.rates, rtol=1e-12)
        np.testing.assert_allclose(result.eval_loss, expected.eval_loss, rtol=tolerance)


@pytest.mark.parametrize("layout", chosen_layouts(), ids=str)
def test_fp64_parity(ranks: Ranks, layout: Layout) -> None:
    """Loss, gradients and clipping over five steps. Nine rows: uneven and padded over most numbers of data ranks."""
    assert max(reference("fp64", 9, 5).grad_norms) > OPTIMIZER.max_grad_norm, "nothing was clipped"
    assert_parity(ranks, layout, "fp64", num_rows=9, num_steps=5, micro_batch_rows=2)


@pytest.mark.parametrize("text", ["1", "dp3", "tp2·pp2", "r2·dp2·pp2", "pp3:1+3+1·dp2"])
def test_fp32_parity(ranks: Ranks, text: str) -> None:
    """Five rows: over dp3 one data rank has a row less and runs a micro-batch that counts for nothing."""
    assert_parity(ranks, Layout.parse(text), "fp32", num_rows=5, num_steps=5)


@pytest.mark.parametrize("text", ["pp2", "dp2·pp3"])
def test_gpipe_parity(ranks: Ranks, text: str) -> None:
    assert_parity(ranks, Layout.parse(text), "fp64", num_rows=9, num_steps=5, schedule="gpipe")


@pytest.mark.parametrize("text", ["1", "dp2·tp2·pp2", "r2·dp3"])
def test_same_layout_is_bitwise_equal(ranks: Ranks, text: str) -> None:
    layout, job = Layout.parse(text), program(precision="fp32")
    first, second = (ranks.run(train, layout, job, 3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses and one.grad_norms == other.grad_norms
        assert one.final.keys() == other.final.keys()
        assert all(np.array_equal(one.final[piece], other.final[piece]) for piece in one.final)


@pytest.mark.parametrize("text", ["1", "dp2·tp2·pp2"])
def test_bf16_follows_fp32(ranks: Ranks, text: str) -> None:
    results = ranks.run(train, Layout.parse(text), program(precision="bf16"), 3)
    np.testing.assert_allclose(results[0].losses, reference("fp32", 8, 3).losses, rtol=0.02)
    assert all(array.dtype == np.float32 for array in results[0].final.values())
