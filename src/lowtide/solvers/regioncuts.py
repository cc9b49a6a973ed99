"""Which outputs a region holds at a price, where a replay leaves out what was computed for held ones alone.

Then ops do not decide one by one: to hold a query after its rotation spares the rotation and the projection before it.
The best choice is a minimum cut, as in `cutting`: for each op a node Y (its output is needed) and a node X (it runs
again), with edges Y -> X of price * bytes, X -> sink of the op's seconds, and X -> Y without limit to each op whose
output it reads. The source needs whatever has to be there, saved values above all. Only ops that might be left out, and
those that read what they make, are in the network; all others decide for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lowtide.graph import StepGraph
from lowtide.solvers.flows import minimum_cut

_UNITS = 1 << 30  # of a cost that is known to be enough; see `cutting`


@dataclass(frozen=True)
class _Network:
    """The network of one call: edges in the order of a sparse matrix, and whose seconds or bytes each costs."""

    ops: np.ndarray  # absolute
    tails: np.ndarray
    heads: np.ndarray
    op_of: np.ndarray  # of each edge
    kind: np.ndarray  # of each edge: 0 costs seconds, 1 costs bytes, 2 has no limit
    form: bytes  # the same for networks that are alike


class RegionCuts:
    """The best outputs to hold for those of `calls` in which some ops might be left out.

    `gained_s` are the seconds that are gained with each op that does not run. `may_keep[depth]` are the ops whose
    outputs calls at that depth may hold. `freer` are the cuts where they may hold
    more: what is best there and allowed here is best here.
    """

    def __init__(
        self,
        graph: StepGraph,
        gained_s: np.ndarray,
        may_keep: Mapping[int, np.ndarray],
        must_keep: np.ndarray,
        stops: list[int],
        calls: Iterable[int],
        freer: RegionCuts | None = None,
    ) -> None:
        self._graph, self._unneeded, self._gained_s = graph, graph.unneeded, gained_s
        self._may_keep, self._must_keep, self._stops = may_keep, must_keep, stops
        found = ((call, self._network(call)) for call in calls)
        self._networks = {call: network for call, network in found if network is not None}
        self._freer = freer
        self._known: dict[tuple[object, ...], tuple[float, float, tuple[int, ...]]] = {}

    @property
    def calls(self) -> list[int]:
        return list(self._networks)

    @property
    def rounding(self) -> float:
        """The share of a cost by which a cut may be above the least: each edge is rounded down by less than a unit."""
        return max((len(network.tails) for network in self._networks.values()), default=0) / _UNITS

    def __contains__(self, call: int) -> bool:
        return call in self._networks

    def best(self, call: int, price: float, held: np.ndarray) -> tuple[float, tuple[int, ...]]:
        """Seconds that are spared, net of `price` times bytes, beyond what ops that decide one by one spare; and the
        ops of the call's network whose outputs are held, counted from its first.
        """
        alone, cost, kept = self._solved(call, price, held)
        return alone - cost, kept

    def _solved(self, call: int, price: float, held: np.ndarray) -> tuple[float, float, tuple[int, ...]]:
        """What the ops of a call's network cost if they decide one by one, what at the least, and which are held."""
        network, first = self._networks[call], self._graph.calls[call].first
        seconds, sizes = self._gained_s[network.ops], held[network.ops]
        key = network.form, price, seconds.tobytes(), sizes.tobytes()
        if key not in self._known:
            may_keep = self._may_keep[self._graph.depths[call]]
            alone = np.where(may_keep[network.ops], np.minimum(seconds, price * sizes), seconds)
            found = None if self._freer is None else self._freer._solved(call, price, held)[1:]
            if found is None or not all(may_keep[first + op] for op in found[1]):
                found = self._cut(network, price, seconds, sizes, alone, may_keep[network.ops], first)
            self._known[key] = float(alone.sum()), *found
        return self._known[key]

    def ops(self, call: int) -> np.ndarray:
        """The ops of a call that do not decide for themselves."""
        return self._networks[call].ops

    def _cut(
        self,
        network: _Network,
        price: float,
        seconds: np.ndarray,
        sizes: np.ndarray,
        alone: np.ndarray,
        may_keep: np.ndarray,
        first: int,
    ) -> tuple[float, tuple[int, ...]]:
        """The least cost, and the ops that are held then, counted from the call's first."""
        unit = float(alone.sum()) / _UNITS
        if unit <= 0.0:
            kept = network.ops[may_keep & (seconds > 0)]
            return 0.0, tuple((kept - first).tolist())
        costs = np.where(network.kind == 0, seconds[network.op_of], price * sizes[network.op_of]) / unit
        costs = np.where(network.kind == 2, _UNITS + 1.0, costs)
        capacities = np.minimum(np.floor(costs), _UNITS + 1).astype(np.int32)
        _, reached = minimum_cut(2 + 2 * len(network.ops), network.tails, network.heads, capacities)
        near = np.zeros(2 + 2 * len(network.ops), dtype=bool)
        near[reached] = True
        needed, again = near[2::2], near[3::2]
        held = needed & ~again
        kept = network.ops[held & may_keep]
        cost = float(seconds[again].sum() + price * sizes[held].sum())
        return cost, tuple((kept - first).tolist())

    def _network(self, call: int) -> _Network | None:
        graph, unneeded = self._graph, self._unneeded
        first, stop, may_keep = graph.calls[call].first, self._stops[call], self._may_keep[graph.depths[call]]
        if stop <= first or not unneeded.can_skip(call):
            return None
        skippable = [op for op in range(first, stop) if not self._must_keep[op] and unneeded.may_skip(op, call)]
        readers = {op: [r for r in unneeded.readers[op] or () if not self._must_keep[r]] for op in skippable}
        # One whose output is read past the end of the replay is needed, or as good as.
        skippable = [op for op in skippable if all(reader < stop for reader in readers[op])]
        is_of_use = any(may_keep[reader] for op in skippable for reader in unneeded.readers[op] or ())
        if not is_of_use or not any(self._gained_s[op] > 0 for op in skippable):
            return None
        inside = sorted({*skippable, *(reader for op in skippable for reader in readers[op])})
        place = {op: index for index, op in enumerate(inside)}
        is_skippable = set(skippable)
        edges: list[tuple[int, int, int, int]] = []
        for op, index in place.items():
            need, again = 2 + 2 * index, 3 + 2 * index
            if op not in is_skippable:
                edges.append((0, need, index, 2))
            edges.append((need, again, index, 1 if may_keep[op] else 2))
            edges.append((again, 1, index, 0))
            if op in is_skippable:
                edges += [(3 + 2 * place[reader], need, index, 2) for reader in readers[op]]
        table, ops = np.array(sorted(edges), dtype=np.int64), np.array(inside)
        form = (ops - first).tobytes() + table.tobytes()
        return _Network(ops, table[:, 0], table[:, 1], table[:, 2], table[:, 3], form)
