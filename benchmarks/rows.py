"""What a benchmark returns: rows that hold ours against another's, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class Runs(TypedDict):
    """Every single measurement, in the order in which it was made."""

    ours: list[float]
    other: list[float]


class Row(TypedDict):
    """One figure. ``ours`` and ``other`` are medians of ``runs``; ``ratio`` above 1 means that ours is better.

    Without a peer ``other`` and ``ratio`` are None, and ``other_name`` says why ("" where a figure has none).
    """

    name: str
    figure: str
    ours: float | None
    other: float | None
    other_name: str
    unit: str
    ratio: float | None
    runs: Runs


@dataclass(frozen=True)
class Peer:
    """What another system measured for a figure, or why it did not (``runs`` is empty then)."""

    name: str
    runs: Sequence[float] = ()


def compare(name: str, figure: str, ours: Sequence[float], other: Peer, unit: str = "s") -> Row:
    """A row of medians of a figure that is better when it is lower."""
    mine, theirs = _median(ours), _median(other.runs)
    return Row(
        name=name,
        figure=figure,
        ours=mine,
        other=theirs,
        other_name=other.name,
        unit=unit,
        ratio=round(theirs / mine, 3) if mine and theirs is not None else None,
        runs=Runs(ours=[_rounded(run) for run in ours], other=[_rounded(run) for run in other.runs]),
    )


def own(name: str, figure: str, ours: Sequence[float], unit: str = "s") -> Row:
    """A row of a figure that has no counterpart."""
    return compare(name, figure, ours, Peer(""), unit)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: medians with (min to max)."""
    lines = ["| figure | ours | other | | ratio | runs |", "|---|---|---|---|---|---|"]
    for row in rows:
        runs = row["runs"]
        cells = (
            row["figure"],
            _cell(row["ours"], runs["ours"], row["unit"]),
            _cell(row["other"], runs["other"], row["unit"]),
            row["other_name"],
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{len(runs['ours'])} / {len(runs['other'])}" if runs["other"] else f"{len(runs['ours'])}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(median: float | None, runs: Sequence[float], unit: str) -> str:
    if median is None:
        return ""
    spread = f" ({min(runs):.4g} to {max(runs):.4g})" if len(runs) > 1 else ""
    return f"{median:.4g} {unit}{spread}"


def _median(runs: Sequence[float]) -> float | None:
    return _rounded(statistics.median(runs)) if runs else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
