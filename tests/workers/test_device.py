"""The device seam's choices. What a GPU then does needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from workers.device import Device


@dataclass
class Gpus:
    """Stands for ``torch.cuda`` on a machine with so many GPUs."""

    num: int

    def is_available(self) -> bool:
        return self.num > 0

    def device_count(self) -> int:
        return self.num


def test_a_gpu_is_taken_where_there_is_one() -> None:
    device = Device.choose(1, num_threads=3, cuda=Gpus(2))
    assert (device.kind, device.index, device.num_threads, device.backend) == ("cuda", 1, 3, "cuda:nccl")
    assert device.torch == torch.device("cuda", 1)
    assert device.abort_groups is not None  # NCCL's communicators are aborted when the fence trips
    assert Device.choose(cuda=Gpus(2)).index == 0


def test_the_cpu_is_taken_where_there_is_none() -> None:
    device = Device.choose(cuda=Gpus(0))
    assert (device.kind, device.index, device.num_threads, device.backend) == ("cpu", None, 1, "cpu:fenced")
    assert device.torch == torch.device("cpu")
    assert device.abort_groups is None  # the fenced group needs no help


@pytest.mark.parametrize(
    ("index", "num_threads", "num_gpus", "message"),
    [
        (0, 1, 0, "GPU 0 was asked for, but this process sees no GPU"),
        (2, 1, 2, r"GPU 2 was asked for, but this process sees 2 \(0 to 1\)"),
        (None, 0, 0, "num_threads is 0; a worker needs at least 1 thread"),
    ],
)
def test_what_is_not_there_is_refused(index: int | None, num_threads: int, num_gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device.choose(index, num_threads, Gpus(num_gpus))


def test_a_cpu_copies_at_once() -> None:
    device = Device.choose(cuda=Gpus(0))
    values = torch.arange(5.0)
    buffer = device.host_buffer(values.nbytes)
    with device.copying():
        buffer.view(torch.float32).copy_(values, non_blocking=True)
    device.synchronize()
    assert buffer.dtype == torch.uint8 and torch.equal(buffer.view(torch.float32), values)


def test_use_sets_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        Device.choose(num_threads=before + 1, cuda=Gpus(0)).use()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_aborting_reaches_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = []

    class Group:
        def abort(self) -> None:
            aborted.append(self)

    groups = {Group(): None, Group(): None}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    abort = Device.choose(cuda=Gpus(1)).abort_groups
    assert abort is not None
    abort()
    assert aborted == list(groups)
