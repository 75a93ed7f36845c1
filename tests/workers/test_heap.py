"""That a worker process keeps its memory."""

from __future__ import annotations

import os
import subprocess
import sys

from workers import heap


def test_memory_that_was_used_once_is_used_again_without_page_faults() -> None:
    script = """
import resource, threading, torch
faults = []
def work():
    for _ in range(4):
        blocks = [torch.zeros(1 << 20) for _ in range(16)]
        del blocks
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
for _ in range(2):  # training runs beside the main thread, each generation in a thread of its own
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(faults[7] - faults[3])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **heap.ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    num_pages = 4 * 16 * (4 << 20) // 4096
    assert int(done.stdout) < num_pages / 10, f"{done.stdout} page faults for {num_pages} pages that it had before"
