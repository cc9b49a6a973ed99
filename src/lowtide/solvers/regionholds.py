"""What regions hold at a price, of the outputs that they may hold, and what that costs.

There are two ways to hold outputs. Any can be held where the ops of a region are watched in its forward and in its
replay. Where those alone are held that saved-tensor hooks are shown (`graph.shown`), only the replay is watched. Each
way is a set of ops that a region may hold and a fee; which way is best is up to who compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lowtide.graph import StepGraph
from lowtide.solvers.regioncuts import RegionCuts


class RegionHolds:
    """One way to hold outputs: the ops that `may_keep` in regions of each depth, and the fee of each call, in seconds.

    `held[depth]` are bytes for each op that a region at that depth holds, if it holds the op's outputs. A fee of inf
    is for a call that cannot be such a region, or need not. `freer` is a way for the same calls to hold more.
    """

    def __init__(
        self,
        graph: StepGraph,
        stops: list[int],
        may_keep: Mapping[int, np.ndarray],
        must_keep: np.ndarray,
        held: Mapping[int, np.ndarray],
        fees_s: np.ndarray,
        freer: RegionHolds | None = None,
    ) -> None:
        self._graph, self._stops = graph, stops
        self._may_keep, self._must_keep, self._held, self.fees_s = may_keep, must_keep, held, fees_s
        self._seconds, self._spared_s = graph.arrays.seconds[: graph.num_forward], graph.shown.spared_s
        first, end = graph.arrays.first, np.array([call.end for call in graph.calls], dtype=np.int64)
        self._spans = first, np.maximum(first, np.array(stops, dtype=np.int64)), end
        depths = np.array(graph.depths, dtype=np.int64)
        self._calls_at = {depth: depths == depth for depth in held}
        calls, cuts = np.flatnonzero(fees_s < np.inf).tolist(), None if freer is None else freer.cuts
        gained_s = self._seconds - self._spared_s
        self.cuts: RegionCuts = RegionCuts(graph, gained_s, may_keep, must_keep, stops, calls, cuts)

    def costs(self, price: float) -> np.ndarray:
        """What each call costs as a region with what it best holds at a price, less what its inputs cost."""
        first, stop, end = self._spans
        costs = self.fees_s.copy()
        for depth, held in self._held.items():
            may_keep = self._may_keep[depth]
            holding = price * held + self._spared_s
            must = np.where(self._must_keep, holding, 0.0)
            either = np.where(may_keep, np.minimum(self._seconds, holding), self._seconds)
            run, past_stop = sums_of(np.where(self._must_keep, must, either)), sums_of(must)
            here = self._calls_at[depth]
            costs[here] += (run[stop] - run[first] + past_stop[end] - past_stop[stop])[here]
        for call in self.cuts.calls:
            costs[call] -= self.cuts.best(call, price, self._held[self._graph.depths[call]])[0]
        return costs

    def kept(self, index: int, price: float) -> list[int]:
        """The ops of a call, counted from its first, whose outputs it best holds at a price."""
        call, depth = self._graph.calls[index], self._graph.depths[index]
        ops, held = slice(call.first, call.end), self._held[depth]
        worth = self._may_keep[depth][ops] & (price * held[ops] < self._seconds[ops] - self._spared_s[ops])
        worth[max(0, self._stops[index] - call.first) :] = False
        kept = set(np.flatnonzero(worth | self._must_keep[ops]).tolist())
        if index in self.cuts:
            kept -= set((self.cuts.ops(index) - call.first).tolist())
            kept |= set(self.cuts.best(index, price, held)[1])
        return sorted(kept)


def sums_of(items: np.ndarray) -> np.ndarray:
    """The sums of the first items: of none, of one, and so on."""
    return np.concatenate([[0], np.cumsum(items)])


def ways_to_hold(
    graph: StepGraph,
    stops: list[int],
    least_stops: list[int],
    may_keep: np.ndarray,
    must_keep: np.ndarray,
    held: Mapping[int, np.ndarray],
    allowed: np.ndarray,
) -> list[RegionHolds]:
    """The ways in which calls that are `allowed` to be regions may hold outputs, with what watching costs at the least.

    The second is for those calls only where both have something for them: some of what they may hold is not shown.
    """
    first, stop = graph.arrays.first, np.maximum(graph.arrays.first, np.array(stops, dtype=np.int64))
    end = np.array([call.end for call in graph.calls], dtype=np.int64)
    depths = np.array(graph.depths, dtype=np.int64)
    shown = {depth: graph.shown.depths >= depth for depth in held}
    num_hidden, num_bound = np.zeros(len(first)), np.zeros(len(first))  # ops not shown: to be held or not, and to be
    for depth, is_shown in shown.items():
        hidden, bound = sums_of(may_keep & ~is_shown), sums_of(must_keep & ~is_shown)
        here = depths == depth
        num_bound[here] = (bound[end] - bound[first])[here]
        num_hidden[here] = (hidden[stop] - hidden[first])[here] + num_bound[here]
    # A region with others inside is watched in its forward whatever it holds; its replay may end earlier for that.
    forward_op_s, replay_op_s = graph.shown.forward_op_s, graph.shown.replay_op_s
    shown_s = replay_op_s * (stop - first)
    hidden_s = forward_op_s * (end - first) + replay_op_s * (np.array(least_stops, dtype=np.int64) - first)
    any_s = np.where(num_hidden > 0, hidden_s, np.minimum(shown_s, hidden_s))
    everything = dict.fromkeys(held, may_keep)
    found = [RegionHolds(graph, stops, everything, must_keep, held, np.where(allowed, any_s, np.inf))]
    has_both = allowed & (num_hidden > 0) & (num_bound == 0)
    if forward_op_s and has_both.any():
        shown_only = {depth: may_keep & is_shown for depth, is_shown in shown.items()}
        found.append(
            RegionHolds(graph, stops, shown_only, must_keep, held, np.where(has_both, shown_s, np.inf), found[0])
        )
    return found
