"""One rank's training step under any layout: forward and backward, a vote of all ranks, then the optimizer moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import loss_parallel

from checkpointing.layout import Layout
from checkpointing.schema import Piece, pieces
from workers.models.spec import derive_seed, describe, model_spec, stored_dtype, token_loss
from workers.optimizer import build_optimizer, learning_rate, materialise
from workers.parallelize import forget_meshes, go_on, make_mesh, parallelize
from workers.program import Program


class RankBatch(Protocol):
    """This data rank's rows of one global batch: int32 arrays [num_micro * micro_rows, S].

    ``targets`` are negative where no token is to be predicted. ``num_valid`` counts the valid tokens of the *global*
    batch, ``cursor`` says which batch it is. All ranks have equally many rows; those missing are rows without targets.
    """

    tokens: Any
    targets: Any
    positions: Any
    segments: Any
    num_valid: int
    cursor: Any


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on after the backward pass, equal on every rank.

    loss           sum of token losses / global valid tokens
    grad_norm      global L2 norm of the gradients before clipping
    finite         loss and gradients are finite: the step may be applied
    stop           some rank asks to stop
    snapshot_cost  seconds a snapshot costs over seconds a step takes without one, over all ranks
    """

    loss: float
    grad_norm: float
    finite: bool
    stop: bool
    snapshot_cost: float


