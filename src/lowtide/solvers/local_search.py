"""Candidates from local searches over sets of regions, for steps of up to 3,000 ops.

In a step with few layers the hull has few points, and changing a single region changes the step's time noticeably.
`EagerSearch` therefore runs two searches from the candidates of the other generators. Neither depends on the budget.

- `LocalSearch` looks for fast sets. It moves from one set of regions to its neighbours (`Nesting.neighbours`), and
  evaluates each at sixty **sample budgets** between the floor and the plain peak. Retained outputs are not part of the
  search: `RetentionKnapsack` estimates for all budgets at once what retaining outputs would save. Sets that are the
  best at some sample budget are expanded. At the end the most promising sets of each budget are simulated with the
  outputs that they retain.
- `LowestPeakSearch` looks for the smallest peak, best-first. On small models, where the input and the random state that
  a region holds are as large as what it drops, one checkpoint on the right call often peaks lower than one on every
  call.

`RetentionKnapsack`: with fixed regions, retaining an output adds its size over a fixed range of events, whatever else
is retained. So the best outputs within a budget are a multi-dimensional knapsack with one row per event, filled
greedily (an exact solution gave no faster plans). A row is dropped if another row has more bytes in use and every
output is at least as large in it.

Cost: one simulation per visited set, `_MOST_VISITED_OPS` and `_MOST_LOWEST_VISITED_OPS` simulated ops in all: most of
the time that solving such a step takes. Skipped above 3,000 ops (`MOST_OPS`), where that would not cover the neighbours
of one set; bench/results/solver.md has what both are worth.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from typing import TypeVar

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.candidate import Candidate, Regions
from lowtide.solvers.hull import Pricing
from lowtide.solvers.nesting import Nesting

_MOST_ROWS = 64


class RetentionKnapsack:
    """Which outputs some regions should retain within a budget: those that fit, the most seconds saved per byte first.

    `ops` are those whose outputs could be retained, in that order.
    """

    def __init__(self, played: EagerIntervals, may_keep: np.ndarray) -> None:
        total = played.total_bytes
        rows, sizes, starts, stops = played.keeping(may_keep)
        self.extra_s, self.peak_bytes = played.extra_s, int(total.max())
        self.ops, which = np.unique(rows, return_inverse=True)
        self.seconds = played.facts.seconds[self.ops] - played.graph.retainable.substituted_s[self.ops]
        edges = np.unique(np.concatenate([[0], starts, stops]))
        edges = edges[edges < len(total)]
        weights = np.zeros((len(edges) + 1, len(self.ops)))
        np.add.at(weights, (np.searchsorted(edges, starts), which), sizes)
        np.add.at(weights, (np.searchsorted(edges, stops), which), -sizes)
        weights = np.cumsum(weights[:-1], axis=0)
        self._choose_rows(np.maximum.reduceat(total, edges), weights)

    def _choose_rows(self, used: np.ndarray, weights: np.ndarray) -> None:
        """Drop dominated rows. `used` are bytes with nothing retained, `weights` the bytes of each op's outputs."""
        left = np.ones(len(used), dtype=bool)
        chosen: list[int] = []
        while left.any() and len(chosen) < _MOST_ROWS:
            row = int(np.where(left, used, -1).argmax())
            chosen.append(row)
            left &= (weights > weights[row]).any(axis=1)
        self.used, weights = used[chosen].astype(np.float64), weights[chosen]
        order = np.lexsort((-self.ops, -self.seconds / np.maximum(weights.max(axis=0, initial=0), 1e-300)))
        self.ops, self.seconds, self.weights = self.ops[order], self.seconds[order], weights[:, order]

    def _picked(self, budgets: np.ndarray) -> np.ndarray:
        """By op and budget, whether its outputs are retained: each that fits, in the order of `ops`."""
        rooms = budgets[:, None] - self.used
        picked = np.zeros((len(self.ops), len(budgets)), dtype=bool)
        for index, weights in enumerate(self.weights.T):
            picked[index] = (rooms >= weights).all(axis=1)
            rooms -= picked[index][:, None] * weights
        return picked

    def reached_s(self, budgets: np.ndarray) -> np.ndarray:
        """What these regions add within each budget. inf: does not fit."""
        gains = self.seconds @ self._picked(budgets)
        return np.where(budgets >= self.peak_bytes, self.extra_s - gains, np.inf)

    def best(self, budget: int) -> tuple[int, ...]:
        """The ops whose outputs to retain within a budget."""
        return tuple(sorted(self.ops[self._picked(np.array([float(budget)]))[:, 0]].tolist()))


MOST_OPS = 3_000  # larger steps have so many layers that hull points differ by little, and simulations take longer
_NUM_SAMPLES = 60  # budgets; fewer are faster and lose time at budgets between them
_NUM_SEEDS = 32  # of each generator
_MOST_VISITED_OPS = 1_000_000  # simulated ops of all visited sets
_MOST_VISITS = 2_000
_MOST_FILLED = 12  # sets that are simulated with retained outputs, at each sample budget
_IMPROVEMENT = 1 - 1e-9
_FAR = 1.1  # sets whose estimate is slower than this multiple of the fastest are not simulated

_Key = tuple[int, ...]
_Item = TypeVar("_Item")


def evenly_spaced(items: Sequence[_Item]) -> Sequence[_Item]:
    """At most about `_NUM_SEEDS` of the items, evenly spaced."""
    return items[:: -(-len(items) // _NUM_SEEDS)] if items else items


class LocalSearch:
    """Finds fast sets of regions for sample budgets between `floor` and `plain` bytes."""

    def __init__(self, graph: StepGraph, pricing: Pricing, nesting: Nesting, floor: int, plain: int) -> None:
        self._graph, self._nesting, self._pricing = graph, nesting, pricing
        self._may_keep = pricing.may_keep & (graph.arrays.seconds[: graph.num_forward] > 0)
        self.sample_budgets = [floor + (plain - floor) * step // _NUM_SAMPLES for step in range(_NUM_SAMPLES)]
        self._budgets = np.array(self.sample_budgets, dtype=np.float64)
        self._visited: set[_Key] = set()
        self._reached: dict[_Key, np.ndarray] = {}  # by set, estimated seconds at each sample budget
        self._best_s = np.full(_NUM_SAMPLES, np.inf)
        self._best: list[_Key | None] = [None] * _NUM_SAMPLES
        self._knapsacks: dict[_Key, RetentionKnapsack] = {}

    def explore(self, seeds: Iterable[Regions], is_late: Callable[[], bool]) -> None:
        """Visit the sets of `seeds`, then neighbours of the best, until nothing improves or the limit is reached."""
        most = min(_MOST_VISITS, _MOST_VISITED_OPS // max(len(self._graph.ops), 1))
        for seed in seeds:
            self._visit(seed)
        expanded: set[_Key] = set()
        is_enough = False
        while not is_enough:
            best = dict.fromkeys(key for key in reversed(self._best) if key is not None)
            todo = [key for key in best if key not in expanded]
            for key in todo:
                if key in self._best:  # no set visited since has replaced it
                    expanded.add(key)
                    for regions in self._nesting.neighbours(key):
                        self._visit(regions)
                        is_enough = len(self._visited) >= most or is_late()
                        if is_enough:
                            return
            is_enough = not todo

    def _visit(self, regions: Iterable[int]) -> None:
        tidied = self._tidied(regions)
        key = tuple(tidied)
        if key in self._visited:
            return
        self._visited.add(key)
        knapsack = RetentionKnapsack(EagerIntervals(self._graph, tidied), self._retainable_in(key))
        reached = knapsack.reached_s(self._budgets)
        if (reached < self._best_s * _FAR).any():
            self._knapsacks[key], self._reached[key] = knapsack, reached
        for sample in np.flatnonzero(reached < self._best_s * _IMPROVEMENT).tolist():
            self._best_s[sample], self._best[sample] = reached[sample], key

    def candidates(self, cost: Callable[[Regions], Candidate], is_late: Callable[[], bool]) -> list[Candidate]:
        """For each sample budget, the most promising sets, with the outputs to retain chosen for that budget."""
        candidates: list[Candidate] = []
        fastest: Candidate | None = None  # that fits; one that fits a smaller sample budget fits here too
        for sample, budget in enumerate(self.sample_budgets):
            for likely_s, key in self._promising(sample):
                if is_late() or (fastest is not None and likely_s > _FAR * fastest.extra_s):
                    break
                new = [cost(regions) for regions in self._filled(key, budget)]
                candidates += new
                fitting = [plan for plan in (*new, fastest) if plan is not None and plan.peak_bytes <= budget]
                fastest = min(fitting, key=lambda plan: (plan.extra_s, plan.peak_bytes), default=None)
        return candidates

    def _promising(self, sample: int) -> list[tuple[float, _Key]]:
        """Sets and their estimated seconds at a sample budget, the best first.

        Of sets with equal estimates (they differ in which of several equal layers are regions) only the first.
        """
        unique: dict[str, tuple[float, _Key]] = {}
        for key, reached in self._reached.items():
            if reached[sample] < math.inf:
                unique.setdefault(f"{reached[sample]:.9e}", (float(reached[sample]), key))
        return nsmallest(_MOST_FILLED, unique.values())

    def _tidied(self, regions: Iterable[int]) -> Regions:
        return self._nesting.without_redundant(dict.fromkeys(regions, ()))

    def _filled(self, key: _Key, budget: int) -> Iterator[Regions]:
        """The regions with retained outputs, and a variant without those that do not pay for the dispatch mode."""
        must = self._tidied(key)
        held = self._with(must, key, self._knapsacks[key].best(budget))
        yield held
        if self._graph.hardware.dispatch_s:
            yield {call: self._worth_dispatch(call, must[call], kept) for call, kept in held.items()}

    def _with(self, regions: Regions, key: _Key, ops: Iterable[int]) -> Regions:
        """Regions that also retain these outputs."""
        calls, held = self._graph.calls, {call: set(kept) for call, kept in regions.items()}
        outermost = [call for call in key if not self._nesting.num_around(call, key)]
        starts = [calls[call].first for call in outermost]
        for op in ops:
            call = outermost[bisect_right(starts, op) - 1]
            held[call].add(op - calls[call].first)
        return {call: tuple(sorted(kept)) for call, kept in held.items()}

    def _retainable_in(self, key: _Key) -> np.ndarray:
        """The ops whose outputs the outermost regions of a set could retain."""
        may_keep, calls = self._may_keep.copy(), self._graph.calls
        for call in (call for call in key if not self._nesting.num_around(call, key)):
            ops = slice(calls[call].first, calls[call].end)
            may_keep[ops] &= self._graph.retainable.at_depth(self._graph.depths[call])[ops]
        return may_keep

    def _worth_dispatch(self, call: int, kept: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...]:
        """Either all outputs that a region would retain, or only those it must: whichever saves more."""
        ops, first = self._graph.ops, self._graph.calls[call].first

        def gain_s(some: tuple[int, ...]) -> float:
            return sum(ops[first + op].seconds for op in some) - self._pricing.retaining_s(call, some)

        return max((kept, held), key=gain_s)


_MOST_LOWEST_VISITED_OPS = 600_000  # simulated ops of all visited sets, about a second
_MOST_LOWEST_VISITS = 1_500
_PATIENCE = 16  # expansions in a row that find no lower peak before the search ends
_LITTLE_PATIENCE = 3  # the same where the search starts from small candidates
_NUM_LOWEST_SEEDS = 8  # candidates of other generators to begin with
_NUM_SINGLES = 6  # sets of one region that are expanded whatever their peak
_NUM_RETAINING = 6  # sets with small peaks for which retaining outputs is tried
_Score = tuple[int, bool, int, float]  # peak bytes, whether outputs are retained, events at that peak, seconds added


class LowestPeakSearch:
    """Finds the regions with the smallest peak. `may_keep` marks the ops whose outputs a region may retain."""

    def __init__(self, graph: StepGraph, nesting: Nesting, may_keep: np.ndarray) -> None:
        self._graph, self._nesting, self._may_keep = graph, nesting, may_keep
        self._num_left = min(_MOST_LOWEST_VISITS, _MOST_LOWEST_VISITED_OPS // max(len(graph.ops), 1))
        self._scores: dict[tuple[tuple[int, tuple[int, ...]], ...], _Score] = {}  # by regions
        self._least: _Score | None = None
        self._queue: list[tuple[_Score, _Key]] = []
        self._expanded: set[_Key] = set()

    def lowest(self, known: Iterable[Candidate], is_late: Callable[[], bool]) -> Regions:
        """The regions with the smallest peak, starting from the smallest of the candidates `known` and from none."""
        self._visit_known(known)
        self._visit({})
        self._expand({})
        singles = sorted((score, calls) for score, calls in self._queue if len(calls) == 1)
        for _, calls in singles[:_NUM_SINGLES]:
            self._expand(calls)
        return self._expand_best(is_late, _PATIENCE)

    def lowest_near(self, known: Iterable[Candidate], is_late: Callable[[], bool]) -> Regions:
        """As `lowest`, starting from `known` alone and giving up sooner: they are small already."""
        self._visit_known(known)
        return self._expand_best(is_late, _LITTLE_PATIENCE)

    def _visit_known(self, known: Iterable[Candidate]) -> None:
        for seed in nsmallest(_NUM_LOWEST_SEEDS, known, key=lambda each: (each.peak_bytes, each.extra_s)):
            self._visit(seed.regions)
            self._visit(self._nesting.without_redundant(dict.fromkeys(seed.regions, ())))

    def _expand_best(self, is_late: Callable[[], bool], patience: int) -> Regions:
        """Expand the best set of the queue until `patience` expansions in a row find no lower peak."""
        num_vain = 0
        while self._queue and num_vain < patience and self._num_left > 0 and not is_late():
            before = self._least
            self._expand(heappop(self._queue)[1])
            num_vain = num_vain + 1 if self._least == before else 0
        for regions in self._best(_NUM_RETAINING):
            self._retain(regions, is_late)
        return self._best(1)[0]

    def _best(self, num: int) -> list[Regions]:
        return [dict(key) for key, _ in nsmallest(num, self._scores.items(), key=lambda item: item[1])]

    def _visit(self, regions: Regions) -> _Score:
        key = tuple(regions.items())
        if key not in self._scores:
            self._num_left -= 1
            played = EagerIntervals(self._graph, regions)
            peak, retains = played.peak_bytes, any(regions.values())
            num_events = int(np.count_nonzero(played.total_bytes == peak))
            score = self._scores[key] = peak, retains, num_events, played.extra_s
            self._least = score if self._least is None else min(self._least, score)
            heappush(self._queue, (score, tuple(regions)))
        return self._scores[key]

    def _expand(self, calls: Iterable[int]) -> None:
        """Visit the neighbours of a set."""
        key = tuple(calls)
        if key in self._expanded:
            return
        self._expanded.add(key)
        for others in self._nesting.neighbours(key, is_thorough=True):
            if self._num_left > 0:
                self._visit(self._nesting.without_redundant(dict.fromkeys(others, ())))

    def _retain(self, regions: Regions, is_late: Callable[[], bool]) -> None:
        """Retain single outputs as long as that lowers the peak, as it does for outputs that are held elsewhere too."""
        score, is_lower = self._visit(regions), True
        while is_lower and not is_late():
            is_lower = False
            for call, op in self._retainable(regions):
                if self._num_left <= 0:
                    return
                more = {**regions, call: tuple(sorted({*regions[call], op}))}
                found = self._visit(more)
                if (found[0], found[2]) < (score[0], score[2]):
                    score, regions, is_lower = found, more, True

    def _retainable(self, regions: Regions) -> list[tuple[int, int]]:
        """Calls of regions that are not nested, each with an op to retain; ops whose values are live at the peak first.

        Other ops can help as well: a replay that need not run its last ops stops earlier.
        """
        played = EagerIntervals(self._graph, regions)
        peak, outermost = int(played.total_bytes.argmax()), self._graph.outermost(regions)
        live = {self._graph.values[value].born for value in played.live_at(peak)} | {int(played.ops[peak])}
        found: list[tuple[int, int]] = []
        for op in sorted(np.flatnonzero(self._may_keep[: self._graph.num_forward]), key=lambda op: op not in live):
            call = outermost[self._graph.ops[op].call]
            if call < 0 or self._graph.arrays.has_inside(call, regions):
                continue
            number = int(op) - self._graph.calls[call].first
            more = {**regions, call: (*regions[call], number)}
            if number not in regions[call] and call not in self._graph.retainable.missing(more):
                found.append((call, number))
        return found
