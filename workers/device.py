"""The one seam between a CPU worker and a GPU worker: everything else in Planaria asks a ``Device``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Device:
    """What one worker computes on.

    ``backend`` is what ``init_process_group`` gets: on a CPU gloo inside the fence (``fenced_group.py``), on a GPU
    NCCL, whose communicators ``abort_groups`` ends when the fence trips.
    """

    kind: Literal["cpu", "cuda"]
    index: int | None
    num_threads: int
    backend: str

    @classmethod
    def choose(cls, index: int | None = None, num_threads: int = 1, cuda: Any = torch.cuda) -> Device:
        """The GPU ``index`` (default 0) where there are GPUs, otherwise the CPU with ``num_threads`` threads.

        ``cuda`` answers ``is_available`` and ``device_count``. Raises ``ValueError`` for a GPU that is not there.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; a worker needs at least 1 thread")
        if not cuda.is_available():
            if index is not None:
                raise ValueError(f"GPU {index} was asked for, but this process sees no GPU")
            return cls("cpu", None, num_threads, "cpu:fenced")
        index, count = index or 0, cuda.device_count()
        if not 0 <= index < count:
            raise ValueError(f"GPU {index} was asked for, but this process sees {count} (0 to {count - 1})")
        return cls("cuda", index, num_threads, "cuda:nccl")

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    def use(self) -> None:
        """Make it the device of this process: thread count, and the current GPU."""
        torch.set_num_threads(self.num_threads)
        if self.kind == "cuda":
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        """Wait for all work queued on the device. Work on a CPU is done when the call returns."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of host memory that the device copies to and from fast (pinned on a GPU)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.kind == "cuda")

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies issued inside run beside the computation (on a GPU: a stream of their own) and are done at the exit.

        On a GPU they start after the work that was queued before, so they see its results.
        """
        if self.kind == "cpu":
            yield
            return
        stream = torch.cuda.Stream(self.index)
        stream.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    @property
    def abort_groups(self) -> Callable[[], None] | None:
        """What ends collectives that hang on the device; None where the fence does without (``fenced_group.py``)."""
        return _abort_all_groups if self.kind == "cuda" else None


def _abort_all_groups() -> None:
    # The groups of a generation are torch's to list: meshes make them without telling anybody else.
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()
