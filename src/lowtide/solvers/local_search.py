"""Which outputs given regions hold on to, so that as little as possible is replayed within a budget.

With the regions fixed, each op of a region is run again or its output is held, and what holding it adds is a size over
a span of events, whatever else is held (`EagerIntervals.keeping`). So memory is a sum at each event, and the best
choice is a knapsack whose rows are events. Few rows matter: one is as good as ruled out where another has more in use
and every output weighs as much in it.

Other regions than those on the chains, for steps with few layers: there each single choice weighs.

Which regions to take is searched by steps from one set of regions to another: a region less, one more, one in place of
those inside it or the other way around. What outputs a set of regions holds is not part of that search, for the best is
known within a little for every budget at once (`RetentionKnapsack.reached_s`). So each set is played once, without held
outputs, and tells what it comes to at each of some **stations**, budgets from the floor to the plain peak. Sets that
are best at some station are gone on from. In the end the outputs to hold are chosen, for each station and the sets that
promise most there. Nothing here depends on the budget that is solved for.

The least peak that recomputing can reach: a best-first search over sets of regions.

The other generators look for plans that are fast, and their smallest plan need not be the smallest there is. On small
models, where the inputs and random states that a region holds weigh as much as what it drops, a single checkpoint on
the right call often peaks lower than a checkpoint on each of them. This search begins with the smallest plans of the
other generators and with single regions, and always goes on from the set with the least peak that it has not gone on
from, to the sets that differ from it in one call. At the end it tries to retain outputs of single ops.

Cost: one simulation per set, `_MOST_LOWEST_VISITED_OPS` simulated ops in all (about a second). For larger graphs that
is less than one round of neighbours; they have layers enough that the chains' ends are close to the least peak.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, nsmallest
from typing import TypeVar

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.candidate import Candidate, Regions
from lowtide.solvers.hull import Pricing
from lowtide.solvers.nesting import Nesting

_MOST_ROWS = 64
_ROWS_LOOKED_AT = 4  # to see what can still be hoped for: those with least room
_MOST_STATES = 2048
_MOST_ROOMS = 1_000_000  # states times rows times ops
_ROUNDING = 1e-12  # relative, of seconds: rounding


def roughly_least_s(played: EagerIntervals, may_keep: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """As `RetentionKnapsack.least_s`, and never above it, by the one event at which most lives with nothing held."""
    total = played.total_bytes
    event = int(total.argmax())
    ops, sizes, starts, stops = played.keeping(may_keep)
    seconds = played.facts.seconds
    every = np.zeros(len(may_keep), dtype=bool)
    every[ops] = True
    here = (starts <= event) & (event < stops)
    weights = np.bincount(ops[here], weights=sizes[here], minlength=len(may_keep))
    order = np.flatnonzero(weights > 0)
    order = order[np.argsort(-seconds[order] / weights[order], kind="stable")]
    filled = np.concatenate([[0.0], np.cumsum(seconds[order])])
    room = np.concatenate([[0.0], np.cumsum(weights[order])])
    free_s = float(seconds[: len(may_keep)][every].sum()) - filled[-1]
    least_s = played.extra_s - free_s - np.interp(budgets - total[event], room, filled)
    return np.where(budgets >= total[event], least_s, np.inf)


class RetentionKnapsack:
    """The room that some regions leave, and the ops whose outputs could be held in it. Free ones are held anyway.

    `ops` are in the order of the seconds they gain for their bytes, the best first.
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
        """The rows that matter: bytes in use without anything held (`used`), and the weight of each op's outputs."""
        left = np.ones(len(used), dtype=bool)
        chosen: list[int] = []
        while left.any() and len(chosen) < _MOST_ROWS:
            row = int(np.where(left, used, -1).argmax())
            chosen.append(row)
            left &= (weights > weights[row]).any(axis=1)
        self.used, weights = used[chosen].astype(np.float64), weights[chosen]
        order = np.lexsort((-self.ops, -self.seconds / np.maximum(weights.max(axis=0, initial=0), 1e-300)))
        self.ops, self.seconds, self.weights = self.ops[order], self.seconds[order], weights[:, order]

    @cached_property
    def _orders(self) -> list[np.ndarray]:
        """For each row, the ops that weigh something in it, the best for its bytes first."""
        found = []
        for weights in self.weights:
            ops = np.flatnonzero(weights > 0)
            found.append(ops[np.argsort(-self.seconds[ops] / weights[ops], kind="stable")])
        return found

    @cached_property
    def _weights_from(self) -> np.ndarray:
        """For each op, what it and those behind it weigh in each row."""
        sums = np.cumsum(self.weights[:, ::-1], axis=1)[:, ::-1].T
        return np.concatenate([sums, np.zeros((1, len(self.used)))])

    def _most_s(self, first: int, rooms: np.ndarray) -> np.ndarray:
        """The most that ops from `first` on can save with so much room in each row, if outputs can be held in part.

        Not too low: a row that is not looked at could only show that it is less.
        """
        rest = float(self.seconds[first:].sum())
        most = np.full(len(rooms), rest)
        missing = self._weights_from[first] - rooms.min(axis=0)
        for row in np.argsort(-missing, kind="stable")[:_ROWS_LOOKED_AT].tolist():
            if missing[row] <= 0:
                break
            ops = self._orders[row]
            ops = ops[ops >= first]
            sizes = np.concatenate([[0.0], np.cumsum(self.weights[row, ops])])
            seconds = np.concatenate([[0.0], np.cumsum(self.seconds[ops])])
            most = np.minimum(most, rest - seconds[-1] + np.interp(rooms[:, row], sizes, seconds))
        return most

    def least_s(self, budgets: np.ndarray) -> np.ndarray:
        """The least that these regions take within each budget, if outputs can be held in part. inf: no room."""
        gains = self._most_s(0, budgets[:, None] - self.used)
        return np.where(budgets >= self.peak_bytes, self.extra_s - gains, np.inf)

    def reached_s(self, budgets: np.ndarray) -> np.ndarray:
        """What these regions take within each budget with outputs held in the order of `ops`. inf: no room."""
        rooms = budgets[:, None] - self.used
        gains = np.zeros(len(budgets))
        for weights, seconds in zip(self.weights.T, self.seconds.tolist(), strict=True):
            fits = (rooms >= weights).all(axis=1)
            rooms -= fits[:, None] * weights
            gains += fits * seconds
        return np.where(budgets >= self.peak_bytes, self.extra_s - gains, np.inf)

    def best(self, budget: int) -> tuple[int, ...]:
        """The ops whose outputs to hold within a budget: the best of them, unless there are very many like it.

        Ops are looked at in turn, each held or not; of all choices so far, those are gone on with that could still come
        to more than the best known.
        """
        room = budget - self.used
        best = self._greedily(room)
        best_s = float(self.seconds[best].sum())
        picks = np.zeros((1, len(self.ops)), dtype=bool)
        gains, rooms = np.zeros(1), room[None, :]
        for index, second in enumerate(self.seconds):
            taken = (rooms >= self.weights[:, index]).all(axis=1)
            picks = np.concatenate([picks, picks[taken]])
            picks[len(gains) :, index] = True
            rooms = np.concatenate([rooms, rooms[taken] - self.weights[:, index]])
            gains = np.concatenate([gains, gains[taken] + second])
            top = int(gains.argmax())
            if gains[top] > best_s * (1 + _ROUNDING):
                best, best_s = np.flatnonzero(picks[top]), float(gains[top])
            hopes = gains + self._most_s(index + 1, rooms)
            going = np.flatnonzero(hopes > best_s * (1 + _ROUNDING))
            if not len(going):
                break
            going = self._thinned(going, hopes, rooms)
            picks, gains, rooms = picks[going], gains[going], rooms[going]
        return tuple(sorted(self.ops[best].tolist()))

    def _greedily(self, room: np.ndarray) -> np.ndarray:
        room, found = room.copy(), []
        for index in range(len(self.ops)):
            if (self.weights[:, index] <= room).all():
                room -= self.weights[:, index]
                found.append(index)
        return np.array(found, dtype=np.int64)

    def _thinned(self, going: np.ndarray, hopes: np.ndarray, rooms: np.ndarray) -> np.ndarray:
        """One of each that have come to the same, and of very many those with the best prospects."""
        order = going[np.argsort(-hopes[going], kind="stable")]
        _, first = np.unique(rooms[order] @ self._marks, return_index=True)
        most = min(_MOST_STATES, _MOST_ROOMS // max(self.weights.size, 1) + 16)
        return order[np.sort(first)[:most]]

    @cached_property
    def _marks(self) -> np.ndarray:
        """Factors by which rooms that differ in any row come to different sums."""
        return np.sqrt(np.arange(2, len(self.used) + 2))


MOST_OPS = 3_000  # beyond it there are layers enough to choose from
_NUM_STATIONS = 60
_NUM_SEEDS = 32
_MOST_VISITED_OPS = 1_000_000  # ops of all sets of regions played
_MOST_VISITS = 2_000
_MOST_FILLED = 12  # sets for which outputs are chosen, at each station
_MOST_CHOICES = 250  # of outputs, for all of these
_IMPROVEMENT = 1 - 1e-9
_FAR = 1.1  # times the fastest known, with outputs held in a simple order: no hope

_Key = tuple[int, ...]
_Item = TypeVar("_Item")


def evenly_spaced(items: Sequence[_Item]) -> Sequence[_Item]:
    """Of many to begin from, some that are evenly spaced."""
    return items[:: -(-len(items) // _NUM_SEEDS)] if items else items


class LocalSearch:
    """Sets of regions of a graph, and what they could come to at the stations between `floor` and `plain` bytes."""

    def __init__(self, graph: StepGraph, pricing: Pricing, nesting: Nesting, floor: int, plain: int) -> None:
        self._graph, self._nesting, self._pricing = graph, nesting, pricing
        self._may_keep = pricing.may_keep & (graph.arrays.seconds[: graph.num_forward] > 0)
        self.sample_budgets = [floor + (plain - floor) * step // _NUM_STATIONS for step in range(_NUM_STATIONS)]
        self._budgets = np.array(self.sample_budgets, dtype=np.float64)
        self._least: dict[_Key, np.ndarray] = {}  # by set, seconds at each station
        self._reached: dict[_Key, np.ndarray] = {}
        self._best_s = np.full(_NUM_STATIONS, np.inf)
        self._best: list[_Key | None] = [None] * _NUM_STATIONS
        self._fillings: dict[_Key, RetentionKnapsack] = {}

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
        played, may_keep = EagerIntervals(self._graph, tidied), self._retainable_in(key)
        least = self._least[key] = roughly_least_s(played, may_keep, self._budgets)
        if not (least < self._best_s * _IMPROVEMENT).any():
            return
        self._fillings[key] = filling = RetentionKnapsack(played, may_keep)
        self._least[key] = np.maximum(least, filling.least_s(self._budgets))
        reached = self._reached[key] = filling.reached_s(self._budgets)
        for station in np.flatnonzero(reached < self._best_s * _IMPROVEMENT).tolist():
            self._best_s[station], self._best[station] = reached[station], key

    def plans(self, cost: Callable[[Regions], Candidate], is_late: Callable[[], bool]) -> list[Candidate]:
        """Plans for all stations: of the sets that promise most there, with outputs to hold chosen for the station."""
        found: list[Candidate] = []
        fastest: Candidate | None = None  # that fits the station: also what fits one below
        for station, budget in enumerate(self.sample_budgets):
            num_filled = num_choices = 0
            for likely_s, key in self._promising(station):
                is_far = fastest is not None and likely_s > _FAR * fastest.extra_s
                if is_far or is_late() or num_filled == _MOST_FILLED or num_choices > _MOST_CHOICES:
                    break
                if fastest is not None and self._least[key][station] >= fastest.extra_s * _IMPROVEMENT:
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
        return self._nesting.without_redundant(dict.fromkeys(regions, ()))

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


_MOST_LOWEST_VISITED_OPS = 600_000  # ops of all simulated steps
_MOST_LOWEST_VISITS = 1_500
_PATIENCE = 16  # sets whose neighbours are visited although no lower peak is found
_NUM_LOWEST_SEEDS = 8  # plans that are known, to begin with
_NUM_SINGLES = 6  # sets of one region that are gone on from whatever their peak
_NUM_RETAINING = 6  # sets with small peaks for which retaining outputs is tried
_Score = tuple[int, bool, int, float]  # peak bytes, whether outputs are retained, events at that peak, seconds added


class LowestPeakSearch:
    """Looks for the regions with the least peak. `may_keep` says whose op's outputs a region may retain."""

    def __init__(self, graph: StepGraph, nesting: Nesting, may_keep: np.ndarray) -> None:
        self._graph, self._nesting, self._may_keep = graph, nesting, may_keep
        self._num_left = min(_MOST_LOWEST_VISITS, _MOST_LOWEST_VISITED_OPS // max(len(graph.ops), 1))
        self._scores: dict[tuple[tuple[int, tuple[int, ...]], ...], _Score] = {}  # by regions
        self._least: _Score | None = None
        self._queue: list[tuple[_Score, _Key]] = []
        self._expanded: set[_Key] = set()

    def lowest(self, known: Iterable[Candidate], is_late: Callable[[], bool]) -> Regions:
        """The regions with the least peak among the smallest of the plans `known` and those found from them."""
        for seed in nsmallest(_NUM_LOWEST_SEEDS, known, key=lambda found: (found.peak_bytes, found.extra_s)):
            self._visit(seed.regions)
            self._visit(self._nesting.without_redundant(dict.fromkeys(seed.regions, ())))
        self._visit({})
        self._expand({})
        singles = sorted((score, calls) for score, calls in self._queue if len(calls) == 1)
        for _, calls in singles[:_NUM_SINGLES]:
            self._expand(calls)
        num_vain = 0
        while self._queue and num_vain < _PATIENCE and self._num_left > 0 and not is_late():
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
        """Visit the sets that differ from a set in one call, or in all calls that are alike."""
        key = tuple(calls)
        if key in self._expanded:
            return
        self._expanded.add(key)
        for others in self._nesting.neighbours(key, is_thorough=True):
            if self._num_left > 0:
                self._visit(self._nesting.without_redundant(dict.fromkeys(others, ())))

    def _retain(self, regions: Regions, is_late: Callable[[], bool]) -> None:
        """Retain single outputs, one after the other, as long as that lowers the peak: some are held elsewhere too."""
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
        """Ops, each with its region, of regions without others around or inside; first what lives at the peak.

        The others count too: a replay that need not run its last ops stops earlier.
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
