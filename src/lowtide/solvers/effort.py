"""How much a search may do: counted in simulated events, so that it stops at the same point on every machine."""

from __future__ import annotations

import time

from lowtide.units import check_seconds

# Events per second of a time limit. A core of a small server plays about a million: the count ends a search well before
# the clock would. If it is set too high, the clock ends searches, and plans depend on the machine; too low, and large
# steps are searched less than there is time for.
_EVENTS_PER_S = 300_000
BY_OP = 8  # times as long as an event of `EagerLives` takes one that is played op by op


class Effort:
    """What is left of a search's effort. The clock is a safety net: it alone makes plans depend on the machine."""

    def __init__(self, time_limit_s: float) -> None:
        check_seconds(time_limit_s, "time_limit_s")
        self._left, self._deadline = time_limit_s * _EVENTS_PER_S, time.monotonic() + time_limit_s

    def spend(self, num_events: int) -> None:
        self._left -= num_events

    def is_over(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline
