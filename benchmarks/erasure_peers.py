"""Other erasure codes, in an environment that has only them: ``python erasure_peers.py NBYTES``.

Each line of the input is one measurement, [way, k, m, "encode" or "rebuild"]; the answer is a line with its seconds.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from typing import Any

import numpy as np
import zfec
from pyeclib.ec_iface import ECDriver

_SEGMENT = 1 << 20  # what PyECLib encodes at once: the size at which it is fastest here
_NBYTES = int(sys.argv[1])


@cache
def _source() -> bytes:
    return np.random.default_rng(0).integers(0, 256, _NBYTES, np.uint8).tobytes()


@cache
def _blocks(k: int) -> list[bytes]:
    length = _NBYTES // k
    return [_source()[start * length : (start + 1) * length] for start in range(k)]


def _zfec(k: int, m: int, task: str) -> float:
    blocks, encoder, decoder = _blocks(k), zfec.Encoder(k, k + m), zfec.Decoder(k, k + m)
    begun = time.perf_counter()
    parity = encoder.encode(blocks, range(k, k + m))
    if task == "rebuild":
        begun = time.perf_counter()
        rebuilt = decoder.decode([*blocks[m:], *parity], [*range(m, k + m)])
    seconds = time.perf_counter() - begun
    assert task == "encode" or list(rebuilt) == blocks
    return seconds


def _pyeclib(k: int, m: int, task: str) -> float:
    driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
    segments = [_source()[start : start + _SEGMENT] for start in range(0, _NBYTES, _SEGMENT)]
    begun = time.perf_counter()
    coded = [driver.encode(segment) for segment in segments]
    if task == "rebuild":
        left = [fragments[m:] for fragments in coded]
        begun = time.perf_counter()
        rebuilt = [driver.reconstruct(fragments, [*range(m)]) for fragments in left]
    seconds = time.perf_counter() - begun
    assert task == "encode" or rebuilt == [fragments[:m] for fragments in coded]
    return seconds


def main() -> None:
    ways: dict[str, Any] = {"zfec": _zfec, "pyeclib": _pyeclib}
    for line in sys.stdin:
        way, *arguments = json.loads(line)
        print(ways[way](*arguments), flush=True)


if __name__ == "__main__":
    main()
