"""A checkpoint made by one process: rewritten for another layout, or from tensors that come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from checkpointing.checkpoint_file import Share
from checkpointing.durable import checkpoint_holdings, commit, read_manifest, write_share
from checkpointing.layout import Layout
from checkpointing.live import live_holdings, stored_as
from checkpointing.load import KeeperReads, load_state
from checkpointing.publish import begin, give_up, list_checkpoints, step_of
from checkpointing.schema import Piece, Schema
from checkpointing.schema_json import schema_from_json
from checkpointing.shares import plan_shares
from checkpointing.snapshot import Record, Snapshot, digest_of
from checkpointing.transfer import Destination, Planner

Read = Callable[[Sequence[Piece]], Sequence[np.ndarray]]
_FILE_NBYTES = 256 << 20
_MOST_RANKS = 4096  # to lay out so many takes minutes and gigabytes with a model of a thousand tensors


def rewrite(checkpoint: str, directory: str, layout: Layout, file_nbytes: int = _FILE_NBYTES) -> str:
    """Write ``checkpoint`` as the ranks of ``layout`` would have, into ``directory``; returns the new one's location.

    One file's worth of state is in memory at a time, or one box where that is larger. Raises ValueError for a layout
    that the model cannot have, a directory that has a checkpoint of the step, and a source that is not whole;
    DigestMismatch or HoldingGone for a damaged one; OSError. Nothing is left of it then.
    """
    manifest = read_manifest(checkpoint)
    schema, step = schema_from_json(manifest), manifest["step"]
    _check(schema, layout)
    if any(step_of(there) == step for there in list_checkpoints(directory)):
        raise ValueError(f"{directory} has a checkpoint of step {step} already; choose another folder")
    holdings = checkpoint_holdings(checkpoint)
    planner = Planner(schema, holdings)
    snapshot = replace(holdings[0].snapshot, layout=str(layout))
    dtypes = {spec.name: stored_as(spec.dtype) for spec in schema.tensors}
    return write_state(directory, schema, snapshot, lambda boxes: _read(planner, boxes, dtypes), file_nbytes)


def write_state(directory: str, schema: Schema, snapshot: Snapshot, read: Read, file_nbytes: int = _FILE_NBYTES) -> str:
    """Write and commit a checkpoint in ``directory`` as the ranks of ``snapshot.layout`` would have; its location.

    ``snapshot`` says what the manifest is to say; its records are not looked at. ``read`` gives the bits of some boxes,
    a file's worth at a time: C-contiguous arrays of their shapes. What ``read`` raises is raised, FileExistsError when
    somebody else has written the step meanwhile, and nothing stays then.
    """
    attempt = begin(directory, snapshot.step, exclusive=True)
    try:
        entries: list[dict[str, Any]] = []
        for shares in plan_shares(schema, live_holdings(schema, Layout.parse(snapshot.layout))).values():
            for batch in _batches(shares, file_nbytes):
                arrays = read([share.record.piece for share in batch])
                described = zip(batch, arrays, strict=True)
                entries += write_share(attempt.url, [(_described(share, a), _bytes(a)) for share, a in described])
        return commit(attempt, schema, snapshot, entries)
    except BaseException:
        give_up(attempt)
        raise


def _check(schema: Schema, layout: Layout) -> None:
    if layout.size > _MOST_RANKS:
        raise ValueError(
            f"layout {layout} has {layout.size} workers; a checkpoint is written for at most {_MOST_RANKS}"
        )
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


class WholeTensors:
    """The tensors of a checkpoint, put together from its pieces; every byte is verified. ``specs``: by name."""

    def __init__(self, checkpoint: str) -> None:
        schema = schema_from_json(read_manifest(checkpoint))
        self.specs = {spec.name: spec for spec in schema.tensors}
        self._planner = Planner(schema, checkpoint_holdings(checkpoint))

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor (see ``stored_as``). Raises DigestMismatch or HoldingGone."""
        shape, dtype = self.specs[name].shape, stored_as(self.specs[name].dtype)
        return _read(self._planner, [Piece(name, (0,) * len(shape), shape)], {name: dtype})[0]


def _read(planner: Planner, boxes: Sequence[Piece], dtypes: Mapping[str, np.dtype]) -> list[np.ndarray]:
    into = {box: np.empty(box.size, dtypes[box.name]) for box in boxes}
    load_state(planner.fetches(Destination("", tuple(boxes))), into, KeeperReads(_nothing_is_far))
    return [into[box] for box in boxes]


def _described(share: Share, array: np.ndarray) -> Share:
    record = share.record
    return replace(share, record=Record(record.piece, record.dtype, 0, record.nbytes, digest_of(_bytes(array))))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _nothing_is_far(node: str, requests: Any) -> Any:
    raise AssertionError("files are read by whoever needs them")
