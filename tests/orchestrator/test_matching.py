"""Names of somebody else's tensors: each parameter gets its own, whatever the names of others end in."""

from __future__ import annotations

import re

import pytest

from checkpointing.optimizer_state import optimizer_specs
from checkpointing.safetensors_folder import Stored
from checkpointing.schema import Schema, TensorSpec
from orchestrator.matching import match

PARAMETERS = ("norm.weight", "block.norm.weight", "state.norm.weight", "output.weight")


def schema(*names: str, aliases: tuple[tuple[str, str], ...] = ()) -> Schema:
    parameters = tuple(TensorSpec(name, (3,), "float32", None, "all") for name in names)
    states = optimizer_specs(parameters, lambda shape: {"exp_avg": (shape, "float32")})
    return Schema(parameters + states, 1, aliases)


def source(*names: str, dtype: str = "float32") -> dict[str, Stored]:
    return dict.fromkeys(names, Stored((3,), dtype))


@pytest.mark.parametrize("model", ["", "model.", "app.model."])
@pytest.mark.parametrize("optimizer", ["state.", "optim.state.", "app.optimizer.state."])
@pytest.mark.parametrize("whole", [False, True], ids=["named as in the model", "named as in the checkpoint"])
def test_a_name_that_ends_like_another_is_not_that_one(model: str, optimizer: str, whole: bool) -> None:
    names = PARAMETERS[:2] + PARAMETERS[3:]
    expected = {name: (model + name,) for name in names}
    expected |= {f"exp_avg/{name}": (f"{optimizer}{model * whole}{name}.exp_avg",) for name in names}
    there = source(*(name for found in expected.values() for name in found))
    for order in (there, dict(reversed(there.items()))):
        assert match(order, schema(*names)) == expected


def test_a_wrapped_model_beside_a_parameter_of_the_same_name() -> None:
    """The parameter ``model.norm.weight`` is in the checkpoint what ``norm.weight`` is called there as a whole."""
    names = ("norm.weight", "model.norm.weight", "output.weight")
    there = source(*(f"model.{name}" for name in names), *(f"optim.state.{name}.exp_avg" for name in names))
    found = match(there, schema(*names))
    assert {name: found[f"exp_avg/{name}"] for name in names} == {n: (f"optim.state.{n}.exp_avg",) for n in names}


def test_a_state_that_the_source_has_not_is_not_taken_from_another() -> None:
    there = source("norm.weight", "block.norm.weight", "optim.state.block.norm.weight.exp_avg")
    assert "exp_avg/norm.weight" not in match(there, schema("norm.weight", "block.norm.weight"))


def test_a_tied_weight_is_found_by_either_of_its_names() -> None:
    tied = schema("embedding.weight", "norm.weight", aliases=(("output.weight", "embedding.weight"),))
    state = "optim.state.output.weight.exp_avg"
    for present in (("output.weight",), ("embedding.weight",), ("embedding.weight", "output.weight")):
        found = match(source("model.norm.weight", *(f"model.{name}" for name in present), state), tied)
        assert found["embedding.weight"] == tuple(f"model.{name}" for name in present)
        assert found["exp_avg/embedding.weight"] == (state,)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("a.state.norm.weight.exp_avg b.state.norm.weight.exp_avg", "a.state.norm.weight.exp_avg and b.state.norm.wei"),
        ("optimus.weight", "the source has optimus.weight, which the job's model has not (1 such tensors)"),
        ("state.weight", "the source has state.weight, which the job's model has not"),
        ("ema.norm.weight", "the source has ema.norm.weight, which the job's model has not"),
    ],
)
def test_what_could_be_something_else_is_refused(more: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        match(source("norm.weight", *more.split()), schema("norm.weight"))


def test_what_an_optimizer_keeps_beside_is_left_out() -> None:
    beside = ("optim.state.0.exp_avg", "state.norm.weight.other", "opt.param_groups.0.lr", "optimizer.x")
    assert match(source("norm.weight", *beside), schema("norm.weight")) == {"norm.weight": ("norm.weight",)}


def test_a_dtype_that_cannot_be_converted_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="norm.weight is of int64 in the source and cannot become one of float32"):
        match(source("norm.weight", dtype="int64"), schema("norm.weight"))
