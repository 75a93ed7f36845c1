"""Eight processes that stay up and play the ranks of one layout after another, and the rows that they train on."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpointing.layout import Layout
from checkpointing.schema import Piece
from workers.config import DecoderConfig, OptimizerConfig, TrainingConfig
from workers.engine import Engine, describe
from workers.limits import layout_problem
from workers.program import Program

NUM_RANKS = 8
SEQ_LEN, VOCAB = 12, 72
CPU = torch.device("cpu")
# Sizes that most layouts divide unevenly: over dp3, dp5 and dp7 some shards are padded and some are empty.
MODEL = DecoderConfig(dim=32, num_layers=5, num_heads=8, num_kv_heads=4, ffn_dim=40)
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, max_grad_norm=0.5)


def program(model: Any = MODEL, num_rows: int = 8, **training: Any) -> Program:
    defaults = {"global_batch_rows": num_rows, "micro_batch_rows": 1, "max_steps": 5, "eval_rows": 6}
    return Program(model, OPTIMIZER, TrainingConfig(**{**defaults, **training}), VOCAB, SEQ_LEN)


def problem_of(program: Program, layout: Layout) -> str | None:
    return layout_problem(layout, program.model, program.vocab_size, program.training.global_batch_rows)


@dataclass(frozen=True)
class Rows:
    """A global batch, or one data rank's part of it."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    num_valid: int
    cursor: int

    @classmethod
    def random(cls, num_rows: int, seed: int) -> Rows:
        """Packed rows of a few documents each; the last tokens of a row are padding without targets."""
        rng = np.random.default_rng(seed)
        text = rng.integers(0, VOCAB, (num_rows, SEQ_LEN + 1)).astype(np.int32)
        segments = np.sort(rng.integers(1, 4, (num_rows, SEQ_LEN)), axis=1).astype(np.int32)
        valid = np.arange(SEQ_LEN) < rng.integers(SEQ_LEN // 2, SEQ_LEN + 1, (num_rows, 1))
        segments[~valid] = 0
        starts = np.maximum.accumulate(
            np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(SEQ_LEN), 0), axis=1
        )
        positions = (np.arange(SEQ_LEN) - starts).astype(np.int32)
        targets = np.where(valid, text[:, 1:], -100).astype(np.int32)
        return cls(text[:, :-1].copy(), targets, positions, segments, int(valid.sum()), seed)

    def part(self, layout: Layout, rank: int, micro_batch_rows: int) -> Rows:
        """Rows of one rank's data rank, dealt as evenly as they go and filled up with rows that have no targets."""
        data_rank = layout.data_rank(layout.coordinates(rank))
        dealt = np.array_split(np.arange(len(self.tokens)), layout.data_size)
        num_micro = -(-len(dealt[0]) // micro_batch_rows)
        missing = num_micro * micro_batch_rows - len(dealt[data_rank])

        def take(array: np.ndarray, fill: int) -> np.ndarray:
            return np.concatenate([array[dealt[data_rank]], np.full((missing, SEQ_LEN), fill, np.int32)])

        return replace(
            self,
            tokens=take(self.tokens, 0),
            targets=take(self.targets, -100),
            positions=take(self.positions, 0),
            segments=take(self.segments, 0),
        )


@dataclass(frozen=True)
class Trained:
    """What one rank saw: its first weights and first gradients by piece, and the numbers of every step."""

    weights: dict[Piece, np.ndarray]
    gradients: dict[Piece, np.ndarray]
    final: dict[Piece, np.ndarray]
    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    eval_loss: float


def train(layout: Layout, rank: int, program: Program, num_steps: int) -> Trained:
    """Play a rank for some steps."""
    training = program.training
    engine = Engine(program, layout, rank, CPU)
    engine.initialize()
    state = engine.local_state()
    names = {p.name for p in state if "/" not in p.name}
    weights = {piece: tensor.numpy().copy() for piece, tensor in state.items() if piece.name in names}
    addresses = [tensor.data_ptr() for tensor in state.values()]
    gradients, losses, grad_norms, rates = {}, [], [], []
    for step in range(num_steps):
        rows = Rows.random(training.global_batch_rows, step).part(layout, rank, training.micro_batch_rows)
        engine.forward_backward(rows)
        verdict = engine.vote(stop=False)
        if step == 0:
            gradients = {p: engine.gradient(p.name).numpy().copy() for p in weights}
        rates.append(engine.apply(verdict, step + 1))
        losses.append(verdict.loss)
        grad_norms.append(verdict.grad_norm)
    rows = Rows.random(training.eval_rows, 1000).part(layout, rank, training.micro_batch_rows)
    eval_loss = engine.evaluate(rows)
    assert addresses == [tensor.data_ptr() for tensor in engine.local_state().values()], "state moved in memory"
    final = {piece: tensor.numpy().copy() for piece, tensor in engine.local_state().items()}
    return Trained(weights, gradients, final, losses, grad_norms, rates, eval_loss)


def gather(held: list[dict[Piece, np.ndarray]], program: Program) -> dict[str, np.ndarray]:
    """Canonical tensors from all ranks' pieces; every element must be held, and replicas must agree bitwise."""
    full: dict[str, np.ndarray] = {}
    shapes = {spec.name: spec.shape for spec in describe(program).tensors}
    covered: dict[str, np.ndarray] = {}
    for pieces in held:
        for piece, array in pieces.items():
            box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
            whole = full.setdefault(piece.name, np.zeros(shapes[piece.name], array.dtype))
            seen = covered.setdefault(piece.name, np.zeros(shapes[piece.name], bool))
            assert np.array_equal(whole[box][seen[box]], array[seen[box]]), f"replicas of {piece.name} differ"
            whole[box], seen[box] = array, True
    assert all(seen.all() for seen in covered.values()), "not every element is held"
    return full


class Ranks:
    """The processes; ``run`` plays a function on the ranks of a layout over process groups made for that run alone."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "workers.engine"])
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._pipes, self._processes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], layout: Layout, *args: Any) -> list[Any]:
        """Results of ``function(layout, rank, *args)`` by rank; raises AssertionError with the first rank's error."""
        self._runs += 1
        store = str(Path(self._folder.name, str(self._runs)))
        for pipe in self._pipes[: layout.size]:
            pipe.send((function, layout, store, args))
        answers = [pipe.recv() for pipe in self._pipes[: layout.size]]
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"layout {layout}, rank {rank}: {error}"
        return [result for result, _ in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Any, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, layout, store, args = pipe.recv()
        except EOFError:
            return
        result = error = None
        dist.init_process_group(store=dist.FileStore(store, layout.size), rank=rank, world_size=layout.size)
        try:
            result = function(layout, rank, *args)
        except BaseException:
            error = traceback.format_exc()
        pipe.send((result, error))
        if error is not None:
            return
        dist.destroy_process_group()
