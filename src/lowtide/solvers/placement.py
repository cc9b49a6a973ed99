"""Offload: which values of a plan move to host memory, and candidates whose regions retain outputs to move.

`OffloadSelector.plan` turns the decisions of a candidate into a `Plan`. It goes through the forward in order and
moves each value that the link can take, at a given share of its bandwidth: the copy has to start within a sixteenth
of the forward after the value was saved, and the value has to be back before it is read. So copies run beside the
compute, spread over all layers. (Beaumont, Eyraud-Dubois and Shilova 2021 combine recomputing and offload optimally
on chains.)

`Placement` names every position at which a value is held: its saves outside of regions, and regions that hold it as
an input or a retained output. The value leaves the device only if all of them release it, so a plan has a `Move` for
each.

`LinkLoads` generates candidates that keep the link busy. Along a `HullPath` some layers are recomputed from their
inputs alone, and the link has nothing to copy while they run. Here every region retains outputs in proportion to its
forward time, those that take longest to recompute per byte first; candidates differ in bytes per second of forward.

Cost: sorting per plan; a plan with moves is simulated op by op, about 25 times as long as one without. Skipped unless
the user passes `host=`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Move, Plan
from lowtide.solvers.baselines import recomputes
from lowtide.solvers.candidate import Codecs, Regions
from lowtide.solvers.compression import CompressionOptions
from lowtide.solvers.hull import Pricing

# Bytes: smaller copies cost more in launches than they free; the limit is higher in a step with large values.
_SMALLEST, _SMALLEST_AMONG_LARGE, _LARGE = 1 << 16, 1 << 20, 1 << 28
# Ops that save a tensor before they fill it: a copy made at the save is not what the backward reads.
_FILL_LATER = frozenset({"aten.rrelu_with_noise.default", "aten.rrelu_with_noise_.default"})


class Placement:
    """The positions (saves, inputs and retained outputs of regions) at which the values of a graph are held."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        is_large = any(value.bytes >= _LARGE for value in graph.values if value.kind == "activation")
        self.smallest_moved = _SMALLEST_AMONG_LARGE if is_large else _SMALLEST
        self._saves: dict[int, list[int]] = {}
        for index, save in enumerate(graph.saves):
            self._saves.setdefault(save.value, []).append(index)

    def can_move(self, value: int) -> bool:
        """Whether the engine can move a value: an activation, not made of weights, that is saved only in modules."""
        graph, facts = self._graph, self._graph.values[value]
        if facts.kind != "activation" or facts.born < 0:
            return False
        saves = self._saves.get(value, ())
        if any(graph.save_numbers[save][0] < 0 for save in saves):
            return False
        if any(graph.ops[graph.saves[save].made].name in _FILL_LATER for save in saves):
            return False
        return not graph.is_made_of_weights(value)

    def everywhere(self, targets: Mapping[int, tuple[str, str]], regions: Regions) -> tuple[Move, ...]:
        """Moves for every position at which these values are held. `targets` are tier and codec of each value."""
        graph = self._graph
        owner = graph.innermost(regions)
        inputs: dict[int, list[tuple[str, int, int]]] = {}
        for call in sorted(regions):
            if owner[graph.calls[call].parent] < 0:
                for number, value in enumerate(graph.calls[call].inputs):
                    inputs.setdefault(value, []).append(graph.input_number(call, number))
        outputs = retained_outputs(graph, regions)
        moves: list[Move] = []
        for value, target in targets.items():
            saves = self._saves.get(value, ())
            saved_in = [graph.save_numbers[save] for save in saves if owner[graph.saves[save].call] < 0]
            named = [(graph.calls[call].path, graph.nths[call], number) for call, number in saved_in]
            for path, nth, number in [*named, *inputs.get(value, ())]:
                moves.append(Move(path, nth, number, *target))
            if value in outputs:
                region, op, _ = outputs[value]
                moves.append(Move(*graph.names_of(region)[0], 0, *target, op=op))
        return tuple(moves)


def retained_outputs(graph: StepGraph, regions: Regions) -> dict[int, tuple[int, int, bool]]:
    """Outputs that regions retain: by value, the region, the op counted from its first, and whether it can move.

    Only the first output of an op can move.
    """
    return {
        value: (call, op, number == 0)
        for call, ops in regions.items()
        for op in ops
        for number, value in enumerate(graph.ops[graph.calls[call].first + op].outputs)
    }


