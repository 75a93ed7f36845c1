"""Which tensor of somebody else's checkpoint is which of ours: names are compared whole, and never guessed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from checkpointing.safetensors_folder import Stored, can_convert
from checkpointing.schema import Schema, TensorSpec
from orchestrator.hugging_face import llama_name

_PREFIXES = ("", "model.", "state_dict.", "app.model.")  # before a parameter's name in checkpoints of others
_STATE = re.compile(r"(?<![^.])state\.")  # ends what comes before a parameter's name in a torch optimizer's dict
_OPTIMIZER = re.compile(r"(optim|optimizer)\.|(.+\.)?param_groups\.")

Names = dict[str, tuple[str, ...]]  # our tensor -> its names in the source, more than one for a tied weight


def match(there: Mapping[str, Stored], schema: Schema) -> Names:
    """Names in the source of all parameters and of what it has of their optimizer's state.

    Where a weight of ours goes by several names there, the caller is to see that they hold the same. Raises ValueError
    when the source lacks a parameter, has more than the model, has one of another shape or kind, or has two states that
    could be a parameter's.
    """
    ours: Names = {
        spec.name: (spec.name, *(other for other, name in schema.aliases if name == spec.name))
        for spec in schema.tensors
        if "/" not in spec.name
    }
    parameters = _parameters(there, ours)
    states = _states(there, schema, ours, parameters)
    names = parameters | states
    known = {name for known in (ours, parameters) for names_of_one in known.values() for name in names_of_one}
    extra = sorted(there.keys() - {name for found in names.values() for name in found})
    more = [name for name in extra if not _is_of_an_optimizer(name, known)]
    if more:
        raise ValueError(f"the source has {more[0]}, which the job's model has not ({len(more)} such tensors)")
    for spec in schema.tensors:
        for name in names.get(spec.name, ()):
            _check(name, there[name], spec)
    return names


def _parameters(there: Mapping[str, Stored], ours: Names) -> Names:
    found: Names = {}
    called: Callable[[str], str] = str
    for naming in _namings(there, ours):
        names = {name: _present(map(naming, names), there) for name, names in ours.items()}
        if not found or sum(map(bool, names.values())) > sum(map(bool, found.values())):
            found, called = names, naming
    missing = [name for name, names in found.items() if not names]
    if missing:
        wanted = called(missing[0])
        raise ValueError(f"the source has no {wanted} ({len(missing)} of {len(ours)} parameters are missing)")
    return found


def _namings(there: Mapping[str, Stored], ours: Names) -> Iterator[Callable[[str], str]]:
    """How others may call a parameter of ours."""
    try:
        llama = {name: llama_name(name) for names in ours.values() for name in names}
    except KeyError:  # a model of the user's own
        pass
    else:
        if {"embedding.weight", "output.weight"} <= ours.keys() and llama["output.weight"] not in there:
            llama["output.weight"] = llama["embedding.weight"]  # tied there; here they are two, which begin equal
        yield llama.__getitem__
    yield from (prefix.__add__ for prefix in _PREFIXES)


def _states(there: Mapping[str, Stored], schema: Schema, ours: Names, parameters: Names) -> Names:
    """torch calls a state "<path of the optimizer's dict>state.<parameter>.<state>"; the parameter is called there as
    in the model's dict (ours), or as in the whole checkpoint.
    """
    dicts = sorted({name[: at.end()] for name in there for at in _STATE.finditer(name)})
    taken = {name for names in parameters.values() for name in names}
    of_ours, of_theirs = (
        {
            spec.name: found
            for spec in schema.tensors
            if "/" in spec.name and (found := _state(there.keys() - taken, dicts, called, spec.name))
        }
        for called in (ours, parameters)
    )
    if len(of_ours) == len(of_theirs) and of_ours != of_theirs:
        name = next(iter(of_ours))
        one, other = of_ours[name][0], next(iter(of_theirs.values()))[0]
        raise ValueError(f"the source's optimizer state can be read in two ways, from {one} on or from {other} on")
    return max(of_ours, of_theirs, key=len)


def _state(there: Iterable[str], dicts: Iterable[str], called: Names, name: str) -> tuple[str, ...]:
    state, _, parameter = name.rpartition("/")
    found = [_present((f"{path}{one}.{state}" for one in called[parameter]), there) for path in dicts]
    found = [names for names in found if names]
    if len(found) > 1:
        one, other = found[0][0], found[1][0]
        raise ValueError(f"the source has {one} and {other}; either could be {state!r} of {called[parameter][0]}")
    return found[0] if found else ()


def _present(names: Iterable[str], there: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name in there))


def _check(name: str, stored: Stored, spec: TensorSpec) -> None:
    if stored.shape != spec.shape:
        shapes = f"{list(stored.shape)} in the source, not {list(spec.shape)} as in the job"
        raise ValueError(f"{name} has shape {shapes}")
    if not can_convert(stored.dtype, spec.dtype):
        raise ValueError(f"{name} is of {stored.dtype} in the source and cannot become one of {spec.dtype}")


def _is_of_an_optimizer(name: str, parameters: set[str]) -> bool:
    """Whether it is somebody's state of a parameter, which goes by its name or by a number."""
    states = (name[at.end() :] for at in _STATE.finditer(name))
    return _OPTIMIZER.match(name) is not None or any(
        state.partition(".")[0].isdigit() or not parameters.isdisjoint(_beginnings(state)) for state in states
    )


def _beginnings(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a", "a.b"."""
    return (name[: at.start()] for at in re.finditer(r"\.", name))
