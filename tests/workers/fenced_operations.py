"""What ranks compute both under stock gloo and under fenced groups, to compare the two."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.workers.fenced_ranks import Rank

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.int8, torch.uint8)
SUM, PRODUCT, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX


def under_stock_gloo(store: str, index: int, world_size: int, compute: Callable[[], Any]) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=index, world_size=world_size)
    try:
        return compute()
    finally:
        dist.barrier()
        dist.destroy_process_group()


def under_fence(rank: Rank, number: int, index: int, world_size: int, compute: Callable[[], Any]) -> Any:
    generation = rank.form(number, index, world_size)
    try:
        return compute()
    finally:
        if not rank.fence.tripped:
            dist.barrier()
        generation.dissolve()


def _operations(index: int, world_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, result) of every operation for every dtype and reduction; the inputs depend on the rank."""
    everyone, next_rank, last_rank = range(world_size), (index + 1) % world_size, (index - 1) % world_size
    odd = dist.new_group([rank for rank in everyone if rank % 2])
    for dtype in (*FLOATS, *INTS, torch.bool):
        torch.manual_seed(index)
        values = torch.randint(0 if dtype in (torch.uint8, torch.bool) else -3, 4, (world_size, 3, 5)).to(dtype)
        row = values[0].clone()

        def like(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        if dtype != torch.bool:  # gloo does not reduce it
            bitwise = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR) if dtype in INTS else ()
            for op in (SUM, PRODUCT, MIN, MAX, *bitwise):
                dist.all_reduce(result := row.clone(), op)
                yield f"all_reduce {op} {dtype}", result
                dist.reduce(result := row.clone(), 1, op)
                yield f"reduce {op} {dtype}", result if index == 1 else like(0)
                dist.reduce_scatter_single(result := like(3, 5), values.view(-1, 5).clone(), op)
                yield f"reduce_scatter_single {op} {dtype}", result
                dist.reduce_scatter(result := like(3, 5), list(values.clone()), op)
                yield f"reduce_scatter {op} {dtype}", result
            if index % 2:
                dist.all_reduce(result := row.clone(), group=odd)
                yield f"all_reduce in a subgroup {dtype}", result
        dist.all_gather(parts := [like(3, 5) for _ in everyone], row)
        yield f"all_gather {dtype}", torch.stack(parts)
        dist.all_gather_single(result := like(world_size * 3, 5), row)
        yield f"all_gather_single {dtype}", result
        dist.all_to_all_single(result := like(world_size, 3, 5), values)
        yield f"all_to_all_single {dtype}", result
        sizes = [rank + 1 for rank in everyone]  # uneven: rank r gets r + 1 rows of everybody
        ragged = torch.arange(sum(sizes)).to(dtype) + row[0, 0]
        dist.all_to_all_single(result := like(world_size * (index + 1)), ragged, [index + 1] * world_size, sizes)
        yield f"all_to_all_single, uneven {dtype}", result
        dist.all_to_all(parts := [like(3, 5) for _ in everyone], list(values.clone()))
        yield f"all_to_all {dtype}", torch.stack(parts)
        dist.broadcast(result := row.clone(), 2)
        yield f"broadcast {dtype}", result
        dist.gather(row, parts if index == 0 else None)
        yield f"gather {dtype}", torch.stack(parts)
        dist.scatter(result := like(3, 5), list(values.clone()) if index == 3 else None, 3)
        yield f"scatter {dtype}", result
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, row, next_rank), dist.P2POp(dist.irecv, result := like(3, 5), last_rank)]
        )
        for work in works:
            work.wait()
        yield f"batch_isend_irecv {dtype}", result
        if index == 0:
            sources = {dist.recv(result := like(3, 5)) for _ in everyone[1:]}
            yield f"recv from any {dtype}", torch.tensor(sorted(sources))
        else:
            dist.send(row, 0)


