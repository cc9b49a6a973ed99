"""Where a moved value is held: by its saves outside of recomputed calls, and by such calls as an input or output.

A value leaves the device only if whoever holds it lets go, so a plan names each of these places.

Which values leave the device, so that copies run beside the compute and hardly anything waits.

A link carries so many bytes per second and no more, whenever they are asked for. So the values to move are picked
along the forward, as a link of a given share of the bandwidth would take them up without falling behind by much; early
and late layers give alike. A value must also have the time to go and come back before it is read.

Regions that hold outputs for the link to carry: so many bytes for each second that they take in the forward.

Where memory is short at one moment, a chain goes from plans that hold much to plans that hold little by one layer after
another, as it makes no difference which. It does to a link: that can take something from every layer, and has nothing
to do beside those that hold nothing. So here all layers give alike. Each region holds the outputs that take longest to
make for their bytes, up to a rate; and the plans are those for all rates, from the highest on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from lowtide.graph.step_graph import Save, StepGraph
from lowtide.plans.step_plan import Move, Plan
from lowtide.solvers.baselines import recomputes
from lowtide.solvers.candidate import Codecs, Regions
from lowtide.solvers.compression import CompressionOptions
from lowtide.solvers.hull import Pricing

# Bytes: smaller copies cost more in launches than they free. In a step with large values even more so.
_SMALLEST, _SMALLEST_AMONG_LARGE, _LARGE = 1 << 16, 1 << 20, 1 << 28
# Ops that save a tensor before they fill it: what is copied out at the save is not what the backward reads.
_FILL_LATER = frozenset({"aten.rrelu_with_noise.default", "aten.rrelu_with_noise_.default"})


class Placement:
    """The places in which the values of a graph are held."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        is_large = any(value.bytes >= _LARGE for value in graph.values if value.kind == "activation")
        self.smallest_moved = _SMALLEST_AMONG_LARGE if is_large else _SMALLEST
        self._saves: dict[int, list[int]] = {}
        for index, save in enumerate(graph.saves):
            self._saves.setdefault(save.value, []).append(index)

    def can_move(self, value: int) -> bool:
        """Whether the engine can move a value wherever it is saved: an activation, and only in modules of the model.

        What is made of weights alone, casts of them say, the engine takes for weights and leaves where it is.
        """
        graph, facts = self._graph, self._graph.values[value]
        if facts.kind != "activation" or facts.born < 0:
            return False
        saves = self._saves.get(value, ())
        if any(graph.save_numbers[save][0] < 0 or self._is_filled_later(graph.saves[save]) for save in saves):
            return False
        kinds = {graph.values[given].kind for given in graph.ops[facts.born].inputs}
        return not kinds or not kinds <= {"parameter", "buffer"}

    def _is_filled_later(self, save: Save) -> bool:
        return self._graph.ops[save.made].name in _FILL_LATER

    def everywhere(self, ways: Mapping[int, tuple[str, str]], regions: Regions) -> tuple[Move, ...]:
        """Moves of values, each by its way (where to, and the codec), that name every place in which one is held."""
        graph = self._graph
        owner = graph.innermost(regions)
        inputs: dict[int, list[tuple[str, int, int]]] = {}
        for call in sorted(regions):
            if owner[graph.calls[call].parent] < 0:
                for number, value in enumerate(graph.calls[call].inputs):
                    inputs.setdefault(value, []).append(graph.input_number(call, number))
        outputs = retained_outputs(graph, regions)
        found: list[Move] = []
        for value, way in ways.items():
            saves = self._saves.get(value, ())
            places = [graph.save_numbers[save] for save in saves if owner[graph.saves[save].call] < 0]
            named = [(graph.calls[place].path, graph.nths[place], number) for place, number in places]
            for path, nth, number in [*named, *inputs.get(value, ())]:
                found.append(Move(path, nth, number, *way))
            if value in outputs:
                place, op, _ = outputs[value]
                found.append(Move(*graph.names_of(place)[0], 0, *way, op=op))
        return tuple(found)


def retained_outputs(graph: StepGraph, regions: Regions) -> dict[int, tuple[int, int, bool]]:
    """Outputs of single ops that regions hold: the region, the op counted from its first, and whether it can move.

    Only the first output of an op can; the others are on the device whatever else becomes of them.
    """
    return {
        value: (call, op, number == 0)
        for call, ops in regions.items()
        for op in ops
        for number, value in enumerate(graph.ops[graph.calls[call].first + op].outputs)
    }


