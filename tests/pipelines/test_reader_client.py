from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from threading import Event, Lock, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.batches import BatchBuilder, Cursor
from pipelines.client import InputInterrupted, ReaderClient
from pipelines.config import DataConfig
from pipelines.corpus import Corpus
from pipelines.reader import Reader

CONFIG = DataConfig(seq_len=16, window_documents=5, eval_fraction=0.1)
NUM_STEPS = 14
Handle = Callable[[str, tuple[Any, ...]], Any]


class Dead(Exception):
    """What a transport raises for a reader that is gone."""


def call(handle: Handle, method: str, args: tuple[Any, ...]) -> Any:
    return handle(method, args)


def client_of(readers: list[Handle], **changes: Any) -> ReaderClient:
    return ReaderClient(readers, call, data_size=2, data_rank=0, micro_batch_rows=2, **changes)


@pytest.fixture(scope="module")
def alive(corpus: Corpus, tokenizer_json: str) -> Iterator[Handle]:
    reader = Reader(corpus.manifest(), tokenizer_json, CONFIG, 7, 0)
    yield lambda method, args: getattr(reader, method)(*args)
    reader.close()


@pytest.fixture(scope="module")
def expected(corpus: Corpus, tokenizer_json: str) -> list[str]:
    builder = BatchBuilder(corpus, tokenizer_json, CONFIG, 7, 0)
    digests, cursor = [], Cursor()
    for _ in range(NUM_STEPS):
        batch = builder.batch(cursor)
        digests.append(batch.digest)
        cursor = batch.next
    return digests


def dead(method: str, args: tuple[Any, ...]) -> Any:
    raise Dead


def dies_after(num_calls: int, reader: Handle) -> Handle:
    def handle(method: str, args: tuple[Any, ...]) -> Any:
        nonlocal num_calls
        num_calls -= 1
        return dead(method, args) if num_calls < 0 else reader(method, args)

    return handle


def digests_of(client: ReaderClient) -> list[str]:
    digests, cursor = [], Cursor()
    for _ in range(NUM_STEPS):
        batch = client.next(cursor)
        assert batch.cursor == cursor
        digests.append(batch.digest)
        cursor = batch.next
    return digests


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, NUM_STEPS), max_size=3), st.integers(0, 3))
def test_dead_readers_change_nothing(alive: Handle, expected: list[str], deaths: list[int], place: int) -> None:
    readers = [dies_after(num_calls, alive) for num_calls in deaths]
    readers.insert(place, alive)
    client = client_of(readers)
    assert digests_of(client) == expected
    client.close()


def test_a_slow_reader_is_left_behind(alive: Handle, expected: list[str]) -> None:
    release = Event()

    def stuck(method: str, args: tuple[Any, ...]) -> Any:
        release.wait()
        return alive(method, args)

    client = client_of([stuck, alive], timeout_s=0.05)
    assert digests_of(client) == expected
    client.close()
    release.set()


def test_fetches_two_ahead_and_no_more(alive: Handle) -> None:
    asked: list[Cursor] = []
    third = Event()

    def counting(method: str, args: tuple[Any, ...]) -> Any:
        asked.append(Cursor.from_list(args[0]))
        if len(asked) == 3:
            third.set()
        return alive(method, args)

    client = client_of([counting])
    first = client.next(Cursor())
    assert third.wait(10)
    assert client.next(Cursor()) is first  # the step is run again
    client.close()
    assert asked == sorted(set(asked)) and len(asked) == 3


def test_prefetch_begins_before_anybody_waits(alive: Handle, expected: list[str]) -> None:
    asked = Event()

    def noting(method: str, args: tuple[Any, ...]) -> Any:
        asked.set()
        return alive(method, args)

    client = client_of([noting])
    client.prefetch(Cursor())
    assert asked.wait(10)
    assert digests_of(client) == expected
    client.close()


def test_goes_where_it_is_told(alive: Handle, expected: list[str]) -> None:
    client = client_of([alive])
    cursors = [Cursor()]
    for _ in range(NUM_STEPS - 1):
        cursors.append(client.next(cursors[-1]).next)
    for step in (3, 4, 4, 0, 13, 2, 3):
        assert client.next(cursors[step]).digest == expected[step]
    client.close()


def in_thread(action: Callable[[], Any]) -> tuple[Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("method", ["next", "eval_batch"])
def test_interrupt_ends_every_wait(method: str) -> None:
    called, release = Event(), Event()

    def stuck(method: str, args: tuple[Any, ...]) -> Any:
        called.set()
        release.wait()

    client = client_of([stuck])
    action = {"next": lambda: client.next(Cursor()), "eval_batch": lambda: client.eval_batch(4)}[method]
    thread, results = in_thread(action)
    assert called.wait(10)
    client.interrupt()
    thread.join(10)
    assert isinstance(results[0], InputInterrupted)
    with pytest.raises(InputInterrupted):
        action()
    client.close()
    release.set()


def test_new_readers_for_dead_ones(alive: Handle, expected: list[str]) -> None:
    tried = Event()

    def dying(method: str, args: tuple[Any, ...]) -> Any:
        tried.set()
        raise Dead

    client = client_of([dying])
    thread, results = in_thread(lambda: digests_of(client))
    assert tried.wait(10) and thread.is_alive()
    client.replace([dead, alive])
    thread.join(30)
    assert results == [expected]
    client.close()


def test_a_refusal_is_raised_where_it_matters(alive: Handle) -> None:
    client = client_of([dead, alive])
    for _ in range(2):
        with pytest.raises(ValueError, match="not in this global order"):
            client.next(Cursor(0, 99, 0))
    assert client.next(Cursor()).cursor == Cursor()
    assert client.eval_batch(4).tokens.shape == (2, 16)
    client.close()


def serve(connection: Any, arguments: tuple[Any, ...]) -> None:
    reader = Reader(*arguments)
    while True:
        method, args = connection.recv()
        connection.send(getattr(reader, method)(*args))


def test_sigkill_of_a_reader_process(corpus: Corpus, tokenizer_json: str, alive: Handle, expected: list[str]) -> None:
    here, there = get_context("spawn").Pipe()
    arguments = (corpus.manifest(), tokenizer_json, CONFIG, 7, 0)
    process = get_context("spawn").Process(target=serve, args=(there, arguments), daemon=True)
    process.start()
    there.close()
    one_at_a_time, num_answers = Lock(), 0

    def remote(method: str, args: tuple[Any, ...]) -> Any:
        nonlocal num_answers
        with one_at_a_time:
            here.send((method, args))
            if num_answers == 5:
                os.kill(process.pid or 0, signal.SIGKILL)  # with a request under way
            answer = here.recv()
            num_answers += 1
            return answer

    client = client_of([remote, alive])
    assert digests_of(client) == expected
    client.close()
    process.join(10)
    assert num_answers >= 5 and process.exitcode == -signal.SIGKILL
