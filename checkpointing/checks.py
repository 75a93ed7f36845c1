"""What can be wrong with the holdings of one state, each as a sentence that names tensor, box and holders."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from checkpointing.boxes import cells, describe, volume
from checkpointing.cover import missing_boxes
from checkpointing.holding import Holding
from checkpointing.schema import Piece, Schema, TensorSpec
from checkpointing.snapshot import Record

Kind = Literal["missing", "overlap", "shape", "dtype", "digest"]
_Held = tuple[Holding, Record]
_NAMED_IN_SENTENCE = 4


@dataclass(frozen=True)
class Violation:
    """``holders`` are the holdings that disagree; nobody for what is missing."""

    kind: Kind
    box: Piece
    holders: tuple[Holding, ...]
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def violations(schema: Schema, holdings: Sequence[Holding]) -> tuple[Violation, ...]:
    """All that is wrong with the holdings of one step; empty when they are one whole, consistent state.

    Boxes must lie in their tensor, have its dtype, and cover it. Those of one layout are equal or disjoint (groups of
    different layouts may cut differently), a holding has none twice, and equal boxes have equal digests. Tensors that
    the schema does not have are not looked at.
    """
    specs = {spec.name: spec for spec in schema.tensors}
    held: dict[Piece, list[_Held]] = defaultdict(list)
    found = []
    for holding in sorted(holdings, key=str):
        times = Counter(record.piece for record in holding.snapshot.records)
        found += [_violation("overlap", box, [holding], "is there twice") for box, count in times.items() if count > 1]
        for record in holding.snapshot.records:
            spec = specs.get(record.piece.name)
            if spec is not None and _is_inside(record.piece, spec.shape):
                held[record.piece].append((holding, record))
            elif spec is not None:
                shape = f"outside its tensor's shape {list(spec.shape)}"
                found.append(_violation("shape", record.piece, [holding], f"is {shape}"))
    for box in missing_boxes(schema, held):
        found.append(_violation("missing", box, [], "is held by nobody"))
    for box, holders in held.items():
        found += _of_one_box(specs[box.name], box, holders)
    for layout in sorted({holding.snapshot.layout for holding in holdings}):
        found += _overlaps({b: [h for h, _ in of if h.snapshot.layout == layout] for b, of in held.items()}, specs)
    return tuple(found)


def _of_one_box(spec: TensorSpec, box: Piece, holders: Sequence[_Held]) -> Iterator[Violation]:
    for holding, record in holders:
        if record.dtype != spec.stored_as or record.nbytes != volume(box) * np.dtype(record.dtype).itemsize:
            is_now = f"has dtype {record.dtype} and {record.nbytes} bytes instead of dtype {spec.stored_as}"
            yield _violation("dtype", box, [holding], is_now)
    by_digest: dict[str, list[Holding]] = defaultdict(list)
    for holding, record in holders:
        by_digest[record.digest].append(holding)
    if len(by_digest) > 1:
        agree = " against ".join(map(_names, by_digest.values()))
        everyone = [holding for holding, _ in holders]
        yield Violation("digest", box, tuple(everyone), f"{describe(box)} differs among its holders: {agree}")


def _overlaps(held: Mapping[Piece, Sequence[Holding]], specs: Mapping[str, TensorSpec]) -> Iterator[Violation]:
    """Boxes that overlap without being equal. Tensors with the same boxes are looked at once."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for box, holders in held.items():
        if holders:
            by_name[box.name].append(box)
    known: dict[frozenset[Piece], list[list[Piece]]] = {}
    for name, boxes in by_name.items():
        key = frozenset(box._replace(name="") for box in boxes)
        if key not in known:
            shape = specs[name].shape
            known[key] = [of for _, of in cells(Piece("", (0,) * len(shape), shape), sorted(key)) if len(of) > 1]
        for overlapping in known[key]:
            named = [box._replace(name=name) for box in overlapping]
            others = " and ".join(map(describe, named[1:]))
            by_box = " against ".join(_names(held[box]) for box in named)
            sentence = f"{describe(named[0])} overlaps {others} of the same layout ({by_box})"
            yield Violation("overlap", named[0], tuple(h for box in named for h in held[box]), sentence)


def _is_inside(box: Piece, shape: tuple[int, ...]) -> bool:
    return len(box.offset) == len(box.size) == len(shape) and all(
        start >= 0 and size > 0 and start + size <= whole
        for start, size, whole in zip(box.offset, box.size, shape, strict=True)
    )


def _violation(kind: Kind, box: Piece, holders: Sequence[Holding], what: str) -> Violation:
    sentence = f"{describe(box)} {what}" + (f" ({_names(holders)})" if holders else "")
    return Violation(kind, box, tuple(holders), sentence)


def _names(holders: Sequence[Holding]) -> str:
    more = f" and {len(holders) - _NAMED_IN_SENTENCE} more" if len(holders) > _NAMED_IN_SENTENCE else ""
    return ", ".join(map(str, holders[:_NAMED_IN_SENTENCE])) + more
