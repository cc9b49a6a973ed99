"""Other regions than those on the chains, for steps with few layers: there each single choice weighs.

Which regions to take is searched by steps from one set of regions to another: a region less, one more, one in place of
those inside it or the other way around. What outputs a set of regions holds is not part of that search, for the best is
known within a little for every budget at once (`Filling.reached_s`). So each set is played once, without held outputs,
and tells what it comes to at each of some **stations**, budgets from the floor to the plain peak. Sets that are
best at some station are gone on from. In the end the outputs to hold are chosen, for each station and the sets that
promise most there. Nothing here depends on the budget that is solved for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from lowtide.eagerlives import EagerLives
from lowtide.graph import StepGraph
from lowtide.solvers.chain import Regions
from lowtide.solvers.filling import Filling, roughly_least_s
from lowtide.solvers.found import Found
from lowtide.solvers.nesting import Nesting
from lowtide.solvers.pricing import Pricing

MOST_OPS = 3_000  # beyond it there are layers enough to choose from
_NUM_STATIONS = 60
_NUM_SEEDS = 32
_MOST_VISITED_OPS = 1_000_000  # ops of all sets of regions played
_MOST_VISITS = 2_000
_MOST_FILLED = 12  # sets for which outputs are chosen, at each station
_MOST_CHOICES = 250  # of outputs, for all of these
_LESS = 1 - 1e-9
_FAR = 1.1  # times the fastest known, with outputs held in a simple order: no hope

_Key = tuple[int, ...]
_Item = TypeVar("_Item")


def some(items: Sequence[_Item]) -> Sequence[_Item]:
    """Of many to begin from, some that are evenly spaced."""
    return items[:: -(-len(items) // _NUM_SEEDS)] if items else items


class Exploring:
    """Sets of regions of a graph, and what they could come to at the stations between `floor` and `plain` bytes."""

    def __init__(self, graph: StepGraph, pricing: Pricing, nesting: Nesting, floor: int, plain: int) -> None:
        self._graph, self._nesting, self._pricing = graph, nesting, pricing
        self._may_keep = pricing.may_keep & (graph.arrays.seconds[: graph.num_forward] > 0)
        self.stations = [floor + (plain - floor) * step // _NUM_STATIONS for step in range(_NUM_STATIONS)]
        self._budgets = np.array(self.stations, dtype=np.float64)
        self._least: dict[_Key, np.ndarray] = {}  # by set, seconds at each station
        self._reached: dict[_Key, np.ndarray] = {}
        self._best_s = np.full(_NUM_STATIONS, np.inf)
        self._best: list[_Key | None] = [None] * _NUM_STATIONS
        self._fillings: dict[_Key, Filling] = {}

    def explore(self, seeds: Iterable[Regions], is_late: Callable[[], bool]) -> None:
        """Visit the sets of `seeds`, and from the best of them others, until none is left or there were enough."""
        most = min(_MOST_VISITS, _MOST_VISITED_OPS // max(len(self._graph.ops), 1))
        for seed in seeds:
            self._visit(seed)
        expanded: set[_Key] = set()
        is_enough = False
        while not is_enough:
            best = dict.fromkeys(key for key in reversed(self._best) if key is not None)
            todo = [key for key in best if key not in expanded]
            for key in todo:
                if key in self._best:  # and has not been outdone by one before it
                    expanded.add(key)
                    for regions in self._nesting.neighbours(key):
                        self._visit(regions)
                        is_enough = len(self._least) >= most or is_late()
                        if is_enough:
                            return
            is_enough = not todo

    def _visit(self, regions: Iterable[int]) -> None:
        tidied = self._tidied(regions)
        key = tuple(tidied)
        if key in self._least:
            return
        played, may_keep = EagerLives(self._graph, tidied), self._retainable_in(key)
        least = self._least[key] = roughly_least_s(played, may_keep, self._budgets)
        if not (least < self._best_s * _LESS).any():
            return
        self._fillings[key] = filling = Filling(played, may_keep)
        self._least[key] = np.maximum(least, filling.least_s(self._budgets))
        reached = self._reached[key] = filling.reached_s(self._budgets)
        for station in np.flatnonzero(reached < self._best_s * _LESS).tolist():
            self._best_s[station], self._best[station] = reached[station], key

    def plans(self, cost: Callable[[Regions], Found], is_late: Callable[[], bool]) -> list[Found]:
        """Plans for all stations: of the sets that promise most there, with outputs to hold chosen for the station."""
        found: list[Found] = []
        fastest: Found | None = None  # that fits the station: also what fits one below
        for station, budget in enumerate(self.stations):
            num_filled = num_choices = 0
            for likely_s, key in self._promising(station):
                is_far = fastest is not None and likely_s > _FAR * fastest.extra_s
                if is_far or is_late() or num_filled == _MOST_FILLED or num_choices > _MOST_CHOICES:
                    break
                if fastest is not None and self._least[key][station] >= fastest.extra_s * _LESS:
                    continue
                num_filled += 1
                num_choices += len(self._fillings[key].ops)
                new = [cost(regions) for regions in self._filled(key, budget)]
                found += new
                fitting = [plan for plan in (*new, fastest) if plan is not None and plan.peak_bytes <= budget]
                fastest = min(fitting, key=lambda plan: (plan.extra_s, plan.peak_bytes), default=None)
        return found

    def _promising(self, station: int) -> list[tuple[float, _Key]]:
        """What sets are likely to come to at a station, the best first: between what is simply reached and the least.

        Of sets that look the same, as those do that differ in which of several layers they take, the first.
        """
        found: dict[str, tuple[float, _Key]] = {}
        for key, reached in self._reached.items():
            reached_s, least_s = float(reached[station]), float(self._least[key][station])
            if reached_s < math.inf:
                found.setdefault(f"{reached_s:.9e} {least_s:.9e}", ((reached_s + least_s) / 2, key))
        return sorted(found.values())

    def _tidied(self, regions: Iterable[int]) -> Regions:
        return self._nesting.tidied(dict.fromkeys(regions, ()))

    def _filled(self, key: _Key, budget: int) -> Iterator[Regions]:
        """A set of regions with the outputs to retain, and one without those that are not worth the dispatch."""
        must = self._tidied(key)
        held = self._with(must, key, self._fillings[key].best(budget))
        yield held
        if self._graph.hardware.dispatch_s:
            yield {call: self._worth_dispatch(call, must[call], kept) for call, kept in held.items()}

    def _with(self, regions: Regions, key: _Key, ops: Iterable[int]) -> Regions:
        """Regions that hold these outputs too."""
        calls, held = self._graph.calls, {call: set(kept) for call, kept in regions.items()}
        outermost = [call for call in key if not self._nesting.num_around(call, key)]
        starts = [calls[call].first for call in outermost]
        for op in ops:
            call = outermost[bisect_right(starts, op) - 1]
            held[call].add(op - calls[call].first)
        return {call: tuple(sorted(kept)) for call, kept in held.items()}

    def _retainable_in(self, key: _Key) -> np.ndarray:
        """The ops whose outputs the outermost of a set of regions could retain."""
        may_keep, calls = self._may_keep.copy(), self._graph.calls
        for call in (call for call in key if not self._nesting.num_around(call, key)):
            ops = slice(calls[call].first, calls[call].end)
            may_keep[ops] &= self._graph.retainable.depths[ops] >= self._graph.depths[call]
        return may_keep

    def _worth_dispatch(self, call: int, kept: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...]:
        """All that a region would retain, or only what it must: whichever gains more."""
        ops, first = self._graph.ops, self._graph.calls[call].first

        def gain_s(some: tuple[int, ...]) -> float:
            return sum(ops[first + op].seconds for op in some) - self._pricing.retaining_s(call, some)

        return max((kept, held), key=gain_s)