_LAG = 1 / 16  # of the forward: how far the link may fall behind; values become available in bursts


class OffloadSelector:
    """Picks the values of a plan to move, within `host` bytes. Values with a codec move encoded."""

    def __init__(self, graph: StepGraph, host: int, compression: CompressionOptions | None = None) -> None:
        self._graph = graph
        self._compression = compression
        self._host_bytes, self._link_bytes_per_s = host, graph.hardware.link_bytes_per_s
        self._clock = graph.arrays.clock
        self._lag_s = float(self._clock[graph.num_forward]) * _LAG
        self._first_save: dict[int, int] = {}
        self._placement = Placement(graph)
        for index in sorted(range(len(graph.saves)), key=lambda index: graph.saves[index].made):
            if self._placement.can_move(graph.saves[index].value):
                self._first_save.setdefault(graph.saves[index].value, index)
        self._reads: dict[int, int] = {}
        for save in graph.saves:
            if save.read >= 0:
                self._reads[save.value] = min(self._reads.get(save.value, save.read), save.read)
        self._replays: dict[int, int] = {}  # by call: when the backward first reads a save of it, or of calls inside
        for save in graph.saves:
            for call in graph.ancestors(save.call) if save.read >= 0 else ():
                self._replays[call] = min(self._replays.get(call, save.read), save.read)

    def on(self, graph: StepGraph) -> OffloadSelector:
        """The same selector for the step's graph with segments."""
        compression = self._compression.on(graph) if self._compression is not None else None
        return OffloadSelector(graph, self._host_bytes, compression)

    def plan(self, regions: Regions, share: float, codecs: Codecs = ()) -> Plan:
        """The plan with these regions and codecs, and the values moved that fit through `share` of the bandwidth."""
        forms = self._compression.left_behind(codecs, regions) if self._compression is not None else {}
        sizes = {value: form.bytes for value, form in forms.items()}
        moved, waiting_bytes = self._moved(regions, share, sizes) if share else ({}, 0)
        tiers = moved | {value: "device" for value in forms if value not in moved}
        codecs_of = {value: form.codec for value, form in forms.items()}
        targets = {value: (to, codecs_of.get(value, "")) for value, to in tiers.items()}
        moves = self._placement.everywhere(targets, regions) if targets else ()
        moved_sizes = {value: sizes.get(value, self._graph.values[value].bytes) for value in moved}
        in_flight_bytes = max(waiting_bytes, self._at_once_bytes(regions, moved_sizes))
        return Plan(recomputes(self._graph, regions), moves, in_flight_bytes)

    def _at_once_bytes(self, regions: Regions, sizes: Mapping[int, int]) -> int:
        """Bytes of moved values that must be on the device at once: the inputs of any replay, and any two values."""
        values = {call: set(self._graph.calls[call].inputs) for call in regions}
        for value, (call, _, _) in retained_outputs(self._graph, regions).items():
            values[call].add(value)
        sums = [sum(sizes.get(value, 0) for value in each) for each in values.values()]
        return max([2 * max(sizes.values(), default=0), *sums])

    def _moved(self, regions: Regions, share: float, sizes: Mapping[int, int]) -> tuple[dict[int, str], int]:
        """The tier of each moved value, and the most bytes that wait for the link. `sizes` are of encoded values."""
        left_bytes, clock, speed = self._host_bytes, self._clock, self._link_bytes_per_s
        link_is_free_s = 0.0
        moved: dict[int, str] = {}
        waiting_bytes = 0.0
        for held, value, read in self._candidates(regions):
            size = sizes.get(value, self._graph.values[value].bytes)
            if size > left_bytes or not speed:
                continue
            start_s = max(link_is_free_s, clock[held])
            if start_s > clock[held] + self._lag_s or clock[read] - start_s < 3 * size / speed:
                continue
            waiting_bytes = max(waiting_bytes, (start_s - clock[held]) * speed + size)
            link_is_free_s = start_s + size / (speed * share)
            left_bytes -= size
            moved[value] = "host"
        return moved, int(waiting_bytes)

    def _candidates(self, regions: Regions) -> list[tuple[int, int, int]]:
        """Values that the forward holds: the op from which on, the value, and the op that reads it; earliest first.

        These are saved tensors that no region recomputes, and inputs and retained outputs of outermost regions.
        """
        graph = self._graph
        outermost = graph.outermost(regions)
        spans = [(graph.calls[call].first, graph.calls[call].end) for call in sorted(set(outermost.values()) - {-1})]
        starts = [first for first, _ in spans]
        found: dict[int, tuple[int, int]] = {}
        for value, index in self._first_save.items():
            facts = graph.values[value]
            span = bisect_right(starts, facts.born) - 1
            made_inside = span >= 0 and facts.born < spans[span][1]
            if value in self._reads and not (made_inside and facts.dropped <= spans[span][1]):
                found[value] = graph.saves[index].made, self._reads[value]
        held = [
            (value, call, graph.calls[call].first)
            for call in sorted(set(outermost.values()) - {-1})
            for value in graph.calls[call].inputs
        ]
        outputs = retained_outputs(graph, regions)
        held += [
            (value, call, graph.values[value].born + 1) for value, (call, _, can_move) in outputs.items() if can_move
        ]
        for value, call, since in held:
            if call in self._replays and (value in found or self._placement.can_move(value)):
                before = found.get(value, (since, self._replays[call]))
                found[value] = min(since, before[0]), min(self._replays[call], before[1])
        stuck = {value for value, (_, _, can_move) in outputs.items() if not can_move}
        return sorted(
            (since, value, read)
            for value, (since, read) in found.items()
            if value not in stuck and graph.values[value].bytes >= self._placement.smallest_moved
        )


