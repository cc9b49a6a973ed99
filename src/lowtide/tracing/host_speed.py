"""How fast the host runs Python at the moment: the time of a fixed piece of work.

Cores of a shared server run at half speed for seconds at a time, while others use their second hyperthreads. What is
measured once per machine (`devices.engine_costs`) is therefore kept for a host on which `probe_s` returns
`REFERENCE_S`, and scaled to the host of each trace. Otherwise a plan would be predicted from the model's ops at one
speed and from the engine's own work at another.
"""

from __future__ import annotations

import time

REFERENCE_S = 0.3e-3  # on the host of an H200, Python 3.12, when no one else used the core
_RUNS = 3  # in a row; the fastest counts, as the first comes with cold caches


def probe_s() -> float:
    """Seconds of a fixed piece of Python on this core now; about a millisecond passes."""
    return min(_run() for _ in range(_RUNS))


def _run() -> float:
    start = time.perf_counter()
    kept: dict[int, tuple[int, int | None]] = {}
    for number in range(4000):
        before = kept.get(number & 7)
        kept[number & 255] = (number, before and before[0])
    return time.perf_counter() - start
