"""How much a search may do: counted in simulated events, so that it stops at the same point on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.units import check_seconds

# Events per second of a time limit: what a core of a small server plays, with what the search does around them. If it
# is too high, the clock ends searches, and plans depend on the machine; too low, and large steps are searched less than
# there is time for.
_EVENTS_PER_S = 1_000_000
_OVERHEAD = 2_000  # events that take as long as it takes to begin to play a step
_BY_OP = 25  # times as long as an event of `EagerLives` takes one that is played op by op
_PATIENCE = 3.0  # times the limit until the clock ends a search: for machines that are slower, or busy


class Effort:
    """What is left of a search's effort. The clock is a safety net: it alone makes plans depend on the machine."""

    def __init__(self, time_limit_s: float) -> None:
        check_seconds(time_limit_s, "time_limit_s")
        self._left, self._deadline = time_limit_s * _EVENTS_PER_S, time.monotonic() + _PATIENCE * time_limit_s

    def spend(self, num_events: int, *, times: int = 1, by_op: bool = False) -> None:
        """A step of so many events was played, or something was done that takes as long."""
        self._left -= times * (_OVERHEAD + num_events * (_BY_OP if by_op else 1))

    def is_over(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline

    def is_over_after(self, num_plays: int, num_events: int) -> Callable[[], bool]:
        """As `is_over`, for a loop whose every turn takes as long as that many plays of a step, and asks once."""

        def is_over() -> bool:
            self.spend(num_events, times=num_plays)
            return self.is_over()

        return is_over
