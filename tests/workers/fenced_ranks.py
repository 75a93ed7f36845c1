"""Real processes that play the ranks of fenced generations; tests drive, stop and kill them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.socket_rendezvous import RendezvousServer, connect
from workers.device import Device
from workers.fenced_group import Fence, Fenced, Generation

GLOO_TIMEOUT_S = 20.0  # how long stock gloo would leave survivors waiting


class Rank:
    """What a function that runs in a rank's process gets."""

    def __init__(self, address: tuple[str, int], connection: Connection) -> None:
        self.rendezvous = connect(*address)
        self.fence = Fence()
        self._connection = connection
        self.generation: Generation | None = None

    def form(self, number: int, rank: int, world_size: int, **options: Any) -> Generation:
        self.fence = Fence()
        options = {"timeout": GLOO_TIMEOUT_S, **options}
        device = Device.choose()
        self.generation = Generation.form(self.rendezvous, number, rank, world_size, self.fence, device, **options)
        return self.generation

    def tell(self, message: Any) -> None:
        self._connection.send(("told", message))


def _serve(address: tuple[str, int], connection: Connection) -> None:
    torch.set_num_threads(1)
    rank = Rank(address, connection)

    def run(function: Callable, arguments: tuple) -> None:
        try:
            connection.send(("result", function(rank, *arguments)))
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))

    while (command := connection.recv())[0] != "end":
        if command[0] == "trip":
            rank.fence.trip(command[1])
        else:
            threading.Thread(target=run, args=command[1:], daemon=True).start()
    os._exit(0)


class Process:
    """A rank's process, seen from the test."""

    def __init__(self, address: tuple[str, int]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", __name__])
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(address, other), daemon=True)
        self._process.start()
        other.close()

    def start(self, function: Callable, *arguments: Any) -> None:
        self._connection.send(("run", function, arguments))

    def trip(self, cause: str) -> None:
        self._connection.send(("trip", cause))

    def told(self, timeout: float = 60.0) -> Any:
        kind, value = self._receive(timeout)
        assert kind == "told", value
        return value

    def result(self, timeout: float = 60.0) -> Any:
        kind, value = self._receive(timeout)
        assert kind == "result", value
        return value

    def error(self, timeout: float = 60.0) -> str:
        kind, value = self._receive(timeout)
        assert kind == "error", value
        return value

    def end_of_run(self, timeout: float) -> None:
        """Wait until its function has ended, well or not."""
        assert self._receive(timeout)[0] != "told"

    def _receive(self, timeout: float) -> tuple[str, Any]:
        assert self._connection.poll(timeout), f"no answer within {timeout:g} s"
        return self._connection.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


class Pool:
    """Processes by rank; a dead one is replaced by a new one (milliseconds, from the fork server)."""

    def __init__(self) -> None:
        self._server = RendezvousServer()
        self._processes: list[Process] = []
        self._number = 0

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    def ranks(self, world_size: int) -> list[Process]:
        while len(self._processes) < world_size:
            self._processes.append(Process(self.address))
        return self._processes[:world_size]

    def remove(self, process: Process) -> None:
        process.end()
        self._processes.remove(process)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def run(self, world_size: int, function: Callable, *arguments: Any) -> list[Any]:
        """``function(rank, number, index, world_size, *arguments)`` on all ranks; their results in order of rank."""
        return self.run_on(self.ranks(world_size), function, *arguments)

    def run_on(self, processes: list[Process], function: Callable, *arguments: Any) -> list[Any]:
        number = self.next_number()
        for index, process in enumerate(processes):
            process.start(function, number, index, len(processes), *arguments)
        try:
            return [process.result() for process in processes]
        except AssertionError:
            for process in processes:  # they may be anywhere; the next test gets new ones
                self.remove(process)
            raise

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self._server.close()


# What the ranks run. Large enough that a kill falls into the middle of a transfer.

NUM_VALUES = 1 << 19


def _send_receive_ring(rank: int, world_size: int) -> None:
    values = torch.ones(NUM_VALUES)
    works = [dist.isend(values, (rank + 1) % world_size), dist.irecv(torch.empty_like(values), (rank - 1) % world_size)]
    for work in works:
        work.wait()


def _values(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(NUM_VALUES), torch.ones(NUM_VALUES // world_size)


OPERATIONS: Mapping[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, n: dist.all_reduce(_values(n)[0]),
    "all_gather": lambda rank, n: dist.all_gather_single(*_values(n)),
    "reduce_scatter": lambda rank, n: dist.reduce_scatter_single(*reversed(_values(n))),
    "all_to_all": lambda rank, n: dist.all_to_all_single(torch.empty_like(_values(n)[0]), _values(n)[0]),
    "broadcast": lambda rank, n: dist.broadcast(_values(n)[0], 0),
    "send_recv": _send_receive_ring,
    "barrier": lambda rank, n: dist.barrier(),
}


def repeat_until_fenced(rank: Rank, number: int, index: int, world_size: int, operation: str) -> tuple[float, str]:
    """Returns when (monotonic) this rank got out, and the cause it was told. Leaves its generation dissolved."""
    generation = rank.form(number, index, world_size)
    rank.tell("formed")
    try:
        while True:
            OPERATIONS[operation](index, world_size)
    except Fenced as error:
        out = time.monotonic()
        generation.dissolve()
        return out, str(error)


def check_sums(rank: Rank, number: int, index: int, world_size: int) -> tuple[float, float]:
    """A fresh generation that computes rightly; returns (seconds to form, sum over ranks of rank + 1)."""
    started = time.perf_counter()
    generation = rank.form(number, index, world_size)
    seconds = time.perf_counter() - started
    values = torch.full((1000,), index + 1.0)
    dist.all_reduce(values)
    gathered = torch.empty(world_size)
    dist.all_gather_single(gathered, torch.full((1,), float(index)))
    assert gathered.tolist() == list(range(world_size))
    dist.barrier()
    generation.dissolve()
    return seconds, values[-1].item()
