"""What an optimizer keeps for each parameter, in terms of the schema: found by looking, not by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from checkpointing.schema import TensorSpec

# Sizes of the dims of the parameter that an optimizer is shown. Distinct, so that a state says which it follows.
_PROBE = (11, 13, 17, 19, 23)

ShapeAndDtype = tuple[tuple[int, ...], str]


def optimizer_specs(
    parameters: Iterable[TensorSpec], states_of: Callable[[tuple[int, ...]], Mapping[str, ShapeAndDtype]]
) -> tuple[TensorSpec, ...]:
    """Specs of all states, "<state>/<parameter>", of an optimizer.

    ``states_of(shape)`` makes the optimizer's state for a parameter of that shape: name -> (shape, dtype). A state may
    have the parameter's shape, be a scalar, or be factored: follow some of the parameter's dims and have others of its
    own size, as Adafactor's rows and columns do. Raises ValueError when it is none of these.
    """
    parameters = tuple(parameters)
    found = {num_dims: states_of(_PROBE[:num_dims]) for num_dims in sorted({len(p.shape) for p in parameters})}
    names = list(dict.fromkeys(state for states in found.values() for state in states))
    return tuple(
        _spec(state, *found[len(parameter.shape)][state], parameter)
        for state in names
        for parameter in parameters
        if state in found[len(parameter.shape)]
    )


def _spec(state: str, shape: tuple[int, ...], dtype: str, parameter: TensorSpec) -> TensorSpec:
    """The state of ``parameter`` that has ``shape`` beside the probe."""
    name, probe = f"{state}/{parameter.name}", _PROBE[: len(parameter.shape)]
    if shape == probe:
        return replace(parameter, name=name, dtype=dtype)
    if shape == ():
        return TensorSpec(name, (), dtype, None, parameter.where, parameter.layer, fsdp_dims=())
    dims = tuple(probe.index(size) if size in probe else None for size in shape)
    followed = [dim for dim in dims if dim is not None]
    if len(set(followed)) != len(followed):
        raise ValueError(
            f"optimizer state {state!r} has shape {list(shape)} for a parameter of shape {list(probe)}; only what "
            "follows each dim of its parameter at most once can be re-sharded"
        )
    own = tuple(size if dim is None else parameter.shape[dim] for size, dim in zip(shape, dims, strict=True))
    return replace(parameter, name=name, shape=own, dtype=dtype, parameter=parameter.shape, dims=dims)
