"""What an engine says of its state, a user's own module, and what survives a generation: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpointing.layout import Layout
from checkpointing.schema import pieces
from tests.workers.engine_ranks import (
    CPU,
    MODEL,
    OPTIMIZER,
    SEQ_LEN,
    VOCAB,
    Ranks,
    Rows,
    gather,
    problem_of,
    program,
    train,
)
from workers.engine import Engine, Verdict, describe
from workers.optimizer import learning_rate
from workers.parallelize import forget_meshes
from workers.warm_up import warm_up


class OwnModule(nn.Module):
    """A user's model with tied weights, dropout, a derived buffer and no argument but the tokens."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.register_buffer("ramp", torch.linspace(0, 1, seq_len)[:, None], persistent=False)
        self.mix = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(16, vocab_size, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.ramp
        return self.output(hidden + self.dropout(self.mix(hidden).relu()))


class Quiet(OwnModule):
    """Without dropout, whose random numbers differ between layouts; with the segments as a second argument."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size, seq_len)
        self.dropout = nn.Identity()

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + segments[..., None] / 10)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_schema_names_parameters_and_discovered_states() -> None:
    schema = describe(program())
    names = [spec.name for spec in schema.tensors]
    parameters = [name for name in names if "/" not in name]
    assert names[len(parameters) :] == [
        f"{state}/{name}" for state in ("step", "exp_avg", "exp_avg_sq") for name in parameters
    ]
    by_name = {spec.name: spec for spec in schema.tensors}
    assert schema.num_layers == MODEL.num_layers
    assert by_name["embedding.weight"].where == "first" and by_name["output.weight"].where == "last"
    wo = by_name["exp_avg/layers.3.attention.wo.weight"]
    assert (wo.layer, wo.tp_dim, wo.shape) == (3, 1, (32, 32))
    step = by_name["step/layers.3.attention.wo.weight"]
    assert (step.layer, step.tp_dim, step.shape) == (3, None, ())
    assert schema.aliases == ()
    assert describe(program(OwnModule)).canonical("exp_avg/output.weight") == "exp_avg/embedding.weight"


def test_own_module_over_data_ranks(ranks: Ranks) -> None:
    job = program(Quiet, precision="fp64", num_rows=5)
    alone, *_ = ranks.run(train, Layout(), job, 3)
    for text in ("dp3", "r2·dp2", "r3"):
        results = ranks.run(train, Layout.parse(text), job, 3)
        assert list(gather([r.weights for r in results], job)) == ["embedding.weight", "mix.weight", "mix.bias"]
        for name, array in gather([alone.final], job).items():
            np.testing.assert_allclose(gather([r.final for r in results], job)[name], array, atol=1e-10, err_msg=text)
        np.testing.assert_allclose(results[0].losses, alone.losses, rtol=1e-10)
        assert results[0].eval_loss == pytest.approx(alone.eval_loss, rel=1e-10)


def test_own_module_matches_plain_torch(ranks: Ranks) -> None:
    (alone,) = ranks.run(train, Layout(), program(Quiet, precision="fp64", num_rows=5), 1)
    torch.manual_seed(0)
    model = Quiet(VOCAB, SEQ_LEN).double()
    rows = Rows.random(5, 0)
    logits = model(torch.from_numpy(rows.tokens).long(), torch.from_numpy(rows.segments).long())
    targets = torch.from_numpy(rows.targets).long().flatten()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100)
    assert alone.losses[0] == pytest.approx(loss.item(), rel=1e-12)


def test_dropout_is_the_same_when_a_batch_is_run_again(ranks: Ranks) -> None:
    first, second = (ranks.run(train, Layout.parse("dp2"), program(OwnModule), 3) for _ in range(2))
    assert first[0].losses == second[0].losses


def skip_and_fill(layout: Layout, rank: int) -> tuple[bool, bool, list[float]]:
    """A step that is not finite; then the state written from outside as a recovery does."""
    engine = Engine(program(), layout, rank, CPU)
    engine.initialize()
    state = engine.local_state()
    assert tuple(state) == pieces(engine.schema, layout, rank)
    rows = Rows.random(8, 0).part(layout, rank, 1)
    before = [tensor.clone() for tensor in state.values()]
    poison = next((tensor for piece, tensor in state.items() if piece.name == "norm.weight"), None)
    if poison is not None:
        poison.fill_(float("nan"))
    engine.forward_backward(rows)
    verdict = engine.vote(stop=rank == 0, snapshot_s=1.0, step_s=2.0)
    assert verdict.stop and verdict.snapshot_cost == 0.5
    engine.apply(verdict, 1)
    if poison is not None:
        poison.fill_(1.0)
    moved = any(not torch.equal(a, b) for a, b in zip(before, state.values(), strict=True))

    losses = []
    for _ in range(2):  # the same step from the same state, the second time after the state was written back
        engine.forward_backward(rows)
        losses.append(engine.vote(stop=False).loss)
        engine.apply(Verdict(losses[-1], 1.0, True, False, True), 1)
        for tensor, saved in zip(state.values(), before, strict=True):
            tensor.copy_(saved)
    return verdict.finite, moved, losses


@pytest.mark.parametrize("text", ["dp2", "pp2·dp2", "tp2"])
def test_skipped_step_moves_nothing_and_state_can_be_written(ranks: Ranks, text: str) -> None:
    for finite, moved, losses in ranks.run(skip_and_fill, Layout.parse(text)):
        assert not finite and not moved
        assert losses[0] == losses[1]


def leftovers(layout: Layout, rank: int) -> int:
    train(layout, rank, program(), 1)
    forget_meshes()
    gc.collect()
    return sum(isinstance(thing, dist.device_mesh.DeviceMesh) for thing in gc.get_objects())


@pytest.mark.parametrize("text", ["dp2", "pp2·dp2·tp2"])
def test_nothing_keeps_an_old_mesh_alive(ranks: Ranks, text: str) -> None:
    assert ranks.run(leftovers, Layout.parse(text)) == [0] * Layout.parse(text).size


def test_same_ranks_in_new_groups(ranks: Ranks) -> None:
    """Ranks 0 and 1 are tensor-parallel peers in both; DTensor must not answer with the mesh of the first layout."""
    for text in ("pp3·tp2", "pp4·tp2"):
        ranks.run(train, Layout.parse(text), program(), 1)


def test_warm_up_leaves_no_group() -> None:
    warm_up(CPU)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        ("tp8", {}, "has tp8, which does not divide model.num_kv_heads=4"),
        ("tp3", {}, "has tp3, which does not divide model.num_heads=8"),
        ("pp6", {}, "has 6 pipeline stages, more than model.num_layers=5"),
        ("r2·dp4", {"num_rows": 7}, "has 8 data ranks, more than training.global_batch_rows=7"),
        ("tp2", {"model": OwnModule}, "a model of your own"),
        ("pp2·dp2", {"model": OwnModule}, "a model of your own"),
    ],
)
def test_layouts_that_cannot_be_used(text: str, changes: dict, sentence: str) -> None:
    assert sentence in (problem_of(program(**changes), Layout.parse(text)) or "")


def test_modules_that_cannot_be_used() -> None:
    for build, sentence in [
        (lambda vocab_size, seq_len: "no module", "returned str"),
        (
            lambda vocab_size, seq_len: nn.Sequential(nn.Embedding(vocab_size, 4), nn.BatchNorm1d(4)),
            "running statistics",
        ),
        (lambda vocab_size, seq_len: nn.Identity(), "no trainable parameters"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            describe(program(build))


def test_learning_rate() -> None:
    config = OPTIMIZER.model_copy(update={"warmup_steps": 4, "decay_steps": 12})
    rates = [learning_rate(config, step, 100) for step in range(1, 21)]
    assert rates[:4] == pytest.approx([config.lr * k / 4 for k in (1, 2, 3, 4)])
    assert rates[7] == pytest.approx(config.lr * 0.55)  # half way between the peak and a tenth of it
    assert rates[11:] == pytest.approx([config.lr * 0.1] * 9)
    constant = OPTIMIZER.model_copy(update={"warmup_steps": 0, "decay_steps": None})
    assert learning_rate(constant, 1, None) == learning_rate(constant, 10**6, None) == constant.lr
