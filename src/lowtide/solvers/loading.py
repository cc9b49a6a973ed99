"""Regions that hold outputs for the link to carry: so many bytes for each second that they take in the forward.

Where memory is short at one moment, a chain goes from plans that hold much to plans that hold little by one layer after
another, as it makes no difference which. It does to a link: that can take something from every layer, and has nothing
to do beside those that hold nothing. So here all layers give alike. Each region holds the outputs that take longest to
make for their bytes, up to a rate; and the plans are those for all rates, from the highest on.
"""

from __future__ import annotations

from lowtide.graph import StepGraph
from lowtide.solvers.chain import Regions
from lowtide.solvers.places import Places
from lowtide.solvers.pressing import Codecs
from lowtide.solvers.pricing import Pricing

_NUM_RATES = 256
_LOWEST = 1 / 64  # of the rate at which everything is held
_NUM_STOPS = 9


class Loads:
    """Plans numbered from 0 (all held that can be moved) on, the last being `regions` as they are. As a `Chain`."""

    def __init__(self, graph: StepGraph, regions: Regions, pricing: Pricing) -> None:
        self._graph, self._regions = graph, regions
        places, outermost = Places(graph), graph.outermost(regions)
        has_inner = {outermost[call] for call in regions if outermost[call] != call}
        self._loads = {
            call: _Load(graph, call, regions[call], pricing, places)
            for call in sorted(set(outermost.values()) - has_inner - {-1})
        }
        seconds = sum(load.forward_s for load in self._loads.values())
        self._highest = sum(load.bytes for load in self._loads.values()) / seconds if seconds else 0.0
        self.stops = [*range(0, _NUM_RATES, _NUM_RATES // (_NUM_STOPS - 1)), _NUM_RATES]

    def regions(self, number: int) -> Regions:
        """The regions of plan `number`, by call, with the ops whose outputs each holds."""
        found = dict(self._regions)
        if number == _NUM_RATES:
            return found
        rate, room = self._highest * _LOWEST ** (number / _NUM_RATES), 0.0
        for call, load in self._loads.items():
            room += rate * load.forward_s
            held, size, gain_s = load.held(room)
            if gain_s > 0:
                room -= size
                found[call] = tuple(sorted({*found[call], *held}))
            room = min(room, 0.0)  # the link does not catch up on what it had no part in
        return found

    def codecs(self, number: int) -> Codecs:
        """Nothing is encoded."""
        return ()


class _Load:
    """What one region could retain besides what it does, the best first."""

    def __init__(self, graph: StepGraph, call: int, kept: tuple[int, ...], pricing: Pricing, places: Places) -> None:
        first, end = graph.calls[call].first, graph.calls[call].end
        self.forward_s = sum(op.seconds for op in graph.ops[first:end])
        self._call, self._kept, self._pricing = call, kept, pricing
        found: list[tuple[float, int, int, float]] = []
        for number in pricing.keepable_in(call):
            op = graph.ops[number]
            size = graph.values[op.outputs[0]].bytes
            if number - first not in kept and size >= places.smallest_moved and places.can_move(op.outputs[0]):
                found.append((-op.seconds / size, number - first, size, op.seconds))
        self._outputs = [(op, size, seconds) for _, op, size, seconds in sorted(found) if seconds]
        self.bytes = sum(size for _, size, _ in self._outputs)

    def held(self, room: float) -> tuple[list[int], int, float]:
        """Ops whose outputs fill `room` bytes, the last one perhaps overfills them; their bytes, and seconds gained."""
        ops: list[int] = []
        total, total_s = 0, 0.0
        for op, size, seconds in self._outputs:
            if total >= room:
                break
            ops.append(op)
            total, total_s = total + size, total_s + seconds
        retaining_s = self._pricing.retaining_s
        return ops, total, total_s + retaining_s(self._call, self._kept) - retaining_s(self._call, (*self._kept, *ops))