_NUM_RATES = 256  # candidates, on a logarithmic scale
_LOWEST = 1 / 64  # of the rate at which everything is retained
_NUM_STOPS = 9


class LinkLoads:
    """Candidates from 0 (everything movable is retained) to the last (`regions` unchanged), like a `HullPath`."""

    def __init__(self, pricing: Pricing, regions: Regions) -> None:
        graph, self._regions = pricing.graph, regions
        placement, outermost = Placement(graph), graph.outermost(regions)
        has_inner = {outermost[call] for call in regions if outermost[call] != call}
        self._loads = {
            call: _RegionLoad(pricing, call, regions[call], placement)
            for call in sorted(set(outermost.values()) - has_inner - {-1})
        }
        seconds = sum(load.forward_s for load in self._loads.values())
        self._highest = sum(load.bytes for load in self._loads.values()) / seconds if seconds else 0.0
        self.stops = [*range(0, _NUM_RATES, _NUM_RATES // (_NUM_STOPS - 1)), _NUM_RATES]

    def regions(self, number: int) -> Regions:
        """The regions of candidate `number`."""
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
            room = min(room, 0.0)  # bandwidth unused before this point is not carried over
        return found

    def codecs(self, number: int) -> Codecs:
        """No values are encoded."""
        return ()


class _RegionLoad:
    """Further outputs that one region could retain, the most seconds per byte first."""

    def __init__(self, pricing: Pricing, call: int, kept: tuple[int, ...], placement: Placement) -> None:
        graph = pricing.graph
        first, end = graph.calls[call].first, graph.calls[call].end
        self.forward_s = sum(op.seconds for op in graph.ops[first:end])
        self._call, self._kept, self._pricing = call, kept, pricing
        found: list[tuple[float, int, int, float]] = []
        for number in pricing.keepable_in(call):
            op = graph.ops[number]
            size = graph.values[op.outputs[0]].bytes
            if number - first not in kept and size >= placement.smallest_moved and placement.can_move(op.outputs[0]):
                found.append((-op.seconds / size, number - first, size, op.seconds))
        self._outputs = [(op, size, seconds) for _, op, size, seconds in sorted(found) if seconds]
        self.bytes = sum(size for _, size, _ in self._outputs)

    def held(self, room: float) -> tuple[list[int], int, float]:
        """Ops whose outputs fill `room` bytes (the last may exceed them), their bytes, and the seconds saved."""
        ops: list[int] = []
        total, total_s = 0, 0.0
        for op, size, seconds in self._outputs:
            if total >= room:
                break
            ops.append(op)
            total, total_s = total + size, total_s + seconds
        retaining_s = self._pricing.retaining_s
        return ops, total, total_s + retaining_s(self._call, self._kept) - retaining_s(self._call, (*self._kept, *ops))
