"""Which values leave the device, so that copies run beside the compute and hardly anything waits.

A link carries so many bytes per second and no more, whenever they are asked for. So the values to move are picked
along the forward, as a link of a given share of the bandwidth would take them up without falling behind by much; early
and late layers give alike. A value must also have the time to go and come back before it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.solvers.chain import Regions
from lowtide.solvers.places import Places, held_outputs
from lowtide.solvers.pressing import Codecs, Press
from lowtide.solvers.references import recomputes

_LAG = 1 / 16  # of the forward: how far the link may be behind, as values come in bursts


class Mover:
    """Picks values of a graph to move, within `host` and `disk` bytes; those that a `press` writes smaller move so."""

    def __init__(self, graph: StepGraph, host: int, disk: int, press: Press | None = None) -> None:
        self._graph = graph
        self._press = press
        self._room = {"host": host, "disk": disk}
        self._speed = {"host": graph.hardware.link_bytes_per_s, "disk": graph.hardware.disk_bytes_per_s}
        self._clock = graph.arrays.clock
        self._lag_s = float(self._clock[graph.num_forward]) * _LAG
        self._first_save: dict[int, int] = {}
        self._places = Places(graph)
        for index in sorted(range(len(graph.saves)), key=lambda index: graph.saves[index].made):
            if self._places.can_move(graph.saves[index].value):
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

    def on(self, graph: StepGraph) -> Mover:
        """The same for the step's graph with segments."""
        press = self._press.on(graph) if self._press is not None else None
        return Mover(graph, self._room["host"], self._room["disk"], press)

    def plan(self, regions: Regions, share: float, codecs: Codecs = ()) -> Plan:
        """These regions replayed, values moved that fit through `share` of the bandwidth, and those encoded."""
        forms = self._press.left_behind(codecs, regions) if self._press is not None else {}
        sizes = {value: form.bytes for value, form in forms.items()}
        moved, waiting_bytes = self._moved(regions, share, sizes) if share else ({}, 0)
        ways = moved | {value: "device" for value in forms if value not in moved}
        codecs_of = {value: form.codec for value, form in forms.items()}
        found = {value: (to, codecs_of.get(value, "")) for value, to in ways.items()}
        moves = self._places.everywhere(found, regions) if found else ()
        moved_sizes = {value: sizes.get(value, self._graph.values[value].bytes) for value in moved}
        in_flight_bytes = max(waiting_bytes, self._at_once_bytes(regions, moved_sizes))
        return Plan(recomputes(self._graph, regions), moves, in_flight_bytes)

    def _at_once_bytes(self, regions: Regions, sizes: Mapping[int, int]) -> int:
        """How much of these moved values has to come back at once: all that one replay begins with, and any two."""
        values = {call: set(self._graph.calls[call].inputs) for call in regions}
        for value, (call, _, _) in held_outputs(self._graph, regions).items():
            values[call].add(value)
        sums = [sum(sizes.get(value, 0) for value in each) for each in values.values()]
        return max([2 * max(sizes.values(), default=0), *sums])

    def _moved(self, regions: Regions, share: float, sizes: Mapping[int, int]) -> tuple[dict[int, str], int]:
        """Which values go where, and the most bytes that wait for the link. `sizes` are those of encoded values."""
        room, clock = dict(self._room), self._clock
        free = dict.fromkeys(room, 0.0)
        found: dict[int, str] = {}
        waiting_bytes = 0.0
        for held, value, read in self._candidates(regions):
            size = sizes.get(value, self._graph.values[value].bytes)
            for tier in ("host", "disk"):
                if size > room[tier] or not self._speed[tier]:
                    continue
                start_s = max(free[tier], clock[held])
                if start_s > clock[held] + self._lag_s or clock[read] - start_s < 3 * size / self._speed[tier]:
                    continue
                waiting_bytes = max(waiting_bytes, (start_s - clock[held]) * self._speed[tier] + size)
                free[tier] = start_s + size / (self._speed[tier] * share)
                room[tier] -= size
                found[value] = tier
                break
        return found, int(waiting_bytes)

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
        outputs = held_outputs(graph, regions)
        held += [
            (value, call, graph.values[value].born + 1) for value, (call, _, can_move) in outputs.items() if can_move
        ]
        for value, call, since in held:
            if call in self._replays and (value in found or self._places.can_move(value)):
                before = found.get(value, (since, self._replays[call]))
                found[value] = min(since, before[0]), min(self._replays[call], before[1])
        stuck = {value for value, (_, _, can_move) in outputs.items() if not can_move}
        return sorted(
            (since, value, read)
            for value, (since, read) in found.items()
            if value not in stuck and graph.values[value].bytes >= self._places.smallest_moved
        )
