"""Which outputs given regions hold on to, so that as little as possible is replayed within a budget.

With the regions fixed, each op of a region is run again or its output is held, and what holding it adds is a size over
a span of events, whatever else is held (`EagerLives.keeping`). So memory is a sum at each event, and the best choice is
a knapsack whose rows are events. Few rows matter: one is as good as ruled out where another has more in use and every
output weighs as much in it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from lowtide.eagerlives import EagerLives

_MOST_ROWS = 64
_ROWS_LOOKED_AT = 4  # to see what can still be hoped for: those with least room
_MOST_STATES = 2048
_MOST_ROOMS = 1_000_000  # states times rows times ops
_LESS = 1e-12  # relative, of seconds: rounding


def roughly_least_s(played: EagerLives, may_keep: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """As `Filling.least_s`, and never above it, by the one event at which most lives without anything held."""
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


class Filling:
    """The room that some regions leave, and the ops whose outputs could be held in it. Free ones are held anyway.

    `ops` are in the order of the seconds they gain for their bytes, the best first.
    """

    def __init__(self, played: EagerLives, may_keep: np.ndarray) -> None:
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
            if gains[top] > best_s * (1 + _LESS):
                best, best_s = np.flatnonzero(picks[top]), float(gains[top])
            hopes = gains + self._most_s(index + 1, rooms)
            going = np.flatnonzero(hopes > best_s * (1 + _LESS))
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
