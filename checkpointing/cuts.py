"""How one dim is cut among ranks, and how several tensors are joined into one. Plain integers, nothing else."""

from __future__ import annotations

from collections.abc import Sequence


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part ``index`` with torch.chunk's sizes: 5 rows over 4 are 2, 2, 1, 0."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def head_chunk(size: int, heads: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) when ``size`` rows are ``heads`` equal heads that stay whole.

    With more parts than heads, neighbouring parts hold the same head (grouped-query attention).
    """
    rows = size // heads
    assert rows * heads == size, f"{size} rows are not {heads} equal heads"
    if parts > heads:
        return index * heads // parts * rows, rows
    first, count = chunk(heads, parts, index)
    return first * rows, count * rows


def padded_chunk(size: int, multiple: int, parts: int, index: int) -> tuple[int, int, int]:
    """(start, length, local length) when every part has the same local length, a multiple of ``multiple``.

    ``length`` counts what is real of it; the padding at the end of the last parts belongs to nobody.
    """
    local = -(-size // (parts * multiple)) * multiple
    start = min(index * local, size)
    return start, min(local, size - start), local


def join(lengths: Sequence[int], blocks: Sequence[int] | None) -> list[tuple[int, int, int, int]]:
    """Runs (part, start in the part, start in the joined dim, length) of parts joined along one dim.

    ``blocks`` None: one part after the other. Otherwise ``blocks[p]`` rows of each part p in turn, until all are used
    up (Megatron's QKV: the queries of one group, its key, its value, the next group).
    """
    if blocks is None:
        blocks = [max(length, 1) for length in lengths]
    runs, position = [], 0
    taken = [0] * len(lengths)
    while any(done < length for done, length in zip(taken, lengths, strict=True)):
        for part, block in enumerate(blocks):
            length = min(block, lengths[part] - taken[part])
            if length:
                runs.append((part, taken[part], position, length))
                taken[part] += length
                position += length
    return runs
