"""Which values leave the device, so that copies run beside the compute and hardly anything waits.

A link carries so many bytes per second and no more, whenever they are asked for. So the values to move are picked
along the forward, as a link of a given share of the bandwidth would take them up without falling behind; early and late
layers give alike. A value must also have the time to go and come back before it is read.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from lowtide.codings import Form
from lowtide.graph import StepGraph
from lowtide.plans import Move
from lowtide.solvers.chain import Regions
from lowtide.solvers.places import Places, held_outputs
from lowtide.solvers.pressing import Codecs, Press

_SMALLEST = 1 << 16  # smaller copies cost more in launches than they free


class Mover:
    """Picks values of a graph to move, within `host` and `disk` bytes; those that a `press` writes smaller move so."""

    def __init__(self, graph: StepGraph, host: int, disk: int, press: Press | None = None) -> None:
        self._graph = graph
        self._press = press
        self._room = {"host": host, "disk": disk}
        self._speed = {"host": graph.hardware.link_bytes_per_s, "disk": graph.hardware.disk_bytes_per_s}
        self._clock = np.concatenate([[0.0], np.cumsum([op.seconds for op in graph.ops])])
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

    def moves(self, regions: Regions, share: float, codecs: Codecs = ()) -> tuple[Move, ...]:
        """Values that fit through `share` of the bandwidth, with these regions replayed, and those that are encoded."""
        forms = self._press.left_behind(codecs, regions) if self._press is not None else {}
        moved = self._moved(regions, share, forms) if share else {}
        ways = moved | {value: "device" for value in forms if value not in moved}
        codecs_of = {value: form.codec for value, form in forms.items()}
        found = {value: (to, codecs_of.get(value, "")) for value, to in ways.items()}
        return self._places.everywhere(found, regions) if found else ()

    def _moved(self, regions: Regions, share: float, forms: dict[int, Form]) -> dict[int, str]:
        """Which values go where."""
        graph, room = self._graph, dict(self._room)
        free = dict.fromkeys(room, 0.0)
        found: dict[int, str] = {}
        for saved_s, value, read in self._candidates(regions):
            size = forms[value].bytes if value in forms else graph.values[value].bytes
            for tier in ("host", "disk"):
                if size > room[tier] or not self._speed[tier]:
                    continue
                seconds = size / (self._speed[tier] * share)
                away_s = self._clock[read] - saved_s
                if free[tier] > saved_s or away_s < 3 * size / self._speed[tier]:
                    continue
                free[tier] = max(free[tier], saved_s) + seconds
                room[tier] -= size
                found[value] = tier
                break
        return found

    def _candidates(self, regions: Regions) -> list[tuple[float, int, int]]:
        """When each value that the forward leaves behind is first held, earliest first; and by which op it is read."""
        graph = self._graph
        spans = sorted(
            (graph.calls[call].first, graph.calls[call].end) for call in regions if not self._inner(call, regions)
        )
        starts = [first for first, _ in spans]
        kept = held_outputs(graph, regions)
        found: list[tuple[float, int, int]] = []
        for value, (call, _, can_move) in kept.items():
            facts = graph.values[value]
            if facts.bytes >= _SMALLEST and can_move and call in self._replays and self._places.can_move(value):
                read = min(self._replays[call], self._reads.get(value, self._replays[call]))
                found.append((float(self._clock[facts.born + 1]), value, read))
        for value, index in self._first_save.items():
            save, facts = graph.saves[index], graph.values[value]
            if facts.bytes < _SMALLEST or value not in self._reads or value in kept:
                continue
            place = bisect_right(starts, facts.born) - 1
            made_inside = place >= 0 and facts.born < spans[place][1]
            if made_inside and facts.dropped <= spans[place][1]:
                continue  # dropped and made again
            found.append((float(self._clock[save.made]), value, self._reads[value]))
        return sorted(found)

    def _inner(self, call: int, regions: Regions) -> bool:
        call = self._graph.calls[call].parent
        while call >= 0:
            if call in regions:
                return True
            call = self._graph.calls[call].parent
        return False
