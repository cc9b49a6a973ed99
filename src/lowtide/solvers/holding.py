"""What a step holds at one moment, whatever the plan: surely, and on whose account the rest.

The moment is that at which op `at` of the plain step runs. Every plan holds then what the plain step holds, but for
values that only saves keep alive; a plan holds such a value too, unless the save lies in a replayed region that makes
it anew. What may be gone in some plan is not counted here: a save that is never read is never brought back, and what
was brought back goes once its reader is done with it. Nor is anything that a replay before the moment has let go of.
"""

from __future__ import annotations

from lowtide.graph import Save, StepGraph
from lowtide.simulator import Timeline


class Holding:
    """Who pays for each value that is held while op `at` runs, so that none is paid for twice.

    - `homes`: for each value that saves hold and the backward has yet to read, the call of the last of them. It is held
      if that call is in no region, or in one that does not make the value anew.
    - `passed`: for each value that no save holds, and that a region would hold as its input, the innermost call that it
      goes to first.
    - `has_begun`: for each call, whether the backward has asked for one of its saves: as a region it may have been
      replayed by now, and its inputs let go.
    - `base_bytes`: what every plan holds besides.
    """

    def __init__(self, graph: StepGraph, plain: Timeline, at: int) -> None:
        self._graph = graph
        self._given = [frozenset(call.inputs) for call in graph.calls]
        in_use: set[int] = set()
        by_saves: set[int] = set()
        self.homes: dict[int, int] = {}
        for save in sorted(graph.saves, key=lambda save: save.made):
            value = graph.values[save.value]
            if not (save.made <= at < save.released and 0 <= value.born and value.dropped <= at):
                continue
            by_saves.add(save.value)
            if save.read < 0 or value.dropped < save.made or not self._comes_back(save):
                continue
            if at < save.read:
                if value.kind == "activation" and value.bytes:
                    self.homes[save.value] = save.call  # the last: a region around an earlier one does not free it
            elif at < (save.released if save.used < 0 else save.used):
                in_use.add(save.value)
        self.homes = {value: home for value, home in self.homes.items() if value not in in_use}
        loose_bytes = sum(graph.values[value].bytes for value in by_saves - in_use)
        self.base_bytes = int(plain.total_bytes[at]) - loose_bytes
        self.in_use = in_use
        self.has_begun = self._begun(at)
        self.passed = self._passed(at)

    def _comes_back(self, save: Save) -> bool:
        """Whether regions around a save have its value in their replays: it is made there, or they were given it."""
        call, born = save.call, self._graph.values[save.value].born
        while call >= 0 and born < self._graph.calls[call].first:
            if save.value not in self._given[call]:
                return False
            call = self._graph.calls[call].parent
        return True

    def takers(self, value: int, payer: int) -> list[int]:
        """The calls from `payer` outwards that would hold a value as their input, if they were regions."""
        found, born = [], self._graph.values[value].born
        while payer >= 0 and born < self._graph.calls[payer].first:
            if value in self._given[payer]:
                found.append(payer)
            payer = self._graph.calls[payer].parent
        return found

    def _begun(self, at: int) -> list[bool]:
        begun = [False] * len(self._graph.calls)
        for save in self._graph.saves:
            call = save.call
            while 0 <= save.read <= at and call >= 0 and not begun[call]:
                begun[call] = True
                call = self._graph.calls[call].parent
        return begun

    def _passed(self, at: int) -> dict[int, int]:
        graph = self._graph
        saved = {save.value for save in graph.saves}
        passed: dict[int, int] = {}
        for index, call in enumerate(graph.calls):
            if call.first > at:
                continue
            for value in call.inputs:
                facts = graph.values[value]
                if facts.born < 0 or facts.kind != "activation" or facts.dropped > at or value in saved:
                    continue
                if value not in passed or self._is_inside(index, passed[value]):
                    passed[value] = index
        return passed

    def _is_inside(self, call: int, outer: int) -> bool:
        return call > outer and self._graph.calls[call].end <= self._graph.calls[outer].end