_LAG = 1 / 16  # of the forward: how far the link may be behind, as values come in bursts


class OffloadSelector:
    """Picks values of a graph to move, within `host` bytes; those that a `press` writes smaller move so."""

    def __init__(self, graph: StepGraph, host: int, press: CompressionOptions | None = None) -> None:
        self._graph = graph
        self._compression = press
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
        self._replays: dict[int, int] = {}  # when the backward first needs a call's saves, inner calls' included
        for save in graph.saves:
            call = save.call
            while save.read >= 0 and call >= 0:
                self._replays[call] = min(self._replays.get(call, save.read), save.read)
                call = graph.calls[call].parent

    def on(self, graph: StepGraph) -> OffloadSelector:
        """The same for the step's graph with segments."""
        press = self._compression.on(graph) if self._compression is not None else None
        return OffloadSelector(graph, self._host_bytes, press)

    def plan(self, regions: Regions, share: float, codecs: Codecs = ()) -> Plan:
        """These regions replayed, values moved that fit through `share` of the bandwidth, and those encoded."""
        forms = self._compression.left_behind(codecs, regions) if self._compression is not None else {}
        sizes = {value: form.bytes for value, form in forms.items()}
        moved, waiting_bytes = self._moved(regions, share, sizes) if share else ({}, 0)
        ways = moved | {value: "device" for value in forms if value not in moved}
        codecs_of = {value: form.codec for value, form in forms.items()}
        found = {value: (to, codecs_of.get(value, "")) for value, to in ways.items()}
        moves = self._placement.everywhere(found, regions) if found else ()
        moved_sizes = {value: sizes.get(value, self._graph.values[value].bytes) for value in moved}
        in_flight_bytes = max(waiting_bytes, self._at_once_bytes(regions, moved_sizes))
        return Plan(recomputes(self._graph, regions), moves, in_flight_bytes)

    def _at_once_bytes(self, regions: Regions, sizes: Mapping[int, int]) -> int:
        """How much of these moved values has to come back at once: all that one replay begins with, and any two."""
        values = {call: set(self._graph.calls[call].inputs) for call in regions}
        for value, (call, _, _) in retained_outputs(self._graph, regions).items():
            values[call].add(value)
        sums = [sum(sizes.get(value, 0) for value in each) for each in values.values()]
        return max([2 * max(sizes.values(), default=0), *sums])

    def _moved(self, regions: Regions, share: float, sizes: Mapping[int, int]) -> tuple[dict[int, str], int]:
        """Which values move, and the most bytes that wait for the link. `sizes` are those of encoded values."""
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
        """From which op on each value is held that the forward leaves behind, earliest first; and the op it is read by.

        Those are saves, where they are not made again, and what outermost regions hold, be it input or output.
        """
        graph = self._graph
        outermost = graph.outermost(regions)
        spans = [(graph.calls[call].first, graph.calls[call].end) for call in sorted(set(outermost.values()) - {-1})]
        starts = [first for first, _ in spans]
        found: dict[int, tuple[int, int]] = {}
        for value, index in self._first_save.items():
            facts = graph.values[value]
            place = bisect_right(starts, facts.born) - 1
            made_inside = place >= 0 and facts.born < spans[place][1]
            if value in self._reads and not (made_inside and facts.dropped <= spans[place][1]):
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


_NUM_RATES = 256
_LOWEST = 1 / 64  # of the rate at which everything is held
_NUM_STOPS = 9


class LinkLoads:
    """Plans numbered from 0 (all held that can be moved) on, the last being `regions` as they are. As a `HullPath`."""

    def __init__(self, graph: StepGraph, regions: Regions, pricing: Pricing) -> None:
        self._graph, self._regions = graph, regions
        places, outermost = Placement(graph), graph.outermost(regions)
        has_inner = {outermost[call] for call in regions if outermost[call] != call}
        self._loads = {
            call: _RegionLoad(graph, call, regions[call], pricing, places)
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


class _RegionLoad:
    """What one region could retain besides what it does, the best first."""

    def __init__(self, graph: StepGraph, call: int, kept: tuple[int, ...], pricing: Pricing, places: Placement) -> None:
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
