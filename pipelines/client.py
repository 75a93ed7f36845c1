"""A worker's side of the input: fetches ahead, goes to another reader when one fails, never holds up a fenced worker.

It knows nothing of Ray: readers are opaque handles, and ``call(handle, method, args)`` blocks until the answer is there
and raises if the reader is dead. A call that never returns is left behind on a thread of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any

from pipelines.batches import Cursor, RankBatch

Call = Callable[[Any, str, tuple[Any, ...]], Any]

_DEPTH = 2  # batches fetched ahead; the reader itself builds further ahead
_RETRY_S = 0.5  # pause after a round in which no reader answered, unless there are new ones sooner
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)  # answers; all else is a dead reader

_log = logging.getLogger("planaria.input")


class InputInterrupted(Exception):
    """``interrupt`` or ``close`` was called while, or before, a batch was waited for."""


class ReaderClient:
    """Batches of one data rank in one generation. ``next`` and ``eval_batch`` belong to one thread, the training
    thread; ``replace``, ``interrupt`` and ``close`` may come from any."""

    def __init__(
        self,
        readers: Sequence[Any],
        call: Call,
        *,
        data_size: int,
        data_rank: int,
        micro_batch_rows: int,
        timeout_s: float = 30.0,
    ) -> None:
        """``readers``: handles, the preferred one first. ``timeout_s``: after that long the next reader is asked."""
        self._readers = list(readers)
        self._call = call
        self._deal = (data_size, data_rank, micro_batch_rows)
        self._timeout_s = timeout_s
        self._changed = Condition()  # guards all that follows and the list of readers
        self._interrupted = False
        self._num_replaced = 0
        self._last: RankBatch | None = None
        self._fetched: deque[RankBatch] = deque()
        self._fetching: Cursor | None = None  # the end of the chain: fetched batches, then this
        self._error: Exception | None = None
        self._thread = Thread(target=self._fetch_ahead, name="reader-client", daemon=True)
        self._thread.start()

    def next(self, cursor: Cursor) -> RankBatch:
        """This rank's part of the global batch at ``cursor``; asking again gives it again.

        Waits for as long as no reader is alive. Raises ``InputInterrupted``, and what the readers that are alive raise
        (ValueError for a changed file or a cursor of another order).
        """
        with self._changed:
            if self._last is not None and self._last.cursor == cursor and not self._interrupted:
                return self._last
            self._begin_at(cursor)
            self._changed.wait_for(lambda: self._interrupted or self._fetched or self._error)
            if self._interrupted:
                raise InputInterrupted
            if not self._fetched:
                assert self._error is not None
                error, self._error, self._fetching = self._error, None, None
                raise error
            self._last = self._fetched.popleft()
            self._changed.notify_all()
            return self._last

    def prefetch(self, cursor: Cursor) -> None:
        """Begin to fetch the batch at ``cursor`` and those after it, before anybody waits for them."""
        with self._changed:
            self._begin_at(cursor)

    def _begin_at(self, cursor: Cursor) -> None:
        if self._head() != cursor:
            self._fetched.clear()
            self._fetching, self._error = cursor, None
            self._changed.notify_all()

    def eval_batch(self, num_rows: int) -> RankBatch:
        """This rank's part of the first ``num_rows`` held-out rows. Raises as ``next`` does."""
        return self._ask("eval_batch", (num_rows, *self._deal))

    def replace(self, readers: Sequence[Any]) -> None:
        """Use these readers from now on; batches already fetched stay good."""
        with self._changed:
            self._readers = list(readers)
            self._num_replaced += 1
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End every wait, now and later, with ``InputInterrupted``. The next generation makes a client of its own."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """``interrupt``, and stop fetching."""
        self.interrupt()
        self._thread.join()

    def _head(self) -> Cursor | None:
        return self._fetched[0].cursor if self._fetched else self._fetching

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_fetch)
                if self._interrupted:
                    return
                cursor = self._fetching
            assert cursor is not None
            try:
                batch, error = self._ask("batch", (cursor.to_list(), *self._deal)), None
            except InputInterrupted:
                return
            except _REFUSALS as refusal:
                batch, error = None, refusal
            with self._changed:
                if self._fetching != cursor:  # another chain began meanwhile
                    continue
                if batch is not None:
                    self._fetched.append(batch)
                    self._fetching = batch.next
                self._error = error
                self._changed.notify_all()

    def _may_fetch(self) -> bool:
        wanted = self._fetching is not None and self._error is None and len(self._fetched) < _DEPTH
        return self._interrupted or wanted

    def _ask(self, method: str, args: tuple[Any, ...]) -> RankBatch:
        """The answer of the first reader that gives one. Goes round until there is one or all alive refuse."""
        while True:
            with self._changed:
                readers, num_replaced = list(self._readers), self._num_replaced
            refused: Exception | None = None
            for reader in readers:
                try:
                    return RankBatch.from_dict(self._attempt(reader, method, args))
                except InputInterrupted:
                    raise
                except _REFUSALS as refusal:
                    refused = refusal
                except Exception as death:  # whatever that looks like in the caller's transport
                    self._ask_last(reader, death)
            if refused is not None:
                raise refused
            with self._changed:
                self._wait_for_readers(num_replaced)
                if self._interrupted:
                    raise InputInterrupted

    def _attempt(self, reader: Any, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """One call on a thread of its own, left behind if the reader is too slow or the wait is interrupted."""
        outcome: list[dict[str, Any] | Exception] = []

        def run() -> None:
            try:
                result = self._call(reader, method, args)
            except Exception as error:
                result = error
            with self._changed:
                outcome.append(result)
                self._changed.notify_all()

        Thread(target=run, name=f"reader-{method}", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or outcome, self._timeout_s)
            if self._interrupted:
                raise InputInterrupted
        if not outcome:
            raise TimeoutError(f"no answer to {method} within {self._timeout_s} s")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _wait_for_readers(self, num_replaced: int) -> None:
        self._changed.wait_for(lambda: self._interrupted or self._num_replaced != num_replaced, _RETRY_S)

    def _ask_last(self, reader: Any, reason: Exception) -> None:
        _log.warning("a reader failed, asking another: %r", reason)
        with self._changed:
            if any(other is reader for other in self._readers):
                self._readers = [other for other in self._readers if other is not reader] + [reader]
