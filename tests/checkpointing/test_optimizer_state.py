"""States of real optimizers, found by looking; and which of their boxes follow the parameter's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from checkpointing.layout import Layout
from checkpointing.optimizer_state import ShapeAndDtype, optimizer_specs
from checkpointing.schema import Schema, ShardMap, TensorSpec

MATRIX = TensorSpec("layers.0.w", (8, 8), "float32", 1, "layer", 0)
VECTOR = TensorSpec("layers.0.b", (8,), "float32", None, "layer", 0)


def states_of(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable:
    def states(shape: tuple[int, ...]) -> dict[str, ShapeAndDtype]:
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        optimizer = make([parameter])
        optimizer.step()
        found = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        return {name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in found.items()}

    return states


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (torch.optim.AdamW, {"step", "exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.SGD(p, momentum=0.9), {"momentum_buffer"}),
        (torch.optim.RMSprop, {"step", "square_avg"}),
        (torch.optim.Adafactor, {"step", "row_var", "col_var", "variance"}),
        (torch.optim.Muon, {"momentum_buffer"}),
        (torch.optim.SGD, set()),
    ],
)
def test_any_optimizers_states_are_found(make: Callable, names: set[str]) -> None:
    parameters = (MATRIX,) if make is torch.optim.Muon else (MATRIX, VECTOR)
    specs = {spec.name: spec for spec in optimizer_specs(parameters, states_of(make))}
    assert {name.split("/")[0] for name in specs} == names
    for parameter in parameters:
        for name, (shape, dtype) in states_of(make)(parameter.shape).items():
            spec = specs[f"{name}/{parameter.name}"]
            assert (spec.shape, spec.dtype, spec.where, spec.layer) == (shape, dtype, "layer", 0)


def test_factored_states_are_the_projections_of_the_parameters_boxes() -> None:
    """Also where sizes alone do not say which dim a factor follows: the matrix is square."""
    row, column = (
        next(spec for spec in optimizer_specs([MATRIX], states_of(torch.optim.Adafactor)) if spec.name.startswith(name))
        for name in ("row_var", "col_var")
    )
    layout = Layout.parse("dp3·tp2")
    shards = ShardMap(Schema((MATRIX, row, column), 1), layout)
    for rank in range(layout.size):
        weight, of_rows, of_columns = shards.pieces(rank)
        assert of_rows[1:] == ((weight.offset[0], 0), (weight.size[0], 1))
        assert of_columns[1:] == ((0, weight.offset[1]), (1, weight.size[1]))


def test_a_state_that_mixes_dims_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"optimizer state 'left' has shape \[11, 11\] for a parameter of"):
        optimizer_specs([MATRIX], lambda shape: {"left": ((shape[0], shape[0]), "float32")})
