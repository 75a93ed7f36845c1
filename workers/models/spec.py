"""What the engine must know of a model: how to build a stage of it, how it may be cut, and its first weights."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from checkpointing.optimizer_state import optimizer_specs
from checkpointing.schema import Piece, Schema, TensorSpec
from workers.config import DecoderConfig
from workers.models.decoder import Decoder
from workers.optimizer import states_of
from workers.program import Program


class ModelSpec(Protocol):
    """A model as the engine sees it. ``cast_inputs``: FSDP casts floating inputs of the root to the compute dtype."""

    num_layers: int
    cast_inputs: bool

    def build(self, layers: range, first: bool, last: bool) -> nn.Module:
        """The stage that holds ``layers``; parameters may be on the meta device, everything else must be final."""

    def forward(self, module: nn.Module, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Run a stage: tokens (first stage) or hidden states to hidden states or logits (last stage)."""

    def hidden_shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of what one stage hands to the next."""

    def tp_plan(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """Module name -> how tensor parallelism cuts it, for the modules that this stage has."""

    def fsdp_units(self, module: nn.Module) -> Iterable[nn.Module]:
        """Submodules whose parameters are gathered together, inner ones first; the stage itself takes what is left."""

    def parameters(self) -> tuple[TensorSpec, ...]:
        """All parameters of the whole model, in canonical order."""

    def aliases(self) -> tuple[tuple[str, str], ...]:
        """(other name, name in ``parameters``) of weights that are one."""

    def initial(self, held: Iterable[Piece]) -> Iterable[tuple[Piece, Tensor]]:
        """First values of pieces of parameters: boxes of full tensors that depend on the seed and the name alone."""


def model_spec(program: Program) -> ModelSpec:
    """The spec of the program's model."""
    if isinstance(program.model, DecoderConfig):
        return DecoderSpec(program.model, program)
    return ModuleSpec(program.model, program)


def stored_dtype(program: Program) -> torch.dtype:
    """Dtype of parameters, optimizer state and reductions."""
    return torch.float64 if program.training.precision == "fp64" else torch.float32


