"""The operations of a fenced group: each of gloo's, as a work whose wait ends when the generation's fence trips."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from workers.fence import Fence

GLANCE_S = 0.05


class FencedWork(dist.Work):
    """An operation whose wait ends when the fence trips, with a step to finish it in the thread that waits first.

    An error of gloo's trips the fence: a peer is gone, or the ranks no longer agree. Works have no ``get_future``.
    """

    def __init__(self, fence: Fence, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._fence = fence
        self._lock = threading.Lock()
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; True. Raises ``Fenced``, also after ``timeout``: the ranks are out of step then."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._await(time.monotonic() + seconds if seconds > 0 else None)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return True

    def _await(self, deadline: float | None) -> None:
        raise NotImplementedError

    def _await_event(self, event: threading.Event, deadline: float | None) -> None:
        """Wait for ``event``, which a trip sets as well: the caller must look which it was."""
        with self._fence.waking(event):
            if not event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                self._fence.trip("an operation took longer than its wait allowed")


class CollectiveWork(FencedWork):
    """Gloo collectives, one after the other."""

    def __init__(
        self,
        fence: Fence,
        parts: Sequence[dist.Work],
        finish: Callable[[], None] | None,
        over: Callable[[CollectiveWork], None],
    ) -> None:
        """``over`` is told when gloo no longer touches any tensor of this work."""
        super().__init__(fence, finish)
        self.parts = parts
        self._over = over

    def _await(self, deadline: float | None) -> None:
        for part in self.parts:
            self._await_part(part, deadline)
        self._over(self)

    def _await_part(self, part: dist.Work, deadline: float | None) -> None:
        """Look at the fence between short waits of torch's own.

        A callback into Python when gloo is done would notice a trip at once, but costs two more thread switches, which
        is more than most small operations take. A trip shuts the connections, so that it mostly ends gloo's wait too.
        """
        self._fence.check()
        while not part.is_completed():
            left = GLANCE_S if deadline is None else min(GLANCE_S, deadline - time.monotonic())
            if left <= 0:
                self._fence.trip("an operation took longer than its wait allowed")
            self._fence.check()
            with contextlib.suppress(RuntimeError):  # the time is over, or gloo failed: then it is completed as well
                part.wait(timedelta(seconds=max(left, 0.001)))  # torch waits for ever when it is given zero
        try:
            part.wait()  # it is over: this gives the error, if any
        except RuntimeError as error:
            self._fence.trip(error)
            self._fence.check()

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self.parts)


class PointToPointWork(FencedWork):
    """A send or receive. Gloo's work can only be waited for (no future, no polling), so a helper runs ``settle``."""

    def __init__(self, fence: Fence, issued: dist.Work, receives: bool, timeout: timedelta) -> None:
        super().__init__(fence)
        self._issued = issued
        self._timeout = timeout
        self._receives = receives
        self._woken = threading.Event()
        self._done = False
        self._source = -1

    def settle(self) -> None:
        """Wait inside gloo, for as long as it takes; called by a helper thread."""
        try:
            self._issued.wait(self._timeout)  # else gloo uses the timeout that the group was connected with
        except RuntimeError as error:
            self._fence.trip(error)
            return
        if self._receives:
            self._source = self._issued._source_rank()
        self._done = True
        self._woken.set()

    def _await(self, deadline: float | None) -> None:
        self._await_event(self._woken, deadline)
        if not self._done:
            self._fence.check()

    def is_completed(self) -> bool:
        return self._done

    def _source_rank(self) -> int:
        return self._source


# rows [world, n] -> [n]. Summing over rank order makes the result independent of timing; bf16 is rounded once.
_REDUCE_ROWS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.AVG: lambda rows: rows.sum(0, dtype=rows.dtype) / len(rows),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.BAND: lambda rows: functools.reduce(torch.bitwise_and, rows),
    ReduceOp.BOR: lambda rows: functools.reduce(torch.bitwise_or, rows),
    ReduceOp.BXOR: lambda rows: functools.reduce(torch.bitwise_xor, rows),
}