class Engine:
    """Model, optimizer and schedule of one rank of a layout, over the default process group of ``layout.size`` ranks.

    Memory is allocated but undefined until ``initialize()`` or until the tensors of ``local_state()`` are written. When
    the groups' generation is over, however it ended, the engine may ``rejoin`` another one as the same rank.
    ``check`` is called at every part of a forward pass; what it raises ends the step.
    """

    def __init__(self, program: Program, layout: Layout, rank: int, device: torch.device) -> None:
        assert dist.get_world_size() == layout.size and dist.get_rank() == rank
        self.schema = describe(program)
        self.layout, self.rank = layout, rank
        self.check: Callable[[], None] = lambda: None
        self._program, self._device = program, device
        self._at = layout.coordinates(rank)
        self._first, self._last = self._at.pp == 0, self._at.pp == layout.pp - 1
        self._spec = model_spec(program)
        self._compute = torch.bfloat16 if program.training.precision == "bf16" else stored_dtype(program)
        forget_meshes()
        self._mesh = make_mesh(device, layout)

        layers = layout.stage_layers(self._at.pp, self._spec.num_layers)
        module = self._spec.build(layers, self._first, self._last)
        parallelize(module, self._spec, self._mesh, layout, self._compute)
        if any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=device)
        else:
            module.to(device)
        assert isinstance(module, FSDPModule)
        for unit in self._spec.fsdp_units(module):
            unit.register_forward_pre_hook(lambda *_: self.check())
        self._module = module
        self._parameters = dict(module.named_parameters())
        # The optimizer works on plain local shards that share memory with the DTensors: no dispatch, same arithmetic.
        self._leaves = {name: nn.Parameter(p.to_local().detach()) for name, p in self._parameters.items()}
        self._optimizer = build_optimizer(program.optimizer, self._leaves.values())
        materialise(self._optimizer)
        self._schedules: dict[int, ScheduleGPipe | Schedule1F1B] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def rejoin(self) -> None:
        """Go on as the same rank of the same layout over the default group of a new generation.

        The state stays as it is; all else that an interrupted step has left is dropped. All ranks of the layout must
        rejoin or be built at the same time.
        """
        assert dist.get_world_size() == self.layout.size and dist.get_rank() == self.rank
        go_on(self._module, self._mesh, make_mesh(self._device, self.layout))
        self._schedules.clear()
        self._module.train()

    # State

    def local_state(self) -> dict[Piece, Tensor]:
        """This rank's tensors by piece, in schema order: contiguous, not copies; writing to them changes the state."""
        tensors: dict[str, Tensor] = {name: leaf.detach() for name, leaf in self._leaves.items()}
        for name, leaf in self._leaves.items():
            tensors.update({f"{state}/{name}": value for state, value in self._optimizer.state[leaf].items()})
        held = {piece: tensors[piece.name] for piece in pieces(self.schema, self.layout, self.rank)}
        for piece, tensor in held.items():
            assert tuple(tensor.shape) == piece.size and tensor.is_contiguous(), (self.layout, piece, tensor.shape)
        assert sum(t.numel() for t in held.values()) == sum(t.numel() for t in tensors.values()), self.layout
        return held

    def initialize(self) -> None:
        """Write the first weights, bitwise the same in every layout, and the optimizer's first state."""
        held = [piece for piece in self.local_state() if piece.name in self._leaves]
        with torch.no_grad():
            for piece, value in self._spec.initial(held):
                self._leaves[piece.name].copy_(value)
        materialise(self._optimizer)

    # The step

    @property
    def _pp_group(self) -> dist.ProcessGroup | None:
        return self._mesh.get_group("pp") if self.layout.pp > 1 else None

    def forward_backward(self, batch: RankBatch) -> None:
        """Gradients of the global loss of ``batch``. Random numbers (dropout) depend on seed, batch and data rank."""
        data_rank = self.layout.data_rank(self._at)
        torch.manual_seed(derive_seed(self._program.training.seed, batch.cursor, data_rank))
        self._loss.zero_()
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._loss_context():
            if self.layout.pp > 1:
                self._run_pipeline(batch)
            else:
                self._accumulate(batch)

    def _accumulate(self, batch: RankBatch) -> None:
        micro_batches = list(self._micro_batches(batch))
        for index, (tokens, targets, positions, segments) in enumerate(micro_batches, start=1):
            last = index == len(micro_batches)
            self._module.set_requires_gradient_sync(last)
            self._module.set_is_last_backward(last)
            logits = self._spec.forward(self._module, tokens, positions, segments)
            loss = token_loss(logits, targets) / max(1, batch.num_valid)
            loss.backward()
            self._loss += loss.detach()

    def _run_pipeline(self, batch: RankBatch) -> None:
        tokens, targets, positions, segments = self._tensors(batch)
        schedule = self._schedule(len(tokens) // self._program.training.micro_batch_rows)
        losses: list[Tensor] = []
        schedule.step(
            *((tokens,) if self._first else ()),
            target=targets if self._last else None,
            losses=losses if self._last else None,
            loss_kwargs={"num_valid": batch.num_valid} if self._last else None,
            return_outputs=False,
            positions=positions,
            segments=segments,
        )
        for loss in losses:
            self._loss += loss.detach()

    def _schedule(self, num_micro: int) -> ScheduleGPipe | Schedule1F1B:
        """The schedule for ``num_micro`` micro-batches; 1F1B needs at least one per stage, below that it is GPipe."""
        if num_micro not in self._schedules:
            rows = self._program.training.micro_batch_rows
            hidden = torch.empty(self._spec.hidden_shape(rows), dtype=self._compute, device="meta", requires_grad=True)
            tokens = torch.empty((rows, self._program.seq_len), dtype=torch.int64, device="meta")
            logits = hidden.new_empty((rows, self._program.seq_len, self._program.vocab_size))
            stage = PipelineStage(
                self._module,
                self._at.pp,
                self.layout.pp,
                self._device,
                input_args=tokens if self._first else hidden,
                output_args=logits if self._last else hidden,
                group=self._pp_group,
            )
            one_each = self._program.training.schedule == "1f1b" and num_micro >= self.layout.pp
            schedule = Schedule1F1B if one_each else ScheduleGPipe
            self._schedules[num_micro] = schedule(
                stage,
                num_micro,
                loss_fn=lambda logits, targets, num_valid: token_loss(logits, targets) / max(1, num_valid),
                scale_grads=False,
            )
        return self._schedules[num_micro]

    def vote(self, stop: bool, snapshot_s: float = 0.0, step_s: float = 0.0) -> Verdict:
        """One all-reduce in which all ranks agree on the step; moves nothing. Every rank must call it.

        ``snapshot_s`` and ``step_s`` are what this rank's last snapshot and last step took, in seconds.
        """
        counted = []
        for spec in self.schema.tensors:
            parameter = self._parameters.get(spec.name)
            if parameter is None or parameter.grad is None:
                continue
            leaf = self._leaves[spec.name]
            leaf.grad = parameter.grad.to_local()
            # Replicas agree on a gradient; it counts where the first of them holds it.
            if self._at.r == 0 and (spec.tp_dim is not None or self._at.tp == 0):
                counted.append(leaf.grad)
        vector = torch.zeros(5, dtype=torch.float64, device=self._device)
        if counted:
            vector[0] = nn.utils.get_total_norm(counted).double() ** 2
        if self._at.tp == 0:
            vector[1] = self._loss  # zero before the last stage
        vector[2:] = torch.tensor([float(stop), snapshot_s, step_s], dtype=torch.float64)
        dist.all_reduce(vector)
        squared_norm, loss, num_stop, snapshot_s, step_s = vector.tolist()
        return Verdict(
            loss=loss,
            grad_norm=math.sqrt(squared_norm),
            finite=math.isfinite(squared_norm) and math.isfinite(loss),
            stop=num_stop > 0,
            snapshot_cost=snapshot_s / step_s if step_s else 0.0,
        )

    def gradient(self, name: str) -> Tensor:
        """This rank's shard of a parameter's gradient, after ``vote``; clipped in place by ``apply``."""
        gradient = self._leaves[name].grad
        assert gradient is not None
        return gradient

    def apply(self, verdict: Verdict, step: int) -> float:
        """Clip and let the optimizer move, unless the verdict is not finite. Returns the learning rate.

        ``step`` is the number of this step; the first is 1.
        """
        config = self._program.optimizer
        rate = learning_rate(config, step, self._program.training.max_steps)
        if verdict.finite:
            scale = config.max_grad_norm / (verdict.grad_norm + 1e-6)
            gradients = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
            if scale < 1:
                torch._foreach_mul_(gradients, scale)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        return rate

    @torch.no_grad()
    def evaluate(self, batch: RankBatch) -> float:
        """Loss of ``batch`` without gradients, equal on every rank. Every rank must call it."""
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._module.eval()
        for tokens, targets, positions, segments in self._micro_batches(batch):
            x = tokens
            if not self._first:
                x = torch.empty(self._spec.hidden_shape(len(tokens)), dtype=self._compute, device=self._device)
                dist.recv(x, group=self._pp_group, group_src=self._at.pp - 1)
            out = self._spec.forward(self._module, x, positions, segments)
            if not self._last:
                dist.send(out, group=self._pp_group, group_dst=self._at.pp + 1)
                continue
            with self._loss_context():
                share = token_loss(out, targets) / max(1, batch.num_valid)
            if self._at.tp == 0:
                loss += share
        self._module.train()
        dist.all_reduce(loss)
        return loss.item()

    def _loss_context(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self.layout.tp > 1 else nullcontext()

    def _tensors(self, batch: RankBatch) -> tuple[Tensor, ...]:
        """Tokens, targets, positions and segments on the device, [num_micro * micro_rows, S] int64."""
        arrays = (batch.tokens, batch.targets, batch.positions, batch.segments)
        return tuple(torch.from_numpy(array).to(self._device, torch.int64) for array in arrays)

    def _micro_batches(self, batch: RankBatch) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(t.split(self._program.training.micro_batch_rows) for t in self._tensors(batch)), strict=True)
