"""An independent simulation: `replay(graph, plan)` plays the step op by op and checks its totals after every event.

Written from the rules, not from `lowtide.simulator`, and for plainness rather than speed: every tensor that ever exists
is an **incarnation** (a value, and the region whose replay made it), every reason to keep one is a named **holder**,
and live bytes are added up anew at each event. An incarnation without holders is gone, for good.

A value with a codec has an incarnation that is its encoded form, and one more for each reader that it is decoded for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from lowtide.graph import Save, StepGraph
from lowtide.graph.codec_costs import EncodedForm, encoded_form
from lowtide.plans import Plan
from lowtide.solvers.eager_search import EagerSearch, TwoLineSearch

FORWARD = -1  # where incarnations are made that no replay made, the backward's own among them
ENCODED = -2  # where those are that a codec made
DECODED = -3  # less the number of a save: where those are that were decoded for it
PYTHON = ("python", -1)

Incarnation = tuple[int, int]
Holder = tuple[str, int]


@dataclass(frozen=True)
class Verdict:
    """What a plan costs: `events` are the live bytes while each op runs, replayed ones too, and the optimizer last.

    With two time lines `step_s` is the step and `busy_s` what host and device work; then `extra_s` says nothing.
    """

    peak_bytes: int
    extra_s: float
    host_bytes: int
    events: list[int]
    engine_s: float  # not an event of the step, and not in `extra_s`
    row: list[tuple[float, float, bool]]  # of each op: seconds of host and device, and whether the host waits for it
    busy_s: tuple[float, float]

    @cached_property
    def step_s(self) -> float:
        return _again_and_again(self.row)


def replay(graph: StepGraph, plan: Plan) -> Verdict:
    """Play `plan` on `graph`. Raises `AssertionError` where bytes or holds contradict each other."""
    graph = plan.segmented(graph)
    step = _Step(graph, plan)
    for position in range(graph.num_forward):
        step.pass_forward_position(position)
        step.run(position, home=FORWARD)
    step.pass_forward_position(graph.num_forward)
    for position in range(graph.num_forward, len(graph.ops) + 1):
        step.pass_backward_position(position)
        if position < len(graph.ops):
            step.run(position, home=FORWARD)
    step.finish()
    engine_s = step.regions.engine_s() + step.link.num_calls * graph.hardware.move_s / 2
    busy_s = (step.host_busy_s, step.device_busy_s)
    return Verdict(max(step.events), step.extra_s, step.link.most_host_bytes, step.events, engine_s, step.row, busy_s)


def added_s(graph: StepGraph, plan: Plan) -> float:
    """Seconds that `plan` adds to the plain step."""
    verdict = replay(graph, plan)
    if graph.has_host_line:
        return verdict.step_s - replay(graph, Plan()).step_s
    return verdict.extra_s + verdict.engine_s


def assert_plan_refereed(graph: StepGraph, plan: Plan) -> None:
    """The plan's own numbers are those of the referee, and within its budget."""
    verdict = replay(graph, plan)
    assert verdict.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert math.isclose(added_s(graph, plan), plan.extra_s, abs_tol=1e-9)
    assert verdict.host_bytes == plan.host_bytes