def describe(program: Program) -> Schema:
    """The whole training state: parameters, then optimizer state as "<state>/<parameter>". Needs no process group."""
    spec = model_spec(program)
    parameters = spec.parameters()

    def states(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        found = states_of(program.optimizer, stored_dtype(program), shape)
        return {name: (tuple(value.shape), _dtype_name(value.dtype)) for name, value in found.items()}

    return Schema(parameters + optimizer_specs(parameters, states), spec.num_layers, spec.aliases())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the token losses of ``logits`` [B, S, vocab] for ``targets`` [B, S]; a negative target does not count.

    Logits cut along the vocabulary are never gathered; then this and its backward need torch's ``loss_parallel``.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    targets = targets.flatten()
    loss = F.cross_entropy(logits, targets.where(targets >= 0, -100), reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


class DecoderSpec:
    """The built-in decoder: all axes."""

    cast_inputs = False  # rotation angles stay in float32; hidden states already have the compute dtype

    # Parameter name without its layer -> tensor dim that tensor parallelism cuts.
    _TP_DIMS = {
        "embedding.weight": 0,
        "output.weight": 0,
        "attention.wq.weight": 0,
        "attention.wk.weight": 0,
        "attention.wv.weight": 0,
        "attention.wo.weight": 1,
        "feed_forward.w1.weight": 0,
        "feed_forward.w3.weight": 0,
        "feed_forward.w2.weight": 1,
    }

    def __init__(self, config: DecoderConfig, program: Program) -> None:
        self.config, self.program = config, program
        self.num_layers = config.num_layers

    def build(self, layers: range, first: bool, last: bool) -> nn.Module:
        with torch.device("meta"):
            return Decoder(self.config, self.program.vocab_size, layers, first, last).to(stored_dtype(self.program))

    def forward(self, module: nn.Module, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        return module(x, positions=positions, segments=segments)

    def hidden_shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows, self.program.seq_len, self.config.dim)

    def tp_plan(self, module: nn.Module) -> dict[str, ParallelStyle]:
        assert isinstance(module, Decoder)
        plan: dict[str, ParallelStyle] = {}
        if module.embedding is not None:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        for index in module.layers:
            # Inputs become DTensors here, once, so that the backward pass sums over the axis once and not per matrix.
            others = (None, None, None)
            plan[f"layers.{index}.attention"] = PrepareModuleInput(
                input_layouts=(Replicate(), *others), desired_input_layouts=(Replicate(), *others)
            )
            plan[f"layers.{index}.feed_forward"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
            for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
                plan[f"layers.{index}.{name}"] = ColwiseParallel()
            for name in ("attention.wo", "feed_forward.w2"):
                plan[f"layers.{index}.{name}"] = RowwiseParallel()
        if module.output is not None:
            plan["output"] = ColwiseParallel(use_local_output=False)
        return plan

    def fsdp_units(self, module: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(module, Decoder)
        return list(module.layers.values())

    def parameters(self) -> tuple[TensorSpec, ...]:
        whole = self.build(range(self.num_layers), first=True, last=True)
        dtype = _dtype_name(stored_dtype(self.program))
        specs = []
        for name, parameter in whole.named_parameters():
            layer, local = self._split(name)
            where = "layer" if layer is not None else "first" if name.startswith("embedding") else "last"
            specs.append(TensorSpec(name, tuple(parameter.shape), dtype, self._TP_DIMS.get(local), where, layer))
        return tuple(specs)

    def aliases(self) -> tuple[tuple[str, str], ...]:
        return ()

    def initial(self, held: Iterable[Piece]) -> Iterable[tuple[Piece, Tensor]]:
        """Norms are 1, matrices normal (0.02); what writes to the residual stream is damped by depth, as in GPT-2."""
        shapes = {spec.name: spec.shape for spec in self.parameters()}
        for piece in held:
            shape = shapes[piece.name]
            if len(shape) == 1:
                full = torch.ones(shape)
            else:
                residual = piece.name.endswith(("wo.weight", "w2.weight"))
                std = 0.02 / math.sqrt(2 * self.num_layers) if residual else 0.02
                generator = torch.Generator().manual_seed(derive_seed(self.program.training.seed, piece.name))
                full = torch.randn(shape, generator=generator) * std
            yield piece, box_of(full, piece)

    @staticmethod
    def _split(name: str) -> tuple[int | None, str]:
        """``layers.3.attention.wq.weight`` to (3, ``attention.wq.weight``); (None, name) outside the layers."""
        parts = name.split(".", 2)
        return (int(parts[1]), parts[2]) if parts[0] == "layers" else (None, name)


class ModuleSpec:
    """A user's own module, ``build(vocab_size, seq_len)``: data-parallel only, gathered as one unit.

    It is built in full on the CPU, on every rank under the same seed, so that its own initialisation and its derived
    buffers are right by construction. Its forward maps tokens [B, S] int64 to logits [B, S, vocab] and may also take
    ``positions`` and ``segments``.
    """

    cast_inputs = True
    num_layers = 1

    def __init__(self, build: Callable[[int, int], nn.Module], program: Program) -> None:
        self._build, self.program = build, program

    def build(self, layers: range, first: bool, last: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.program.training.seed)
            module = self._build(self.program.vocab_size, self.program.seq_len)
        if not isinstance(module, nn.Module):
            raise ValueError(f"the model's build function returned {type(module).__name__}, not a torch.nn.Module")
        for name, child in module.named_modules():
            if getattr(child, "track_running_stats", False):
                raise ValueError(
                    f"the model's {name!r} ({type(child).__name__}) keeps running statistics, which depend on how "
                    "rows are dealt to workers; use a norm without them (LayerNorm, RMSNorm, GroupNorm)"
                )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("the model has no trainable parameters")
        return module.to(stored_dtype(self.program))

    def forward(self, module: nn.Module, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        # FSDP mixes its class in before the user's, whose forward is the one to ask.
        accepted = inspect.signature(module.forward).parameters
        extra = {"positions": positions, "segments": segments}
        logits = module(x, **{name: value for name, value in extra.items() if name in accepted})
        expected = (*x.shape, self.program.vocab_size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            returned = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"the model returned {returned}; it must return logits {list(expected)}: [B, S, vocab_size]"
            )
        return logits

    def hidden_shape(self, num_rows: int) -> tuple[int, ...]:
        raise AssertionError("a user's module has one stage")

    def tp_plan(self, module: nn.Module) -> dict[str, ParallelStyle]:
        raise AssertionError("a user's module has no tensor parallelism")

    def fsdp_units(self, module: nn.Module) -> Iterable[nn.Module]:
        return []

    def parameters(self) -> tuple[TensorSpec, ...]:
        return self._described[0]

    def aliases(self) -> tuple[tuple[str, str], ...]:
        return self._described[1]

    @cached_property
    def _described(self) -> tuple[tuple[TensorSpec, ...], tuple[tuple[str, str], ...]]:
        dtype = _dtype_name(stored_dtype(self.program))
        module = self.build(range(1), first=True, last=True)
        names = {parameter: name for name, parameter in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        return (
            tuple(TensorSpec(name, tuple(p.shape), dtype, None, "all") for p, name in names.items()),
            tuple((name, names[p]) for name, p in every if name != names[p]),
        )

    def initial(self, held: Iterable[Piece]) -> Iterable[tuple[Piece, Tensor]]:
        full = dict(self.build(range(1), first=True, last=True).named_parameters())
        for piece in held:
            yield piece, box_of(full[piece.name].detach(), piece)


def box_of(full: Tensor, piece: Piece) -> Tensor:
    """The view of a canonical tensor that ``piece`` names."""
    return full[tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.size, strict=True))]


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on ``parts`` alone, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
