"""The rendezvous: right answers, and waits that always end, with a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.socket_rendezvous import RendezvousServer, connect
from workers.fence import Fence, Fenced
from workers.rendezvous import MissingKeys, RendezvousError, Space, Spaces, gather

SERVE = """
import sys, time
from tests.workers.socket_rendezvous import RendezvousServer
assert "torch" not in sys.modules
print(RendezvousServer().address[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer()
    yield server
    server.close()


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen, int]]:
    """A server in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def _space(server: RendezvousServer, generation: int = 1, fence: Fence | None = None) -> Space:
    return Space(connect(*server.address), "workers", generation, fence or Fence())


def test_values_travel_unchanged(server: RendezvousServer) -> None:
    one, other = _space(server), _space(server)
    value = os.urandom(100_000) + b"\0"
    one.set("key", value)
    assert other.look(["key"]) == ([value], [])
    assert other.look(["key", "no", "nor"]) == ([], ["no", "nor"])
    assert other.compare_set("key", b"else", b"new") == value
    assert other.compare_set("key", value, b"new") == b"new"
    assert other.compare_set("absent", b"", b"made") == b"made"
    assert one.num_keys() == 2
    assert one.delete("key") and not one.delete("key")


def test_adding_from_many_threads_loses_nothing(server: RendezvousServer) -> None:
    spaces = [_space(server) for _ in range(8)]
    with ThreadPoolExecutor(16) as pool:  # two threads share each connection
        sums = list(pool.map(lambda turn: spaces[turn % 8].add("sum", 1), range(800)))
    assert sorted(sums) == list(range(1, 801))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["set", "get"]), st.sampled_from("ab"), st.binary(max_size=3))
    )
)
def test_a_space_holds_only_its_newest_generation(requests: list[tuple[int, str, str, bytes]]) -> None:
    spaces, newest, model = Spaces(), -1, {}
    for generation, command, key, value in requests:
        arguments = [value] if command == "set" else []
        answer = spaces.answer([b"scope", str(generation).encode(), command.encode(), key.encode(), *arguments])
        if generation < newest:
            assert answer == [b"over", str(newest).encode()]
            continue
        if generation > newest:
            newest, model = generation, {}
        if command == "set":
            model[key] = value
            assert answer == [b"ok"]
        else:
            assert answer == ([b"ok", b"found", model[key]] if key in model else [b"ok", b"missing", key.encode()])


def test_scopes_do_not_meet(server: RendezvousServer) -> None:
    workers, keepers = (
        Space(connect(*server.address), scope, at, Fence()) for scope, at in (("workers", 7), ("keepers", 2))
    )
    workers.set("key", b"1")
    assert keepers.look(["key"]) == ([], ["key"])


def test_an_older_generation_is_told_that_it_is_over(server: RendezvousServer) -> None:
    old, new = _space(server, 3), _space(server, 5)
    old.set("key", b"old")
    new.set("other", b"new")
    with pytest.raises(RendezvousError, match="generation 3 is over: generation 5 has begun"):
        old.look(["key"])
    assert new.look(["key"]) == ([], ["key"])


def test_gather_names_the_ranks_that_did_not_come(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        there = pool.map(lambda r: gather(_space(server), "all", r, (0, 2, 5), b"%d" % r, 5.0), (0, 2, 5))
        assert list(there) == [[b"0", b"2", b"5"]] * 3
    with pytest.raises(RendezvousError, match="ranks 1, 4 did not come within 0.1 s"):
        gather(_space(server), "all", 0, (0, 1, 2, 4), b"", 0.1)


def test_a_missing_key_ends_the_wait_at_its_deadline(server: RendezvousServer) -> None:
    started = time.monotonic()
    with pytest.raises(MissingKeys, match="after 0.1 s still missing: b, c"):
        space = _space(server)
        space.set("a", b"")
        space.wait(["a", "b", "c"], 0.1)
    assert 0.1 <= time.monotonic() - started < 1.0


def test_a_trip_ends_a_wait(server: RendezvousServer) -> None:
    fence = Fence()
    space = _space(server, fence=fence)
    threading.Timer(0.1, fence.trip, ["enough"]).start()
    started = time.monotonic()
    with pytest.raises(Fenced, match="enough"):
        space.wait(["never"], 60)
    assert time.monotonic() - started < 1.0


def test_a_dead_server_is_a_clear_error_at_once(other_process: tuple[subprocess.Popen, int]) -> None:
    process, port = other_process
    client = connect("127.0.0.1", port)
    space = Space(client, "workers", 1, Fence())
    space.set("key", b"")
    threading.Timer(0.1, process.kill).start()
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=f"rendezvous server at 127.0.0.1:{port}"):
        space.wait(["never"], 60)
    process.wait()  # its listening socket may close a moment after the connection did
    with pytest.raises(RendezvousError, match=f"no rendezvous server at 127.0.0.1:{port}"):
        space.look(["key"])
    with pytest.raises(RendezvousError, match=f"no rendezvous server at 127.0.0.1:{port}"):
        connect("127.0.0.1", port)
    assert time.monotonic() - started < 2.0


def test_a_silent_server_ends_in_an_error_or_a_fence(other_process: tuple[subprocess.Popen, int]) -> None:
    process, port = other_process
    patient, hasty = connect("127.0.0.1", port, timeout=60.0), connect("127.0.0.1", port, timeout=0.2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RendezvousError, match=r"silent for 0\.2 s"):
        Space(hasty, "workers", 1, Fence()).look(["key"])
    fence = Fence()
    threading.Timer(0.1, fence.trip, ["enough"]).start()
    started = time.monotonic()
    with pytest.raises(Fenced, match="enough"):
        Space(patient, "workers", 1, fence).look(["key"])
    assert time.monotonic() - started < 1.0
    process.send_signal(signal.SIGCONT)
    # The late answer to the interrupted request is not taken for the answer to the next one.
    space = Space(patient, "workers", 1, Fence())
    space.set("key", b"value")
    assert space.look(["key"]) == ([b"value"], [])


def test_connecting_never_waits_for_a_name_server(server: RendezvousServer) -> None:
    seconds, clients = [], []
    for _ in range(100):
        started = time.monotonic()
        clients.append(connect(*server.address))
        Space(clients[-1], "workers", 1, Fence()).num_keys()
        seconds.append(time.monotonic() - started)
    for client in clients:
        client.close()
    print(
        f"new connection and first answer: median {sorted(seconds)[50] * 1e3:.2f} ms, most {max(seconds) * 1e3:.2f} ms"
    )
    assert max(seconds) < 1.0
