"""A checkpoint rewritten for another layout: read as any destination would, written and committed like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from checkpointing.checkpoint_file import Share
from checkpointing.durable import checkpoint_holdings, commit, read_manifest, write_share
from checkpointing.layout import Layout
from checkpointing.live import live_holdings
from checkpointing.load import KeeperReads, load_state
from checkpointing.publish import begin, give_up, list_checkpoints, step_of
from checkpointing.schema import Schema
from checkpointing.schema_json import schema_from_json
from checkpointing.shares import plan_shares
from checkpointing.snapshot import Record, digest_of
from checkpointing.transfer import Destination, Planner

_FILE_NBYTES = 256 << 20


def rewrite(checkpoint: str, directory: str, layout: Layout, file_nbytes: int = _FILE_NBYTES) -> str:
    """Write ``checkpoint`` as the ranks of ``layout`` would have, into ``directory``; returns the new one's location.

    One file's worth of state is in memory at a time, or one box where that is larger. Raises ValueError for a layout
    that the model cannot have, a directory that has a checkpoint of the step, and a source that is not whole;
    DigestMismatch or HoldingGone for a damaged one; OSError. Nothing is left in ``directory`` then.
    """
    manifest = read_manifest(checkpoint)
    schema, step = schema_from_json(manifest), manifest["step"]
    _check(schema, layout)
    if any(step_of(there) == step for there in list_checkpoints(directory)):
        raise ValueError(f"{directory} has a checkpoint of step {step} already; choose another folder")
    holdings = checkpoint_holdings(checkpoint)
    planner = Planner(schema, holdings)
    attempt = begin(directory, step)
    try:
        entries: list[dict[str, Any]] = []
        for shares in plan_shares(schema, live_holdings(schema, layout)).values():
            for batch in _batches(shares, file_nbytes):
                entries += write_share(attempt.url, _read(planner, batch))
        snapshot = replace(holdings[0].snapshot, layout=str(layout))
        return commit(attempt, schema, snapshot, entries)
    except BaseException:
        give_up(attempt)
        raise


def _check(schema: Schema, layout: Layout) -> None:
    if layout.layers is not None and sum(layout.layers) != schema.num_layers:
        layers = sum(layout.layers)
        raise ValueError(f"layout {layout} deals out {layers} layers, but the checkpoint has {schema.num_layers}")
    if layout.num_stages > max(1, schema.num_layers):
        raise ValueError(f"layout {layout} has more stages than the checkpoint has layers ({schema.num_layers})")


def _batches(shares: Sequence[Share], file_nbytes: int) -> Iterator[list[Share]]:
    """The shares of one rank, file by file; a file that would be larger than ``file_nbytes`` becomes several."""
    for file in sorted({share.file for share in shares}):
        batch: list[Share] = []
        number = nbytes = 0
        for share in (share for share in shares if share.file == file):
            if batch and nbytes + share.record.nbytes > file_nbytes:
                yield batch
                batch, number, nbytes = [], number + 1, 0
            batch.append(replace(share, file=file.replace(".safetensors", f"-{number:05d}.safetensors")))
            nbytes += share.record.nbytes
        yield batch


def _read(planner: Planner, batch: Sequence[Share]) -> list[tuple[Share, np.ndarray]]:
    """Each share with its bytes; its record then has their digest and points into them."""
    wanted = tuple(share.record.piece for share in batch)
    into = {share.record.piece: np.empty(share.record.piece.size, share.record.dtype) for share in batch}
    load_state(planner.fetches(Destination("", wanted)), into, KeeperReads(_nothing_is_far))
    return [(_described(share, into[share.record.piece]), _bytes(into[share.record.piece])) for share in batch]


def _described(share: Share, array: np.ndarray) -> Share:
    record = share.record
    return replace(share, record=Record(record.piece, record.dtype, 0, record.nbytes, digest_of(_bytes(array))))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _nothing_is_far(node: str, requests: Any) -> Any:
    raise AssertionError("files are read by whoever needs them")
