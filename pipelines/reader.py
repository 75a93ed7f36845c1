"""A reader: global batches on request, built ahead. Plain Python; the orchestrator makes an actor of it.

It has no state that matters: every answer is a function of the constructor's arguments and the cursor, so any reader
answers the same, and one that dies costs only the batches it had built ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Condition, Lock, Thread
from typing import Any

from pipelines.batches import Batch, BatchBuilder, Cursor
from pipelines.config import DataConfig
from pipelines.corpus import Corpus

_BATCHES_KEPT = 4  # beside those ahead, for ranks that lag and for steps that are run again


class Reader:
    """Thread-safe: all ranks of a step may ask at once and share one build."""

    def __init__(
        self, manifest_json: str, tokenizer_json: str, config: DataConfig, global_rows: int, seed: int
    ) -> None:
        """See ``BatchBuilder``. Raises ValueError, naming it, for a file of the manifest that differs on this node."""
        self._builder = BatchBuilder(Corpus.from_manifest(manifest_json), tokenizer_json, config, global_rows, seed)
        self._building = Lock()  # guards the builder; held for as long as a window takes
        self._changed = Condition()  # guards what follows; never held while building
        self._num_ahead = config.prefetch_steps
        self._kept: OrderedDict[Cursor, Batch] = OrderedDict()
        self._eval: dict[int, Batch] = {}
        self._wanted: Cursor | None = None
        self._closed = False
        self._thread = Thread(target=self._build_ahead, name="reader", daemon=True)
        self._thread.start()

    def ready(self, cursor: list[int] | None = None) -> bool:
        """True once the reader exists. Begins to build at ``cursor``, so that the first request finds its batch."""
        if cursor is not None:
            self._want(Cursor.from_list(cursor))
        return True

    def batch(self, cursor: list[int], data_size: int, data_rank: int, micro_batch_rows: int) -> dict[str, Any]:
        """``RankBatch.to_dict()`` of the global batch at ``cursor``. Raises ValueError for a cursor of another order or
        a file that has changed."""
        self._want(Cursor.from_list(cursor))
        batch = self._get(Cursor.from_list(cursor))
        return batch.for_rank(data_size, data_rank, micro_batch_rows).to_dict()

    def eval_batch(self, num_rows: int, data_size: int, data_rank: int, micro_batch_rows: int) -> dict[str, Any]:
        """The same for the first ``num_rows`` held-out rows. Raises ValueError if nothing is held out."""
        with self._building:
            if num_rows not in self._eval:
                self._eval[num_rows] = self._builder.eval_batch(num_rows)
        return self._eval[num_rows].for_rank(data_size, data_rank, micro_batch_rows).to_dict()

    def close(self) -> None:
        """Stop building ahead, as soon as the batch at hand is built."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _get(self, cursor: Cursor) -> Batch:
        batch = self._look_up(cursor)
        if batch is None:
            with self._building:
                batch = self._look_up(cursor)  # another thread may have built it while this one waited
                if batch is None:
                    batch = self._builder.batch(cursor)
                    self._keep(batch)
        return batch

    def _look_up(self, cursor: Cursor) -> Batch | None:
        with self._changed:
            return self._kept.get(cursor)

    def _keep(self, batch: Batch) -> None:
        with self._changed:
            self._kept[batch.cursor] = batch
            if len(self._kept) > self._num_ahead + _BATCHES_KEPT:
                self._kept.popitem(last=False)

    def _want(self, cursor: Cursor) -> None:
        with self._changed:
            self._wanted = cursor
            self._changed.notify_all()

    def _build_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted is not None)
                if self._closed:
                    return
                cursor, self._wanted = self._wanted, None
            assert cursor is not None
            # What cannot be built is left for the request that needs it, which gets the error.
            try:
                self._build_from(cursor)
            except ValueError:
                continue

    def _build_from(self, cursor: Cursor) -> None:
        """The batch wanted, those ahead of it, then the next window; a newer wish goes first."""
        at = cursor
        for _ in range(1 + self._num_ahead):
            at = self._get(at).next
            with self._changed:
                if self._closed or self._wanted is not None:
                    return
        with self._building:
            self._builder.build_window_after(at)