def _reduce_rows(options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    operation = ReduceOp.SUM if options is None else options.reduceOp
    for known, reduce in _REDUCE_ROWS.items():
        if operation == known:
            return reduce
    raise ValueError(f"reduce_scatter cannot reduce with {operation}")


class Issuer(Protocol):
    """What a group needs of its generation: running gloo's calls so that no thread of ours waits inside gloo."""

    fence: Fence

    def run(self, calls: Sequence[Callable[[], dist.Work]], finish: Callable[[], None] | None) -> CollectiveWork: ...

    def run_point_to_point(self, call: Callable[[], dist.Work], receives: bool) -> PointToPointWork: ...


class FencedGroup(dist.ProcessGroup):
    """A gloo group behind a generation's fence. Made by torch (``init_process_group``, ``new_group``, meshes).

    Method names and arguments are those of ``torch.distributed.ProcessGroup``.
    """

    def __init__(self, issuer: Issuer, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._issuer = issuer
        self._gloo = gloo
        # torch asks the group for its device types and its name, which live on the registered backend.
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)

    def abort(self) -> None:
        self._issuer.fence.trip("the process group was aborted")

    def _run(self, *calls: Callable[[], dist.Work], finish: Callable[[], None] | None = None) -> FencedWork:
        return self._issuer.run(calls, finish)

    def allreduce(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.allreduce(*args, **kwargs))

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.allreduce_coalesced(*args, **kwargs))

    def reduce(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.reduce(*args, **kwargs))

    def broadcast(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.broadcast(*args, **kwargs))

    def allgather(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.allgather(*args, **kwargs))

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.allgather_coalesced(*args, **kwargs))

    def all_gather_single(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo._allgather_base(*args, **kwargs))

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FencedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run(*(functools.partial(self._gloo._allgather_base, *pair) for pair in pairs))

    def gather(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.gather(*args, **kwargs))

    def scatter(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.scatter(*args, **kwargs))

    def alltoall(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.alltoall(*args, **kwargs))

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.alltoall_base(*args, **kwargs))

    def barrier(self, *args: Any, **kwargs: Any) -> FencedWork:
        return self._run(lambda: self._gloo.barrier(*args, **kwargs))

    # reduce_scatter is an all_to_all and a local reduction: (n-1)/n of the input travels once, where stock gloo runs a
    # whole all_reduce (twice that) whose work has no future.

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> FencedWork:
        reduce, output, pieces = _reduce_rows(opts), outputs[0], list(inputs[0])
        received = [torch.empty_like(pieces[self.rank()]) for _ in pieces]

        def finish() -> None:
            output.copy_(reduce(torch.stack(received)))

        return self._run(lambda: self._gloo.alltoall(received, pieces), finish=finish)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> FencedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FencedWork:
        reduce = _reduce_rows(opts)
        flat = [tensor.contiguous().view(-1) for tensor in inputs]
        received = [torch.empty_like(tensor) for tensor in flat]

        def finish() -> None:
            for output, rows in zip(outputs, received, strict=True):
                output.copy_(reduce(rows.view(self.size(), -1)).view_as(output))

        pairs = zip(received, flat, strict=True)
        return self._run(*(functools.partial(self._gloo.alltoall_base, *pair, [], []) for pair in pairs), finish=finish)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> FencedWork:  # noqa: N803 (torch's name)
        return self._issuer.run_point_to_point(lambda: self._gloo.send(tensors, dstRank, tag), receives=False)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> FencedWork:  # noqa: N803
        return self._issuer.run_point_to_point(lambda: self._gloo.recv(tensors, srcRank, tag), receives=True)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> FencedWork:
        return self._issuer.run_point_to_point(lambda: self._gloo.recv_anysource(tensors, tag), receives=True)
