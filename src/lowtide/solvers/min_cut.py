"""The optimal values to save for every price per byte, for compiled steps, as minimum cuts.

A compiled step saves single values and recomputes the others. For a price per byte, minimising `seconds recomputed +
price * bytes saved` is a minimum cut (choice with prerequisites, Picard 1976), solved exactly by scipy; the integer
programme for a hard budget is Checkmate (Jain et al. 2020). `CutProblem.hull` varies the price, as `hull.hull` does for
the eager engine, and every price gives a lower bound (`CutProblem.lower_bound_s`). Used by `compiled_search` and
`shared_budget`.

Bytes are those live at one critical point, while op `at` runs. Everything that the backward reads later is live then or
recomputed later from live values. So the best choice of values to be live and ops to recompute *after* that op costs no
more than any plan, and its `seconds + price * bytes`, less `price * allowed bytes`, is a lower bound for every plan.
(If `at` is in the forward, values made later may be saved for free.)

The network has a node X for each op (on the source's side: recomputed) and Y for each value (needed later). Edges: X ->
sink with the op's seconds; Y_v -> X_op(v) with price * bytes; X_op -> Y_u without limit for each input u. The source
replaces every Y that the backward reads itself. Values that are live at the critical point in every plan, and static
ones, are free and have no nodes. An op that cannot be recomputed is the sink itself.

scipy's capacities are 32-bit integers, and larger ones wrap around silently. So one unit is a 2**30th of the cost of a
known choice (`_unit`), and edges that cost more than that choice are unlimited. Capacities are rounded down: a cut of n
edges is too small by less than n units, so `dual_s` is never too large, and for 10^4 ops too small by less than 10^-5.

Cost: up to 48 maximum flows per hull, each on a network of at most `2 + ops + values` nodes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.hull import PricedOptimum, corners


def minimum_cut(num_nodes: int, tails: np.ndarray, heads: np.ndarray, capacities: np.ndarray) -> tuple[int, list[int]]:
    """The value of a minimum cut between node 0 (source) and node 1 (sink), and the nodes on the source's side.

    Edges are unique and sorted as in a CSR matrix; capacities are 32-bit integers.
    """
    starts = np.searchsorted(tails, np.arange(num_nodes + 1)).astype(np.int32)
    network = csr_array((capacities, heads.astype(np.int32), starts), shape=(num_nodes, num_nodes))
    result = maximum_flow(network, 0, 1)
    left = network - result.flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left, 0, directed=True, return_predecessors=False).tolist()
    return int(result.flow_value), reached


_UNITS = 1 << 30
_MOST_PRICES = 46  # of a hull, beside the lowest and the highest
_DEAREST = 1024  # at the highest price of a hull, all bytes cost this many times all seconds
_ROUNDING = 1e-14  # relative, of one float subtraction
_LEAST_GAIN = 1e-6  # of the seconds, for a new corner


@dataclass(frozen=True)
class Cut(PricedOptimum):
    """The ops that are optimally recomputed at a price. `dual_s` is a lower bound on `seconds + price * bytes`."""

    dual_s: float
    recomputed: frozenset[int]


class CutProblem:
    """The cut problem for the critical point at op `at`; with `is_over`, right after that op.

    `anchors` are ops whose outputs are saved in any case.
    """

    def __init__(self, graph: StepGraph, at: int, anchors: Container[int] = (), *, is_over: bool = False) -> None:
        self.graph, self.at, self._is_over = graph, at, is_over
        self._needs = graph.needs
        needed_later, self.base_bytes, lives_anyway = self._at_critical_point()
        born_late = [value.born > at for value in graph.values]
        self._charge = [
            0 if born_late[index] or lives_anyway[index] or value.born in anchors else value.bytes
            for index, value in enumerate(graph.values)
        ]
        self._reads = sorted(value for value in needed_later if self._charge[value])
        self._build()

    def _at_critical_point(self) -> tuple[set[int], int, list[bool]]:
        """Values that the backward reads later; bytes live in every plan; for each value, whether it is free."""
        graph, at, needs = self.graph, self.at, self._needs
        reads = zip(needs.value_of.tolist(), needs.read_at.tolist(), needs.used_at.tolist(), strict=True)
        in_use: set[int] = set()
        needed: set[int] = set()
        for value, read, end in reads:
            if read > at:
                needed.add(value)
            elif at < end:
                in_use.add(value)
        last = at + 1 if self._is_over else at
        base = graph.optimizer_state_bytes + graph.other_bytes
        base += 0 if self._is_over else graph.ops[at].workspace_bytes
        free, (has_bytes, has_bytes_again) = list(needs.is_free), needs.has_bytes
        for index, value in enumerate(graph.values):
            if value.kind == "elsewhere":
                free[index] = True
                continue
            lives = value.born < 0 or (value.born <= at and last < value.dropped and has_bytes[index])
            if (
                lives
                or (index in in_use and has_bytes_again[index])
                or (free[index] and index in needed and value.born <= at)
            ):
                base += value.bytes
                free[index] = True
            free[index] = free[index] or value.kind != "activation"
        return needed, base, free

    def _build(self) -> None:
        """Number the nodes that can be reached (source 0, sink 1), and list the edges by kind of cost."""
        needs = self._needs
        node_of_op: dict[int, int] = {}
        node_of_value: dict[int, int] = {}
        is_read = set(self._reads)
        pending = list(self._reads)
        self._fixed_bytes = 0  # read by the backward and not recomputable: saved by every choice
        self._may_fix_bytes = 0  # not recomputable, and needed by some choices
        seconds: list[tuple[int, int, float]] = []
        sized: list[tuple[int, int, int]] = []
        endless: list[tuple[int, int]] = []
        while pending:
            value = pending.pop()
            op, size = self.graph.values[value].born, self._charge[value]
            tail = 0 if value in is_read else node_of_value[value]
            if not needs.recomputable[op]:
                if tail:
                    sized.append((tail, 1, size))
                    self._may_fix_bytes += size
                else:
                    self._fixed_bytes += size
                continue
            if op not in node_of_op:
                head = node_of_op[op] = 2 + len(node_of_op) + len(node_of_value)
                seconds.append((head, 1, needs.seconds[op]))
                for read in needs.inputs[op]:
                    if not self._charge[read] or read in is_read:
                        continue
                    if read not in node_of_value:
                        node_of_value[read] = 2 + len(node_of_op) + len(node_of_value)
                        pending.append(read)
                    endless.append((head, node_of_value[read]))
            sized.append((tail, node_of_op[op], size))
        self._ops = node_of_op
        self._num_nodes = 2 + len(node_of_op) + len(node_of_value)
        self._seconds = np.array([s for _, _, s in seconds])
        self._sizes = np.array([size for _, _, size in sized], dtype=np.float64)
        edges = [(a, b) for a, b, _ in seconds] + [(a, b) for a, b, _ in sized] + endless
        pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
        # One entry per pair of nodes, in the order of a sparse matrix; parallel edges add up.
        keys, self._slot = np.unique(pairs[:, 0] * self._num_nodes + pairs[:, 1], return_inverse=True)
        self._tails, self._heads = keys // self._num_nodes, keys % self._num_nodes
        self._num_endless = len(endless)
        self._most_s = float(self._seconds.sum())
        self._read_bytes = sum(self._charge[value] for value in self._reads)
        self._ops_of_nodes = {node: op for op, node in node_of_op.items()}

    @property
    def dearest(self) -> float:
        """A price at which bytes outweigh all seconds."""
        return _DEAREST * self._most_s / max(self._read_bytes, 1)

    def best(self, price: float) -> Cut:
        """The choice with the least seconds plus `price` times bytes; of several, that with fewest recomputed ops."""
        recomputed: frozenset[int] = frozenset()
        dual_s = 0.0
        unit = self._unit(price)
        if unit > 0.0 and len(self._tails):
            flow_units, recomputed = self._cut(price, unit)
            dual_s = flow_units * unit
        seconds = sum(self._needs.seconds[op] for op in sorted(recomputed))
        return Cut(price, seconds, self._bytes(recomputed), dual_s + price * self._fixed_bytes, recomputed)

    def _unit(self, price: float) -> float:
        """Seconds per unit: the cheaper of saving everything and recomputing everything, divided by 2**30."""
        saving = price * (self._read_bytes - self._fixed_bytes)
        recomputing = self._most_s + price * self._may_fix_bytes
        return min(saving, recomputing) / _UNITS

    def _cut(self, price: float, unit: float) -> tuple[int, frozenset[int]]:
        endless = np.full(self._num_endless, _UNITS + 1.0)
        costs = np.concatenate([self._seconds / unit, price * self._sizes / unit, endless])
        # Add parallel edges before rounding.
        totals = np.bincount(self._slot, weights=costs, minlength=len(self._tails))
        capacities = np.minimum(np.floor(totals), _UNITS + 1).astype(np.int32)
        flow_units, reached = minimum_cut(self._num_nodes, self._tails, self._heads, capacities)
        names = self._ops_of_nodes
        return flow_units, frozenset(names[node] for node in reached if node in names)

    def _bytes(self, recomputed: frozenset[int]) -> int:
        values = self.graph.values
        needed = {value for op in recomputed for value in self._needs.inputs[op] if self._charge[value]}
        return sum(self._charge[v] for v in needed.union(self._reads) if values[v].born not in recomputed)

    @property
    def hull(self) -> list[Cut]:
        """Corners of the lower convex hull of seconds over bytes, from everything saved to as little as possible."""
        return sorted(self._optima[0], key=lambda choice: (choice.seconds, -choice.bytes))

    @cached_property
    def _optima(self) -> tuple[list[Cut], list[Cut]]:
        """The corners, and the optima of all prices tried."""
        ends = self.best(0.0), self.best(self.dearest)
        found, tried = corners(*ends, self.best, _MOST_PRICES, _LEAST_GAIN)
        return found, [*ends, *tried]

    def lower_bound_s(self, budget: int) -> float:
        """A lower bound on the seconds of every plan within `budget`: the largest over all prices that were tried.

        Each price proves a bound on its own, so the result is valid however few prices were tried.
        """
        allowed = budget - self.base_bytes
        bounds = [0.0]
        for choice in self._optima[1]:
            dual_s, charge_s = choice.dual_s, choice.price * allowed
            bounds.append(dual_s - charge_s - _ROUNDING * (dual_s + abs(charge_s)))  # rounding of the subtraction
        return max(bounds)