def _above_operations(index: int, world_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What torch builds on the operations: object lists, coalescing, functional collectives, DTensor on meshes."""
    dist.all_gather_object(objects := [None] * world_size, {"rank": index})
    yield "all_gather_object", torch.tensor([each["rank"] for each in objects])
    objects = [index, "text"]
    if index == 0:
        dist.send_object_list(objects, 1)
    elif index == 1:
        dist.recv_object_list(objects, 0)
    dist.broadcast_object_list(objects, 1)
    yield "object lists", torch.tensor(objects[0])
    values = torch.arange(24.0).view(8, 3) + index
    with dist._coalescing_manager():
        dist.all_reduce(first := values.clone())
        dist.all_reduce(second := values * 2)
    yield "coalesced all_reduce", first + second
    with dist._coalescing_manager():
        dist.all_gather_single(first := torch.empty(8 * world_size, 3), values)
        dist.all_gather_single(second := torch.empty(8 * world_size, 3), values * 2)
    yield "coalesced all_gather", first + second
    with dist._coalescing_manager():
        dist.reduce_scatter_single(first := torch.empty(8 // world_size, 3), values)
        dist.reduce_scatter_single(second := torch.empty(8 // world_size, 3), values * 2)
    yield "coalesced reduce_scatter", first + second
    group = dist.group.WORLD
    yield "functional all_reduce", functional.all_reduce(values, "sum", group) + 0
    yield "functional all_gather", functional.all_gather_tensor(values, 0, group) + 0
    yield "functional reduce_scatter", functional.reduce_scatter_tensor(values, "sum", 0, group) + 0
    yield "functional all_to_all", functional.all_to_all_single(values, None, None, group) + 0
    yield "functional broadcast", functional.broadcast(values, 1, group) + 0
    for shape in ((world_size,), (2, world_size // 2), (2, 1, 2), (1, 2, 2, 1)):
        mesh = init_device_mesh("cpu", shape)
        torch.manual_seed(0)
        whole = torch.randn(8, 12)
        sharded = distribute_tensor(whole, mesh, [Shard(at % 2) for at in range(len(shape))])
        swapped = sharded.redistribute(mesh, [Shard(1 - at % 2) for at in range(len(shape))])
        yield f"DTensor from shard to shard {shape}", swapped.to_local()
        yield f"DTensor made whole {shape}", swapped.redistribute(mesh, [Replicate()] * len(shape)).to_local()
        yield f"DTensor product {shape}", (sharded @ sharded.t()).full_tensor()


def numerical_results(rank: Rank, number: int, index: int, world_size: int, store: str) -> tuple[list[str], int]:
    """(names of the results that differ between stock gloo and fenced groups, how many were compared)"""

    def compute() -> dict[str, torch.Tensor]:
        results = [*_operations(index, world_size), *_above_operations(index, world_size)]
        assert len({name for name, _ in results}) == len(results)
        return {name: tensor.clone() for name, tensor in results}

    expected = under_stock_gloo(store, index, world_size, compute)
    found = under_fence(rank, number, index, world_size, compute)
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])], len(found)


class Hybrid:
    """One rank of a two-stage 1F1B pipeline whose stages are FSDP2 modules replicated 2x and sharded over the rest."""

    def __init__(self, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, world_size // 4), mesh_dim_names=("pp", "replicate", "shard"))
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
        self.stage = mesh["pp"].get_local_rank()
        self.module = nn.Sequential(*blocks[2 * self.stage : 2 * self.stage + 2])
        for block in self.module:
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(self.module, mesh=mesh["replicate", "shard"])
        # No example input: the stages tell each other their shapes, over send and receive of objects.
        stage = PipelineStage(self.module, self.stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self._schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(dist.get_rank() % (world_size // 2))
        self._batch = torch.randn(8, 32)

    def step(self) -> None:
        if self.stage == 0:
            self._schedule.step(self._batch)
        else:
            self._schedule.step(target=self._batch, losses=[])

    def gradients(self) -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in self.module.parameters()]
        assert all(isinstance(gradient, DTensor) for gradient in gradients)
        return [gradient.full_tensor() for gradient in gradients]


def hybrid_step(rank: Rank, number: int, index: int, world_size: int, store: str) -> float:
    """Largest difference of any gradient between stock gloo and fenced groups, relative to its largest value."""

    def compute() -> list[torch.Tensor]:
        hybrid = Hybrid(world_size)
        hybrid.step()
        return hybrid.gradients()

    expected = under_stock_gloo(store, index, world_size, compute)
    found = under_fence(rank, number, index, world_size, compute)
    assert len(found) == 8
    return max(((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected, strict=True))


def hybrid_until_fenced(rank: Rank, number: int, index: int, world_size: int) -> tuple[float, str]:
    """Like ``fenced_ranks.repeat_until_fenced``, for whole steps."""
    generation = rank.form(number, index, world_size)
    hybrid = Hybrid(world_size)
    hybrid.step()
    rank.tell("stepped")
    try:
        while True:
            hybrid.step()
    except RuntimeError as error:  # the schedule wraps what its stage raises
        assert rank.fence.tripped, error
        out = time.monotonic()
        del hybrid
        generation.dissolve()
        return out, str(error)


def many_generations(
    rank: Rank, number: int, index: int, world_size: int, num_generations: int
) -> dict[str, list[float]]:
    """File descriptors, threads and seconds to form, after each of a row of generations with a few groups each."""
    seen: dict[str, list[float]] = {"descriptors": [], "threads": [], "seconds": []}
    of_earlier_tests = set(threading.enumerate())  # they lost a rank: parked until gloo gives up, if it must be
    for offset in range(num_generations):
        started = time.perf_counter()
        generation = rank.form(number + offset, index, world_size)
        seen["seconds"].append(time.perf_counter() - started)
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
        for axis in ("a", "b"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        dist.barrier()
        generation.dissolve()
        for thread in set(threading.enumerate()) - of_earlier_tests:
            if thread.name == "fenced-park":
                thread.join()
        seen["descriptors"].append(len(os.listdir("/proc/self/fd")))
        seen["threads"].append(len(os.listdir("/proc/self/task")))
    return seen


def time_operations(rank: Rank, number: int, index: int, world_size: int, store: str) -> dict[str, tuple[float, float]]:
    """Median milliseconds of an all_reduce of 1 and of 1 Mi floats and of a ring of sends: (stock gloo, fenced)."""

    def median_ms(operation: Callable[[], Any], num: int) -> float:
        milliseconds = []
        for _ in range(num):
            started = time.perf_counter()
            operation()
            milliseconds.append((time.perf_counter() - started) * 1e3)
        return statistics.median(milliseconds)

    def ring() -> None:
        works = [dist.isend(torch.ones(4), (index + 1) % world_size)]
        works.append(dist.irecv(torch.empty(4), (index - 1) % world_size))
        for work in works:
            work.wait()

    def compute() -> dict[str, float]:
        small, large = torch.ones(1), torch.ones(1 << 20)
        return {
            "all_reduce of 1 float": median_ms(lambda: dist.all_reduce(small), 200),
            "all_reduce of 4 MiB": median_ms(lambda: dist.all_reduce(large), 10),
            "ring of sends": median_ms(ring, 200),
        }

    stock = under_stock_gloo(store, index, world_size, compute)
    fenced = under_fence(rank, number, index, world_size, compute)
    return {name: (stock[name], fenced[name]) for name in stock}


def form_only(rank: Rank, number: int, index: int, world_size: int, deadline: float) -> None:
    """Form a generation; raises what that raises."""
    try:
        rank.form(number, index, world_size, deadline=deadline).dissolve()
    finally:
        assert rank.fence.tripped or not dist.is_initialized()


def wait_longer_than_allowed(rank: Rank, number: int, index: int, world_size: int) -> None:
    """Rank 0 waits for a value that nobody sends."""
    generation = rank.form(number, index, world_size)
    try:
        if index == 0:
            dist.irecv(torch.empty(1), 1).wait(timedelta(milliseconds=50))
        else:
            dist.barrier()
    finally:
        generation.dissolve()


def outlast_the_timeout(rank: Rank, number: int, index: int, world_size: int) -> None:
    """Rank 0 waits for the others at a barrier to which they do not come."""
    generation = rank.form(number, index, world_size, timeout=0.5)
    if index == 0:
        try:
            dist.barrier()
        finally:
            generation.dissolve()


def leave(rank: Rank, number: int, index: int, world_size: int) -> None:
    """Dissolve what an earlier function left."""
    assert rank.generation is not None
    rank.generation.dissolve()


def wrong_argument(rank: Rank, number: int, index: int, world_size: int) -> str:
    """A mistake of the caller's is told as such and ends nothing."""

    def compute() -> str:
        try:
            dist.all_gather_single(torch.empty(5), torch.empty(4))
        except RuntimeError as error:
            dist.all_reduce(torch.ones(1))
            return f"{type(error).__name__}: {error}"
        return ""

    return under_fence(rank, number, index, world_size, compute)


def late_message(rank: Rank, number: int, index: int, world_size: int, late_by_s: float) -> float:
    """Rank 0 sends what rank 1 waits for, later than the deadline for forming a group; what rank 1 got."""
    generation = rank.form(number, index, world_size, deadline=late_by_s / 2)
    value = torch.full((1,), float(index))
    if index == 0:
        threading.Event().wait(late_by_s)  # the sender is busy
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
    dist.barrier()
    generation.dissolve()
    return value.item()
