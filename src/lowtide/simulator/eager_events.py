"""Simulation of an eager step op by op: replayed regions, offloaded values and codecs.

`simulate` uses this module for plans with moves, where copies decide when a value's bytes leave and return; plans
without moves take the faster `eager_intervals`. `EagerEvents` goes through the ops:

- A region drops its saves in the forward and holds its inputs until autograd has released the last of its saves. The
  first read of a dropped save replays the region up to the last one, and every replayed op allocates its outputs
  again. Regions inside it are replayed from its replay.
- A save of a retained output is not dropped: it holds the output like a save outside of regions, and the region holds
  the output too until its replay has ended.
- Offloaded values leave on one copy engine and return on another, in the order of the backward's reads. Retained
  outputs are back when the replay begins.
- A value with a codec is encoded when it is first saved, on the compute stream, and its saves hold the encoded bytes.
  Each read decodes it anew for as long as the reader needs it; a replay's decoded inputs live as long as the replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import StepLines, step_seconds
from lowtide.plans.step_plan import Plan
from lowtide.simulator.lifetimes import CopyEngines, Ledger, Lifetime, bytes_by_value
from lowtide.simulator.planned_regions import PlannedRegions


class EagerEvents:
    """Simulates one step under an eager plan, event by event.

    `save_owner[i]` is the region that drops save `i`, -1 for none; `retained` are the saves that are not dropped
    because their region retains the value. By region with saves: `stops`, `ends` and `last_reads` (`PlannedRegions`).
    `snapshots` are the bytes of values at each event in `recorded`: of all that live, or of the `most` largest.
    """

    def __init__(self, graph: StepGraph, plan: Plan, recorded: Container[int] = (), most: int | None = None) -> None:
        self.graph, self.plan = (graph := plan.segmented(graph)), plan
        self.regions = plan.calls(graph)
        self.owner, self.outermost = graph.innermost(self.regions), graph.outermost(self.regions)
        planned = PlannedRegions(graph, {call: region.keep_ops for call, region in self.regions.items()})
        calls = [*planned.calls.tolist(), -1]
        self.save_owner = [calls[rank] for rank in planned.owner.tolist()]
        self.retained = set(np.flatnonzero(planned.owner != planned.around).tolist())
        columns = (planned.calls, planned.stop, planned.ends, planned.last_read)
        rows = list(zip(*(column[planned.has_saves].tolist() for column in columns), strict=True))
        self.stops = {call: stop for call, stop, _, _ in rows}
        self.ends = {call: end for call, _, end, _ in rows}
        self.last_reads = {call: read for call, _, _, read in rows}
        self.kept_ops = {graph.calls[call].first + op for call in self.stops for op in self.regions[call].keep_ops}
        self.left: set[int] = set()
        self.forms = plan.forms(graph)
        self.moved_outputs = {c: values for c, values in plan.moved_outputs(graph).items() if c in self.stops}
        self.leaving = {value for values in self.moved_outputs.values() for value in values}
        self.handed_over: set[int] = set()  # those of `leaving` whose save has been made
        self.copies = CopyEngines(graph, plan.moves_by_value(graph), self.forms, plan.in_flight_bytes)
        self._index()
        self.ledger = Ledger()
        self.ledger.gradients += graph.arrays.static_gradient_bytes
        self.lives: dict[int, Lifetime] = {}
        self.scopes: dict[int, dict[int, Lifetime]] = {}  # by replayed region
        self.attached: dict[int, Lifetime] = {}  # by save
        self.released: set[int] = set()  # saves
        self.region_holds: dict[int, list[Lifetime]] = {}
        self.encoded: dict[int, Lifetime] = {}  # by value
        self.decoded: dict[int, Lifetime] = {}  # by save
        self.events: list[tuple[int, int, int, int, int, int]] = []
        self.starts: list[float] = []
        self.clock = self.replayed_s = self.coded_s = 0.0  # `clock` is the device's, never behind `host`, the host's
        self.host = self._due_s = 0.0
        self.row: list[list[float]] = []  # by event: host seconds, device seconds, whether the host waits
        self.engine = planned.engine
        self.snapshots: dict[int, dict[int, int]] = {}
        self._recorded, self._most = recorded, most

    def _index(self) -> None:
        graph = self.graph
        self.saves_at, self.reads_at = defaultdict(list), defaultdict(list)
        self.releases_at, self.entries_at = defaultdict(list), defaultdict(list)
        self.drops_at: defaultdict[int, list[int]] = defaultdict(list)
        self.replay_drops_at: defaultdict[int, list[int]] = defaultdict(list)
        self.uses_at: defaultdict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(graph.saves):
            self.saves_at[save.made].append(index)
            done = save.released if save.used < 0 else save.used
            is_retained = index in self.retained
            moves = self.copies.moves(save.value) and save.value not in self.forms
            moves = save.value in self.leaving if is_retained else moves
            if self.save_owner[index] >= 0 or moves:
                self.releases_at[done].append(index)  # of what came back
            else:
                self.releases_at[save.released].append(index)
                if save.value in self.forms and not is_retained:
                    self.uses_at[done].append(index)
            if save.read >= 0:
                self.reads_at[save.read].append(index)
        self.ends_at: defaultdict[int, list[int]] = defaultdict(list)
        for call in sorted(self.regions):
            if call in self.stops:  # a region without saves has nothing to replay
                self.entries_at[graph.calls[call].first].append(call)
                self.ends_at[self.ends[call]].append(call)
        end, made_index = len(graph.ops), graph.arrays.made_index.tolist()
        dropped_in_replay = graph.arrays.dropped_in_replay.tolist()
        for index, value in enumerate(graph.values):
            if value.born >= 0 and value.dropped < end:
                self.drops_at[value.dropped].append(index)
                self.replay_drops_at[dropped_in_replay[made_index[index]]].append(index)

    def _find(self, value: int, region: int) -> Lifetime | None:
        """The lifetime of a value that code in a region's replay (-1: the forward) uses; None if the value was freed.

        It can be freed if a region reads a value that is not among its inputs.
        """
        life = self.lives.get(value)
        while (region := self.owner[region]) >= 0:
            if value in self.scopes[region]:
                life = self.scopes[region][value]
                break
            region = self.graph.calls[region].parent
        return None if life is None or life.is_over else life

    # Playing.

    def play(self) -> None:
        graph = self.graph
        for op in range(graph.num_forward):
            self._settle(op, -1, self.lives)
            self._run(op, 0, self.lives)
        self._settle(graph.num_forward, -1, self.lives)
        fetches_at = self._fetches_at()
        for position in range(graph.num_forward, len(graph.ops)):
            if position == fetches_at:
                self._begin_fetching()
            self._backward_position(position)
            self._run(position, 2, self.lives)
        self._backward_position(len(graph.ops))
        self._emit(-1, 3, graph.optimizer_workspace_bytes)

    def _host_works(self, seconds: float) -> None:
        """Advance the host's time line. Later ops are issued no earlier than that."""
        if self.graph.has_host_line:
            self.host += seconds
            self._due_s += seconds
            self.clock = max(self.clock, self.host)

    def _wait_for(self, life: Lifetime) -> None:
        """Advance the device's time line to when a moved value is back on the device."""
        before, self.clock = self.clock, self.copies.read(life, self.clock)
        if self.clock > before:
            self._add_to_row(self.clock - before)

    def _add_to_row(self, device_s: float) -> None:
        self.row.append([self._due_s, device_s, 0.0])
        self._due_s = 0.0

    def _settle(self, position: int, region: int, scope: dict[int, Lifetime]) -> None:
        """Process saves, region entries and drops at a position of the forward (region -1) or of a region's replay."""
        first = self.graph.calls[region].first if region >= 0 else 0
        for index in self.saves_at.get(position, ()):
            save = self.graph.saves[index]
            if self.save_owner[index] != region or index in self.released:  # released, and never read
                continue
            if (life := self._find(save.value, region)) is not None:
                is_retained = index in self.retained
                self.attached[index] = self._retain(life) if is_retained else self._hold(life, position, region)
        for call in self.entries_at.get(position, ()):
            if self.owner[self.graph.calls[call].parent] == region and call not in self.left:
                lives = [self._find(value, region) for value in self.graph.calls[call].inputs]
                self.region_holds[call] = [self._hold(life, position, region) for life in lives if life is not None]
            if region < 0:
                self._host_works(self.engine.forward_s.get(call, 0.0))
        self.ledger.kept += self.graph.arrays.captured_bytes(self.entries_at.get(position, ()), region)
        for value in (self.drops_at if region < 0 else self.replay_drops_at).get(position, ()):
            if value in scope and self.graph.values[value].born >= first:  # a replay holds its decoded inputs itself
                self.ledger.drop(scope[value])

    def _hold(self, life: Lifetime, position: int, region: int) -> Lifetime:
        """Hold a value for the backward; outside of regions, a value with a codec is held encoded."""
        form = self.forms.get(life.value) if region < 0 else None
        if form is not None:
            if life.value not in self.encoded:
                self.encoded[life.value] = self.ledger.encode(life.value, form.bytes)
                self._code(position - 1, 4, form.encode_bytes, form.encode_s)
            life = self.encoded[life.value]
        self.ledger.hold(life)
        if form is not None and life.python:
            self.ledger.drop(life)
        if region < 0:
            self.copies.saved(life, self.clock)
        return life

    def _retain(self, life: Lifetime) -> Lifetime:
        """Hold a retained output for a save. If it is moved, the save and the region hold it off the device."""
        self.ledger.hold(life)
        if life.value in self.leaving:
            self.copies.saved(life, self.clock)
            if life.value not in self.handed_over:
                self.handed_over.add(life.value)
                self.copies.saved(life, self.clock)
        return life

    def _read(self, held: Lifetime, op: int, decoded: dict[int, Lifetime], key: int) -> None:
        """Wait until a held value is on the device. If it is encoded, decode it as a new lifetime, held by Python."""
        self._wait_for(held)
        form = self.forms.get(held.value)
        if form is not None and key not in decoded:
            decoded[key] = self.ledger.add(held.value, self.graph.values[held.value])
            self._code(min(op, len(self.graph.ops) - 1), 5, form.decode_bytes, form.decode_s)

    def _code(self, op: int, phase: int, workspace: int, seconds: float) -> None:
        self.copies.advance(self.clock)
        self._emit(op, phase, workspace)
        self.clock += seconds
        self.row[-1][1] += seconds
        self.coded_s += seconds

    def _fetches_at(self) -> int:
        """The position at which copies back begin: at the model's outputs, or at an earlier read of a moved value."""
        reads = [save.read for save in self.graph.saves if self.copies.moves(save.value) and save.read >= 0]
        return min([self.graph.reaches_model, *reads])

    def _begin_fetching(self) -> None:
        if self.plan.moves:
            saves = self.graph.saves
            reads = sorted((i for i, save in enumerate(saves) if save.read >= 0), key=lambda i: saves[i].read)
            order: list[int] = []
            for index in reads:
                if index in self.retained and saves[index].value not in self.leaving:
                    continue  # the region holds it on the device, even if another save of it was offloaded
                region = -1 if index in self.retained else self.outermost[saves[index].call]
                order += self._held_outputs(region)
                order += self.graph.calls[region].inputs if region >= 0 else [saves[index].value]
            self.copies.begin_fetching(order, self.clock)

    def _held_outputs(self, region: int) -> tuple[int, ...]:
        """Retained outputs of a region that are off the device, in the order of their copies back: the last first."""
        return self.moved_outputs.get(region, ())[::-1]

    def _backward_position(self, position: int) -> None:
        saves = self.graph.saves
        releases, uses = self.releases_at.get(position, ()), self.uses_at.get(position, ())
        for index in releases:
            if saves[index].read < position:
                self._release(index)
        for index in uses:
            if saves[index].read < position and index in self.decoded:
                self.ledger.unhold(self.decoded.pop(index))
        self._end_regions(position, is_read_here=False)
        if position > self.graph.num_forward:
            for value in self.drops_at.get(position, ()):
                if value in self.lives:
                    self.ledger.drop(self.lives[value])
        for index in self.reads_at.get(position, ()):
            region = self.save_owner[index]
            if region >= 0:
                self._ensure(region)
            elif index in self.retained:
                if saves[index].value in self.leaving:
                    self._wait_for(self.lives[saves[index].value])
            elif index in self.attached:
                self._read(self.attached[index], position, self.decoded, index)
                if index in self.decoded:
                    self.ledger.hold(self.decoded[index])
                    self.ledger.drop(self.decoded[index])
        for index in releases:
            if saves[index].read >= position:
                self._release(index)
        for index in uses:
            if saves[index].read >= position and index in self.decoded:
                self.ledger.unhold(self.decoded.pop(index))
        self._end_regions(position, is_read_here=True)

    def _end_regions(self, position: int, is_read_here: bool) -> None:
        """End the regions whose last save autograd releases here: their inputs are no longer held."""
        for region in self.ends_at.get(position, ()):
            if (self.last_reads[region] == position) == is_read_here:
                self._leave(region)

    def _release(self, index: int) -> None:
        self.released.add(index)
        life = self.attached.pop(index, None)
        if life is not None:
            if self.save_owner[index] < 0 and (index not in self.retained or life.value in self.leaving):
                self.copies.released(life)
            self.ledger.unhold(life)

    def _ensure(self, region: int) -> None:
        if region in self.scopes:
            return
        outer = self.owner[self.graph.calls[region].parent]
        if outer >= 0:
            self._ensure(outer)
        self._replay(region)

    def _replay(self, region: int) -> None:
        scope: dict[int, Lifetime] = {}
        self.scopes[region] = scope
        first, stop = self.graph.calls[region].first, self.stops[region]
        kept = set(self.regions[region].keep_ops)
        if self.owner[self.graph.calls[region].parent] < 0:
            for value in self._held_outputs(region):
                self._wait_for(self.lives[value])
            for held in self.region_holds.get(region, ()):
                self._read(held, first, scope, held.value)
        self.ledger.kept += int(self.graph.arrays.replay_bytes[region])
        self._host_works(self.engine.replay_s.get(region, 0.0))
        for op in range(first, stop):
            self._settle(op, region, scope)
            if op - first not in kept:  # a retained output of the forward is used instead
                self._run(op, 1, scope)
        self._settle(stop, region, scope)
        entered = [call for at in range(first, stop + 1) for call in self.entries_at.get(at, ())]
        self.ledger.kept -= self.graph.arrays.captured_bytes(entered, region)
        self.ledger.kept -= int(self.graph.arrays.replay_bytes[region])
        for life in scope.values():
            self.ledger.drop(life)
        self._forget_kept(region)

    def _leave(self, region: int) -> None:
        """Release what was held for a region's replay."""
        self.left.add(region)
        call = self.graph.calls[region]
        self.ledger.kept -= int(self.graph.arrays.frame_bytes[region])
        if region not in self.scopes:  # none of its saves was read, so it was not replayed
            self._forget_kept(region)
        for life in self.region_holds.pop(region, ()):
            if self.owner[call.parent] < 0:
                self.copies.released(life)
            self.ledger.unhold(life)

    def _forget_kept(self, region: int) -> None:
        for op in set(self.regions[region].keep_ops):
            for value in self.graph.ops[self.graph.calls[region].first + op].outputs:
                if value in self.leaving:
                    self.copies.released(self.lives[value])
                self.ledger.unhold(self.lives[value])

    def _run(self, index: int, phase: int, scope: dict[int, Lifetime]) -> None:
        """Run an op, which is one event."""
        op = self.graph.ops[index]
        for value in op.outputs:
            scope[value] = self.ledger.add(value, self.graph.values[value])
            if phase == 0 and index in self.kept_ops:
                self.ledger.hold(scope[value])
        self._host_works(op.host_s + self.copies.take_num_calls() * self.graph.hardware.move_s / 2)
        self.copies.advance(self.clock)
        self._emit(index, phase, op.workspace_bytes)
        self.clock += op.seconds
        self.row[-1][1] += op.seconds
        if "sync" in op.flags:
            self.host, self.row[-1][2] = self.clock, 1.0
        if phase == 1:
            self.replayed_s += op.seconds

    def _emit(self, op: int, phase: int, workspace: int) -> None:
        ledger, copies = self.ledger, self.copies
        kept, transient = ledger.kept - copies.bytes_away, ledger.transient + workspace
        self.events.append((op, phase, kept, transient, ledger.gradients, copies.bytes_in_flight))
        self.starts.append(self.clock)
        self._add_to_row(0.0)
        event = len(self.events) - 1
        if event in self._recorded:
            lives = [(life.value, life.bytes) for life in self.ledger.alive() if not self.copies.is_away(life)]
            self.snapshots[event] = bytes_by_value(lives, self._most)

    def columns(self) -> dict[str, Any]:
        """Return the fields of a `Timeline`."""
        table = np.array(self.events, dtype=np.int64).reshape(-1, 6)
        static = np.full((len(table), 1), self.graph.arrays.static_bytes, dtype=np.int64)
        copies = self.copies
        engine_s = self.engine.total_s + copies.num_calls * self.graph.hardware.move_s / 2
        host_s, device_s, waits = np.array(self.row).reshape(-1, 3).T
        busy_s = float(device_s.sum()) - copies.stalled_s
        lines = StepLines(float(host_s.sum()), busy_s, step_seconds(host_s, device_s, waits > 0))
        if not self.graph.has_host_line:
            lines = StepLines(0.0, self.clock + engine_s, self.clock + engine_s)
        return {
            "live_bytes": np.hstack([static, table[:, 2:]]),
            "ops": table[:, 0],
            "phases": table[:, 1],
            "starts_s": np.array(self.starts),
            "replayed_s": self.replayed_s,
            "stalled_s": self.copies.stalled_s,
            "engine_s": engine_s,
            "lines": lines,
            "host_bytes": self.copies.most_host_bytes,
            "copies": tuple(self.copies.log),
            "coded_s": self.coded_s,
        }
