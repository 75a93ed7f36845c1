"""What the tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.fenced_ranks import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
