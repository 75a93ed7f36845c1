"""Whether what is held is the whole state, and which state is the newest that is whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from checkpointing.boxes import describe, uncovered
from checkpointing.decoded import guards
from checkpointing.holding import Holding
from checkpointing.schema import Piece, Schema

_NAMED_IN_SENTENCE = 3


class StateLost(ValueError):
    """No complete state is left. ``missing`` are the boxes that nobody holds (of the newest step there is)."""

    def __init__(self, sentence: str, missing: tuple[Piece, ...] = ()) -> None:
        super().__init__(sentence, missing)
        self.sentence, self.missing = sentence, missing

    def __str__(self) -> str:
        return self.sentence


def missing_boxes(schema: Schema, boxes: Iterable[Piece]) -> tuple[Piece, ...]:
    """The parts of the schema's tensors that ``boxes`` leave out, by exact cover (a volume would not see overlaps).

    Tensors whose boxes are the same are looked at once.
    """
    held: dict[str, set[Piece]] = defaultdict(set)
    for name, offset, size in boxes:
        held[name].add(Piece("", offset, size))
    gaps: dict[tuple[tuple[int, ...], frozenset[Piece]], list[Piece]] = {}
    missing = []
    for spec in schema.tensors:
        key = spec.shape, frozenset(held[spec.name])
        if key not in gaps:
            gaps[key] = uncovered(Piece("", (0,) * len(spec.shape), spec.shape), sorted(key[1]))
        missing += [gap._replace(name=spec.name) for gap in gaps[key]]
    return tuple(missing)


def newest_complete(schema: Schema, holdings: Iterable[Holding]) -> tuple[int, int]:
    """(generation, step) of the newest state that the holdings cover entirely; the later step counts as newer, then the
    later generation. Raises StateLost, whose sentence names what is missing of the newest step there is.
    """
    by_step = defaultdict(list)
    for holding in holdings:
        by_step[holding.snapshot.step, holding.snapshot.generation].append(holding)
    newest_missing: tuple[Piece, ...] | None = None
    for step, generation in sorted(by_step, reverse=True):
        missing = missing_boxes(schema, held_boxes(by_step[step, generation]))
        if not missing:
            return generation, step
        newest_missing = newest_missing or missing
    if newest_missing is None:
        raise StateLost("no snapshot of any step is left")
    raise StateLost(describe_missing(max(by_step)[0], newest_missing), newest_missing)


def tolerance(schema: Schema, holdings: Sequence[Holding], domains: Mapping[str, str]) -> int:
    """How many failure domains can be lost without losing the state that these holdings (of one state) are, whichever
    they are; -1 when it is not whole. ``domains``: node -> domain.
    """
    survives = {piece: guard.tolerance(domains) for piece, guard in guards(holdings).items()}
    return next(
        (
            number
            for number in sorted(set(survives.values()), reverse=True)
            if not missing_boxes(schema, (piece for piece, most in survives.items() if most >= number))
        ),
        -1,
    )


def may_replace_others(
    schema: Schema, holdings: Iterable[Holding], state: tuple[int, int], domains: Mapping[str, str]
) -> bool:
    """Whether the memory of all other states may be used again once one goes on from ``state`` (generation, step).

    It may when the state survives another loss, or else when no other does: a snapshot is listed before its copies are
    there, and the one before it, which has them, is what a further loss would leave. ``domains``: node -> domain.
    """
    by_state: dict[tuple[int, int], list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_state[holding.snapshot.generation, holding.snapshot.step].append(holding)
    others = (of for other, of in by_state.items() if other != state)
    return tolerance(schema, by_state[state], domains) > 0 or all(tolerance(schema, of, domains) < 1 for of in others)


def held_boxes(holdings: Iterable[Holding]) -> Iterator[Piece]:
    """All boxes that the holdings have, with repetitions."""
    return (record.piece for holding in holdings for record in holding.snapshot.records)


def describe_missing(step: int | None, missing: Sequence[Piece]) -> str:
    """One sentence that names the first few boxes."""
    named = ", ".join(describe(box) for box in missing[:_NAMED_IN_SENTENCE])
    more = f" and {len(missing) - _NAMED_IN_SENTENCE} more" if len(missing) > _NAMED_IN_SENTENCE else ""
    state = "the state" if step is None else f"the state of step {step}"
    return f"{state} is lost: nobody holds {named}{more}"