def budgets_of(search: EagerSearch | TwoLineSearch, count: int) -> list[int]:
    """Evenly from the floor to the plain peak."""
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    return [floor + (plain - floor) * step // (count - 1) for step in range(count)]


def _again_and_again(row: list[tuple[float, float, bool]]) -> float:
    """Seconds of a step whose ops take host and device so long, after many of them: until both lines are in step."""
    host_s = device_s = 0.0
    ends: list[float] = []
    for _ in range(400):
        for issue_s, run_s, waits in row:
            host_s += issue_s
            device_s = max(device_s, host_s) + run_s
            host_s = max(host_s, device_s) if waits else host_s
        ends.append(max(host_s, device_s))
    return (ends[-1] - ends[199]) / 200


def _at_outputs(graph: StepGraph, moved: Collection[int]) -> int:
    """Where the backward comes to the outputs of the model: to an op of its own, or to the read of a moved value."""
    in_model = {op for call in graph.calls if call.path == "" for op in range(call.first, call.end)}
    found = [at for at in range(graph.num_forward, len(graph.ops)) if graph.ops[at].forward_op in in_model]
    if not found:
        return graph.num_forward
    return min(found[0], *(save.read for save in graph.saves if save.value in moved and save.read >= 0), len(graph.ops))


class _Regions:
    """Which calls are replayed, what each saves itself, and how they nest."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        planned = plan.calls(graph)
        self._of: dict[int, int | None] = {}  # what was found once
        self._own_saves: dict[int | None, list[int]] = {}
        self.planned = sorted(planned)  # also those that save nothing: they run as regions, and are never replayed
        all_saves = {call: [i for i, s in enumerate(graph.saves) if call in self._up(s.call)] for call in planned}
        self.kept_ops = {
            call: {graph.calls[call].first + op for op in region.keep_ops}
            for call, region in planned.items()
            if all_saves[call]
        }
        self.all_saves = {call: all_saves[call] for call in self.kept_ops}
        moved = {(move.path, move.nth, move.op) for move in plan.moves if move.op is not None}
        held = [(call, op) for call, region in planned.items() for op in region.keep_ops]
        self.away_ops = {(call, op) for call, op in held if (planned[call].path, planned[call].nth, op) in moved}
        for call, kept in self.kept_ops.items():
            assert not kept or self.around(call) is None, "ops kept in a nested region"

    def _up(self, call: int) -> list[int]:
        """`call` and the calls around it, from the inside out."""
        found = []
        while call >= 0:
            found.append(call)
            call = self.graph.calls[call].parent
        return found

    def of(self, call: int) -> int | None:
        """The innermost region in which `call` runs."""
        if call not in self._of:
            self._of[call] = self._innermost(call)
        return self._of[call]

    def _innermost(self, call: int) -> int | None:
        return next((outer for outer in self._up(call) if outer in self.kept_ops), None)

    def around(self, region: int) -> int | None:
        return self.of(self.graph.calls[region].parent)

    def outermost(self, region: int) -> int:
        outer = self.around(region)
        return region if outer is None else self.outermost(outer)

    def is_retained(self, save: Save) -> bool:
        """Whether a save carries an output that its region retains, and so is not dropped."""
        region = self.of(save.call)
        return region is not None and self.graph.values[save.value].born in self.kept_ops[region]

    def drops(self, save: Save) -> int | None:
        """The region that drops a save and brings it back, None for none."""
        return None if self.is_retained(save) else self.of(save.call)

    def own_saves(self, region: int | None) -> list[int]:
        """Saves that `region` brings back; None: those that are not dropped."""
        if not self._own_saves:
            for index, save in enumerate(self.graph.saves):
                self._own_saves.setdefault(self.drops(save), []).append(index)
        return self._own_saves.get(region, [])

    def inside(self, region: int | None) -> list[int]:
        """Regions directly in `region`."""
        return [inner for inner in sorted(self.kept_ops) if self.around(inner) == region]

    def inputs(self, region: int) -> list[int]:
        return [v for v in dict.fromkeys(self.graph.calls[region].inputs) if self.graph.values[v].born >= 0]

    def away(self, region: int) -> list[int]:
        """First outputs of ops that `region` holds elsewhere than on the device, the last first."""
        ops = sorted((op for call, op in self.away_ops if call == region), reverse=True)
        return [self.graph.ops[self.graph.calls[region].first + op].outputs[0] for op in ops]

    def is_away(self, value: int) -> bool:
        """Whether a region retains `value` elsewhere than on the device."""
        return any(value in self.away(region) for region in self.inside(None))

    def captured_bytes(self, region: int) -> int:
        """Random states, and copies of the buffers of the region's module, of those read in it and those written."""
        path, ops = self.graph.calls[region].path, range(self.graph.calls[region].first, self.graph.calls[region].end)
        if self.graph.calls[region].kind == "Segment":
            return sum(self.captured_bytes(member) for member in self._members(region))
        total = 0
        for index, value in enumerate(self.graph.values):
            if value.kind == "buffer":
                is_own = path == "" or value.name.startswith(path + ".")
                is_read = is_own or any(index in self.graph.ops[op].inputs for op in ops)
                if (is_read and value.bytes <= 1 << 18) or any(index in self.graph.ops[op].mutates for op in ops):
                    total += value.bytes
        return total

    def put_back_bytes(self, region: int) -> int:
        """The present values of the buffers that a replay writes."""
        if self.graph.calls[region].kind == "Segment":
            return max(self.put_back_bytes(member) for member in self._members(region))  # one after the other
        ops = self.graph.ops[self.graph.calls[region].first : self.graph.calls[region].end]
        written = {value for op in ops for value in op.mutates if self.graph.values[value].kind == "buffer"}
        return sum(self.graph.values[value].bytes for value in written)

    def _members(self, region: int) -> list[int]:
        """The calls of a segment, or the call itself."""
        if self.graph.calls[region].kind != "Segment":
            return [region]
        inside = [index for index, call in enumerate(self.graph.calls) if call.parent == region]
        return [member for index in inside for member in self._members(index)]

    def all_inside(self, region: int) -> list[int]:
        """Regions in `region`, directly or in others."""
        return [inner for inner in self.kept_ops if inner != region and region in self._up(inner)]

    def stop(self, region: int) -> int:
        """The position at which everything has been made that a replay is for."""
        saves = [self.graph.saves[index] for index in self.own_saves(region)]
        own = [save.made for save in saves if save.read >= 0 or save.released > self.graph.num_forward]
        entries = [self.graph.calls[inner].first for inner in self.inside(region)]
        return max([self.graph.calls[region].first, *own, *entries])

    def engine_s(self) -> float:
        """What the host does for regions: for each that has saves, and for each op of a replay with retained outputs.

        Those ops that are not computed cost something too.
        """
        return sum(
            self.entering_s(call) + self.retaining_s(call) + self.entering_again_s(call) for call in self.kept_ops
        )

    def entering_s(self, call: int) -> float:
        """For a region itself, its forward and its replay, and for what is saved in it and in no region inside."""
        hardware = self.graph.hardware
        own = [save for save in self.graph.saves if self.of(save.call) == call]
        return hardware.region_s * len(self._members(call)) + hardware.save_s * len(own)

    def entering_again_s(self, region: int) -> float:
        """For the forwards of regions inside, which its replay runs up to where it ends."""
        stop = self.stop(region) if self.is_replayed(region) else 0
        return sum(
            self.entering_s(inner) / 2 for inner in self.all_inside(region) if self.graph.calls[inner].first < stop
        )

    def retaining_s(self, call: int) -> float:
        hardware, kept = self.graph.hardware, self.kept_ops[call]
        if not kept:
            return 0.0
        ops = range(self.graph.calls[call].first, self.stop(call))
        computing_s = [op.host_s if self.graph.has_host_line else op.seconds for op in self.graph.ops]
        return hardware.dispatch_s * len(ops) + sum(min(hardware.spare_s, computing_s[op]) for op in ops if op in kept)

    def is_replayed(self, region: int) -> bool:
        """Whether the backward reads anything that the region, or one inside it, dropped."""
        own = any(self.graph.saves[index].read >= 0 for index in self.own_saves(region))
        return own or any(self.is_replayed(inner) for inner in self.inside(region))


def _needs(graph: StepGraph, regions: _Regions) -> list[int]:
    """Values that the forward made, in the order in which the backward first needs them."""
    order: list[int] = []
    for position in range(graph.num_forward, len(graph.ops) + 1):
        for save in graph.saves:
            if save.read == position:
                region = regions.drops(save)
                if regions.is_retained(save):
                    order += [save.value] if regions.is_away(save.value) else []
                elif region is None:
                    order.append(save.value)
                else:
                    order += regions.away(regions.outermost(region))
                    order += regions.inputs(regions.outermost(region))
    return list(dict.fromkeys(order))


class _Link:
    """The two copy engines, and where each moved value is: on the device until it is `away`, and again once `read`."""

    def __init__(self, graph: StepGraph, plan: Plan, forms: dict[int, EncodedForm]) -> None:
        self.sizes = [v.bytes if i not in forms else forms[i].bytes for i, v in enumerate(graph.values)]
        self.bytes_per_s = graph.hardware.link_bytes_per_s
        self.moved = {value for value, move in plan.moves_by_value(graph).items() if move.to in ("host", "disk")}
        largest = max((self.sizes[v] for v in self.moved), default=0)
        self.most_in_flight = plan.in_flight_bytes or 2 * largest
        self.out_free_s = self.in_free_s = 0.0
        self.left_s: dict[int, float] = {}  # when the copy out of each value is done
        self.back_s: dict[int, float] = {}  # when the copy back of each value is done
        self.away: set[int] = set()
        self.in_flight: set[int] = set()
        self.read: set[int] = set()
        self.waiting: list[int] = []
        self.on_host: set[int] = set()
        self.most_host_bytes = 0
        self.num_calls = 0  # of the host: one to send each value off, one to have it back

    def save(self, value: int, clock_s: float) -> None:
        """Start to copy `value` out, the first time that it is held for the backward."""
        if value in self.moved and value not in self.left_s:
            self.out_free_s = max(self.out_free_s, clock_s) + self._copy_s(value)
            self.left_s[value] = self.out_free_s
            self.num_calls += 1
            self.on_host.add(value)
            self.most_host_bytes = max(self.most_host_bytes, self.host_bytes())

    def host_bytes(self) -> int:
        return sum(self.sizes[v] for v in self.on_host)

    def let_leave(self, value: int, clock_s: float) -> None:
        if value in self.left_s and value not in self.read and self.left_s[value] <= clock_s:
            self.away.add(value)

    def start_backward(self, needs: list[int]) -> None:
        self.waiting = [value for value in needs if value in self.left_s]

    def issue(self, clock_s: float) -> None:
        """Start to copy back what comes next, while there is room for it."""
        while self.waiting:
            value = self.waiting[0]
            in_flight = sum(self.sizes[v] for v in self.in_flight)
            if self.in_flight and in_flight + self.sizes[value] > self.most_in_flight:
                return
            self.waiting.pop(0)
            self.in_flight.add(value)
            self.in_free_s = max(self.in_free_s, clock_s, self.left_s[value]) + self._copy_s(value)
            self.back_s[value] = self.in_free_s

    def wait_for(self, value: int, clock_s: float) -> float:
        """When `value` is on the device; from now on it is."""
        if value not in self.left_s or value in self.read:
            return clock_s
        assert value in self.in_flight, f"value {value} is needed and nobody fetches it"
        self.num_calls += 1
        there_s = max(clock_s, self.back_s[value]) if value in self.away else clock_s
        self.away.discard(value)
        self.in_flight.remove(value)
        self.read.add(value)
        return there_s

    def is_counted(self, value: int) -> bool:
        return value not in self.away or value in self.in_flight

    def _copy_s(self, value: int) -> float:
        assert self.bytes_per_s > 0, "a move without a link"
        return self.sizes[value] / self.bytes_per_s


class _Step:
    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.regions = _Regions(graph, plan)
        self.forms: dict[int, EncodedForm] = {}
        for value, move in plan.moves_by_value(graph).items():
            form = encoded_form(graph.values[value], move.codec, graph.hardware)
            if form is not None and graph.values[value].kind == "activation":
                self.forms[value] = form
        self.link = _Link(graph, plan, self.forms)
        # Those that are content with a value on the host: saves outside of regions, inputs of regions in no region.
        self.any_movers = {
            ("save", index) for index, save in enumerate(graph.saves) if self.regions.of(save.call) is None
        }
        self.lost = {save.value for save in graph.saves if save.read < 0 and save.released <= graph.num_forward}
        self.retained = {index for index, save in enumerate(graph.saves) if self.regions.is_retained(save)}
        self.any_movers |= {("input", region) for region in self.regions.inside(None)}
        self.holders: dict[Incarnation, set[Holder]] = {}
        self.freed: set[Incarnation] = set()
        self.entered: set[int] = set()
        self.capturing: dict[Holder, int] = {}  # bytes of captured state: of regions, and of regions in replays
        self.replayed: set[int] = set()
        self.ended: set[int] = set()
        self.released: set[int] = set()
        self.events: list[int] = []
        self.clock_s = self.extra_s = 0.0  # the clock is the device's
        self.host_clock_s = self.host_busy_s = self.device_busy_s = 0.0
        self.num_paid_calls = 0
        self.row: list[tuple[float, float, bool]] = []  # host and device seconds of each thing that is done
        self.fetches_at = _at_outputs(graph, self.link.moved)
        static = sum(self.bytes_of(v) for v, value in enumerate(graph.values) if value.born < 0)
        self.base_bytes = static + graph.optimizer_state_bytes + graph.other_bytes

    # Who holds what

    def bytes_of(self, value: int) -> int:
        return 0 if self.graph.values[value].kind == "elsewhere" else self.graph.values[value].bytes

    def is_static(self, value: int) -> bool:
        return self.graph.values[value].born < 0

    def allocate(self, incarnation: Incarnation) -> None:
        assert incarnation not in self.holders and incarnation not in self.freed, f"{incarnation} is made twice"
        self.holders[incarnation] = {PYTHON}

    def hold(self, incarnation: Incarnation, holder: Holder) -> None:
        if not self.is_static(incarnation[0]):
            assert incarnation in self.holders, f"{holder} wants {incarnation}, which is gone"
            assert holder not in self.holders[incarnation], f"{holder} holds {incarnation} already"
            self.holders[incarnation].add(holder)

    def let_go(self, holder: Holder, *, of: Incarnation | None = None) -> None:
        """`holder` lets go of everything it holds, or of one incarnation."""
        for incarnation in list(self.holders) if of is None else [of]:
            if holder in self.holders.get(incarnation, ()):
                self.holders[incarnation].remove(holder)
                if not self.holders[incarnation]:
                    del self.holders[incarnation]
                    assert incarnation not in self.freed, f"{incarnation} is freed twice"
                    self.freed.add(incarnation)
        for value in list(self.link.on_host):
            if not self.movers(value) & self.holders.get(self.saved_as(value), set()):
                self.link.on_host.remove(value)

    def visible(self, value: int, region: int | None) -> Incarnation:
        """What `value` is to code that runs in the replay of `region`."""
        while region is not None:
            if (value, region) in self.holders or (value, region) in self.freed:
                return value, region
            region = self.regions.around(region)
        return value, FORWARD

    def saved_as(self, value: int) -> Incarnation:
        """What is held of `value` outside of regions."""
        return value, ENCODED if value in self.forms else FORWARD

    def movers(self, value: int) -> set[Holder]:
        """Who is content with `value` on the host: also regions that retain it there, and their saves of it."""
        if not self.regions.is_away(value):
            return self.any_movers
        saves = {("save", index) for index in self.retained if self.graph.saves[index].value == value}
        return self.any_movers | saves | {("keep", r) for r in self.regions.inside(None)}

    def save(self, value: int, region: int | None, holder: Holder) -> None:
        """Hold `value` for the backward; outside of regions it may be encoded, and may move."""
        if region is not None or self.is_static(value):
            self.hold(self.visible(value, region), holder)
            return
        if value in self.forms and (value, ENCODED) not in self.holders:
            assert (value, FORWARD) in self.holders, f"value {value} is encoded when it is gone"
            self.allocate((value, ENCODED))
            self.work(self.forms[value].encode_bytes, self.forms[value].encode_s)
            self.hold((value, ENCODED), holder)
            self.let_go(PYTHON, of=(value, ENCODED))
        else:
            self.hold(self.saved_as(value), holder)
        self.link.save(value, self.clock_s)

    def decode(self, value: int, home: int) -> None:
        """An incarnation of an encoded value, as it was; Python's until someone else holds it."""
        assert (value, ENCODED) in self.holders and value not in self.link.away, f"nothing to decode value {value} from"
        self.allocate((value, home))
        self.work(self.forms[value].decode_bytes, self.forms[value].decode_s)

    def work(self, workspace_bytes: int, seconds: float) -> None:
        """A codec runs: an event."""
        self.let_leave()
        self.record(workspace_bytes)
        self.clock_s += seconds
        self.device_busy_s += seconds
        self.row.append((0.0, seconds, False))
        self.extra_s += seconds

    def issue(self, seconds: float) -> None:
        """The host does something; whatever the device is given next, it is not given before that is done."""
        if self.graph.has_host_line:
            self.host_clock_s += seconds
            self.host_busy_s += seconds
            self.row.append((seconds, 0.0, False))
            self.clock_s = max(self.clock_s, self.host_clock_s)

    # What happens at a position

    def make_saves(self, region: int | None, position: int) -> None:
        for index in self.regions.own_saves(region):
            save = self.graph.saves[index]
            if save.made == position and index not in self.released:
                if index in self.retained:
                    self.hold((save.value, FORWARD), ("save", index))
                    if self.regions.is_away(save.value):
                        self.link.save(save.value, self.clock_s)
                else:
                    self.save(save.value, region, ("save", index))

    def enter_regions(self, region: int | None, position: int) -> None:
        """Hold the inputs of the regions directly in `region` that begin here."""
        for inner in self.regions.inside(region):
            if self.graph.calls[inner].first == position and inner not in self.ended:
                self.entered.add(inner)
                for value in self.regions.inputs(inner):
                    self.save(value, region, ("input", inner))

    def drop(self, position: int, home: int) -> None:
        for incarnation in list(self.holders):
            value, made_in = incarnation
            if home != FORWARD and self.graph.values[value].born < self.graph.calls[home].first:
                continue  # an input that was decoded for this replay, which holds it to its end
            if home != FORWARD and value in self.lost:
                continue  # the replay's own autograd graph holds it to its end
            if made_in == home and position == self.graph.values[value].dropped < len(self.graph.ops):
                self.let_go(PYTHON, of=incarnation)

    def pass_forward_position(self, position: int) -> None:
        self.make_saves(None, position)
        self.enter_regions(None, position)
        for region in self.regions.all_saves:
            if self.graph.calls[region].first == position:
                self.capturing["forward", region] = self.regions.captured_bytes(region)
                self.issue(self.regions.entering_s(region) / 2)
                if not self.regions.is_replayed(region):
                    self.issue(self.regions.entering_s(region) / 2 + self.regions.retaining_s(region))
        self.drop(position, FORWARD)

    def pass_backward_position(self, position: int) -> None:
        self.release(position, just_read=False)
        self.end_regions(position, just_read=False)
        self.drop(position, FORWARD)
        if position == self.fetches_at:
            self.link.start_backward(_needs(self.graph, self.regions))
            self.link.issue(self.clock_s)
        for index, save in enumerate(self.graph.saves):
            if save.read == position:
                self.read(index, save)
        self.release(position, just_read=True)
        self.end_regions(position, just_read=True)

    def end_regions(self, position: int, *, just_read: bool) -> None:
        """Autograd has let go of a region's last save: its inputs are held for no other replay."""
        for region, indices in self.regions.all_saves.items():
            saves = [self.graph.saves[index] for index in indices]
            if saves and max(save.released for save in saves) == position:
                if (max(save.read for save in saves) == position) == just_read:
                    self.ended.add(region)
                    del self.capturing["forward", region]
                    self.let_go(("input", region))
                    self.let_go(("keep", region))

    def release(self, position: int, *, just_read: bool) -> None:
        for index, save in enumerate(self.graph.saves):
            if self.used_up(save) == position and (save.read == position) == just_read:
                self.let_go(("decoded", index))
            if self.end_of(save) == position and (save.read == position) == just_read:
                assert index not in self.released, f"save {index} is released twice"
                self.released.add(index)
                self.let_go(("save", index))

    def end_of(self, save: Save) -> int:
        """When a save is let go: what a replay or a copy brings back goes as soon as its reader is done with it."""
        moves_as_it_is = save.value in self.link.moved and save.value not in self.forms
        if self.regions.is_retained(save):
            moves_as_it_is = self.regions.is_away(save.value)
        comes_back = self.regions.drops(save) is not None or moves_as_it_is
        return self.used_up(save) if comes_back else save.released

    def used_up(self, save: Save) -> int:
        return save.used if save.used >= 0 else save.released

    # Backward: reads and replays

    def read(self, index: int, save: Save) -> None:
        region = self.regions.drops(save)
        if index in self.retained:
            if self.regions.is_away(save.value):  # else it has never left the device
                self.bring_back(save.value)
        elif region is None:
            self.bring_back(save.value)
            if save.value in self.forms:
                self.decode(save.value, DECODED - index)
                self.hold((save.value, DECODED - index), ("decoded", index))
                self.let_go(PYTHON, of=(save.value, DECODED - index))
        else:
            self.ensure_replayed(region)

    def bring_back(self, value: int) -> None:
        there_s = self.link.wait_for(value, self.clock_s)
        self.extra_s += there_s - self.clock_s
        self.row.append((0.0, there_s - self.clock_s, False))
        self.clock_s = there_s
        self.link.issue(self.clock_s)

    def ensure_replayed(self, region: int) -> None:
        if region in self.replayed:
            return
        outer = self.regions.around(region)
        if outer is not None:
            self.ensure_replayed(outer)
        assert region in self.entered, f"region {region} is replayed and was never entered"
        self.replayed.add(region)
        if outer is None:
            for value in self.regions.away(region):
                self.bring_back(value)
            for value in self.regions.inputs(region):
                self.bring_back(value)
                if value in self.forms:
                    self.decode(value, region)
        first, stop = self.graph.calls[region].first, self.regions.stop(region)
        self.capturing["replay", region] = self.regions.put_back_bytes(region)
        self.issue(
            self.regions.entering_s(region) / 2
            + self.regions.retaining_s(region)
            + self.regions.entering_again_s(region)
        )
        for position in range(first, stop + 1):
            self.make_saves(region, position)
            self.enter_regions(region, position)
            for inner in self.regions.all_inside(region):
                if self.graph.calls[inner].first == position < stop:  # code runs that makes it a region once more
                    self.capturing["replay", inner] = self.regions.captured_bytes(inner)
            self.drop(position, region)
            if position < stop and position not in self.regions.kept_ops[region]:
                self.run(position, home=region)
                self.extra_s += self.graph.ops[position].seconds
        self.capturing = {holder: size for holder, size in self.capturing.items() if holder[0] == "forward"}
        for incarnation in [i for i in self.holders if i[1] == region]:
            self.let_go(PYTHON, of=incarnation)
        self.let_go(("keep", region))

    # Running, and auditing

    def run(self, op: int, *, home: int) -> None:
        """Run op `op`: an event."""
        new_calls, self.num_paid_calls = self.link.num_calls - self.num_paid_calls, self.link.num_calls
        self.issue(self.graph.ops[op].host_s + new_calls * self.graph.hardware.move_s / 2)
        self.let_leave()
        for value in (*self.graph.ops[op].inputs, *self.graph.ops[op].mutates):
            assert self.is_readable(value, op, home), f"op {op} in {home} reads value {value}, which is not there"
        for value in self.graph.ops[op].outputs:
            self.allocate((value, home))
            for region, kept in self.regions.kept_ops.items():
                if home == FORWARD and op in kept:
                    self.hold((value, home), ("keep", region))
        self.record(self.graph.ops[op].workspace_bytes)
        self.clock_s += self.graph.ops[op].seconds
        self.device_busy_s += self.graph.ops[op].seconds
        self.row.append((0.0, self.graph.ops[op].seconds, "sync" in self.graph.ops[op].flags))
        if "sync" in self.graph.ops[op].flags:
            self.host_clock_s = max(self.host_clock_s, self.clock_s)

    def is_readable(self, value: int, op: int, home: int) -> bool:
        if self.is_static(value):
            return True
        if op < self.graph.num_forward:
            incarnation = self.visible(value, None if home == FORWARD else home)
            return incarnation in self.holders and (incarnation != self.saved_as(value) or value not in self.link.away)
        # The backward sees what Python still holds, and what saves hold that were read.
        read = [index for index, save in enumerate(self.graph.saves) if 0 <= save.read <= op]
        names = {(how, index) for index in read for how in ("save", "decoded")} | {PYTHON}
        return any(
            names & holders and ((value, made_in) != self.saved_as(value) or value not in self.link.away)
            for (held, made_in), holders in self.holders.items()
            if held == value and made_in != ENCODED
        )

    def let_leave(self) -> None:
        for (value, home), holders in self.holders.items():
            if (value, home) == self.saved_as(value) and holders <= self.movers(value):
                self.link.let_leave(value, self.clock_s)

    def record(self, workspace_bytes: int) -> None:
        live_bytes = self.base_bytes + sum(self.capturing.values())
        for (value, home), holders in self.holders.items():
            assert holders, f"value {value} is held by nobody and still there"
            if (value, home) != self.saved_as(value) or self.link.is_counted(value):
                live_bytes += self.forms[value].bytes if home == ENCODED else self.bytes_of(value)
        assert live_bytes >= self.base_bytes and self.link.host_bytes() >= 0
        assert all(self.saved_as(value) in self.holders for value in self.link.on_host | self.link.in_flight)
        self.events.append(live_bytes + workspace_bytes)

    def finish(self) -> None:
        """The optimizer's step, and the last audit: nothing is left but what Python holds to the end."""
        self.let_leave()
        self.record(self.graph.optimizer_workspace_bytes)
        for (value, home), holders in self.holders.items():
            assert home == FORWARD and holders == {PYTHON}, f"value {value} of {home} is left, held by {holders}"
            assert self.graph.values[value].dropped == len(self.graph.ops), f"value {value} was never dropped"
        assert not self.capturing, f"{list(self.capturing)} still hold captured state"
        assert self.link.host_bytes() == 0, f"values {self.link.on_host} are left on the host"
        assert self.extra_s >= 0
