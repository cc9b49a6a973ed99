"""rotor's dynamic programme for chains, on the blocks of a step.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory" (2019), section 4. Stages are the ops before the first block, the blocks, and the
ops after the last. A stage's forward either holds all its saves, or only its input is held (a checkpoint), up to some
later stage; what lies between is run again when its backward comes, by the same rules.

There are three answers: `runnable`, the programme with checkpoints on single blocks; `full_plans`, the whole programme,
in which several blocks are replayed from one input, as segments in segments; and `full_extra_s`, what the whole
programme costs by rotor's own model, which leaves out values that cross several blocks, and peaks inside of replays.

`python bench/rotor.py` compares the solver with `full_plans` on the chains of segments.py, all simulated, for an H100
without the host's time. Prints the rows of the table in bench/results/segments-cpu.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import segments
from reporting import options_of
from rivals import Offers, Regions

import lowtide
from lowtide.graph import StepGraph
from lowtide.graph.time_lines import line_of
from lowtide.plans import Plan, Recompute
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.candidate import thinned

_SLOTS = 2000  # of memory; sizes are rounded up to whole ones
_MOST_STAGES = 150  # of the whole programme, which is cubic
_NUM_BUDGETS = 10
_MOST_JUDGED = 200  # plans of the whole programme that are simulated
_TIME_LIMIT_S = 600.0  # of a search: it ends long before


@dataclass(frozen=True)
class Stage:
    """Seconds, and bytes: input, output, all saves (input excluded), and what else lives at most.

    `replay_s` is its forward up to its last save: replays stop there.
    """

    forward_s: float
    replay_s: float
    input_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_more_bytes: int
    backward_more_bytes: int


@dataclass(frozen=True)
class Chain:
    """A step as a chain of stages; `calls[k]` is the block that stage `k` is, -1 for none."""

    graph: StepGraph
    stages: Sequence[Stage]
    calls: Sequence[int]
    static_bytes: int
    plain_peak_bytes: int

    def _slot_bytes(self) -> float:
        return (self.plain_peak_bytes - self.static_bytes) / _SLOTS

    def _slots(self, size: int) -> int:
        return int(np.ceil(size / self._slot_bytes()))

    def runnable(self) -> Offers:
        """For each amount of memory the fastest choice of blocks to replay, each on its own."""
        num = len(self.stages)
        least = np.full((num + 1, _SLOTS + 1), np.inf)  # of the stages from k on, with so many slots left
        least[num] = 0.0
        checkpoints = np.zeros((num, _SLOTS + 1), dtype=bool)
        for k in range(num - 1, -1, -1):
            stage = self.stages[k]
            held = _later(least[k + 1], self._slots(stage.saved_bytes))
            held[: self._needed_all(k)] = np.inf
            replayed = _later(least[k + 1], self._slots(stage.output_bytes)) + stage.replay_s
            replayed[: self._needed_all(k)] = np.inf
            checkpoints[k] = (replayed < held) & (self.calls[k] >= 0)
            least[k] = np.where(checkpoints[k], replayed, held)
        found: dict[tuple[int, ...], Regions] = {}
        for slots in range(_SLOTS, -1, -1):
            if np.isfinite(least[0, slots]):
                regions: Regions = {}
                left = slots
                for k, stage in enumerate(self.stages):
                    if checkpoints[k, left]:
                        regions[self.calls[k]] = ()
                    left -= self._slots(stage.output_bytes if checkpoints[k, left] else stage.saved_bytes)
                found.setdefault(tuple(regions), regions)
        return Offers(self.graph, list(found.values()))

    def full_extra_s(self) -> np.ndarray | None:
        """Extra seconds of the whole programme, by its own model, for each number of slots; None if it is too long."""
        num = len(self.stages)
        return None if num > _MOST_STAGES else self._whole[0][0, num - 1]

    def full_plans(self) -> list[Plan]:
        """The plans of the whole programme, the one with the most memory first; none if it is too long."""
        num = len(self.stages)
        if num > _MOST_STAGES:
            return []
        found: dict[tuple[tuple[int, int], ...], None] = {}
        for slots in np.flatnonzero(np.isfinite(self._whole[0][0, num - 1]))[::-1]:
            spans: list[tuple[int, int]] = []
            self._collect(0, num - 1, int(slots), spans)
            found.setdefault(tuple(spans))
        return [self._plan(spans) for spans in found]

    def _plan(self, spans: Sequence[tuple[int, int]]) -> Plan:
        paths = [self.graph.calls[call].path for call in self.calls[1:-1]]
        runs = dict.fromkeys(tuple(paths[max(first - 1, 0) : last]) for first, last in spans)  # stage 1 is block 0
        return Plan(tuple(Recompute(run[0], more=tuple((path, 0) for path in run[1:])) for run in runs if run))

    def _collect(self, first: int, last: int, slots: int, spans: list[tuple[int, int]]) -> None:
        """Add the runs of stages that are dropped between `first` and `last`."""
        while first < last:
            cut = int(self._whole[1][first, last][slots])
            if cut:
                spans.append((first, cut - 1))
                self._collect(first, cut - 1, slots, spans)
            slots -= self._slots(self.stages[cut].input_bytes if cut else self.stages[first].saved_bytes)
            first = cut or first + 1

    @cached_property
    def _whole(self) -> tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """For the stages `s` to `t`, by the number of slots: the least extra seconds, and where to cut, 0 for nowhere.

        The stages `s` to `cut - 1` are run without saves, and again later; without a cut, `s` holds its saves.
        """
        num = len(self.stages)
        forward = np.concatenate([[0.0], np.cumsum([stage.forward_s for stage in self.stages])])
        least: dict[tuple[int, int], np.ndarray] = {}
        cuts: dict[tuple[int, int], np.ndarray] = {}
        for s in range(num - 1, -1, -1):
            for t in range(s, num):
                best, chosen = np.full(_SLOTS + 1, np.inf), np.zeros(_SLOTS + 1, dtype=np.int16)
                if s == t:
                    best[self._needed_all(s) :] = 0.0
                else:
                    best = _later(least[s + 1, t], self._slots(self.stages[s].saved_bytes))
                    best[: self._needed_all(s)] = np.inf
                for cut in range(s + 1, t + 1):
                    later = _later(least[cut, t], self._slots(self.stages[cut].input_bytes))
                    again = forward[cut - 1] - forward[s] + self.stages[cut - 1].replay_s
                    cost = again + later + least[s, cut - 1]
                    chosen[cost < best] = cut
                    best = np.minimum(best, cost)
                least[s, t], cuts[s, t] = best, chosen
        return least, cuts

    def full_at(self, extra_s: np.ndarray, budget: int) -> float | None:
        """The whole programme's extra seconds at a budget, None where it finds nothing."""
        slots = int((budget - self.static_bytes) / self._slot_bytes())
        found = extra_s[min(_SLOTS, slots)] if slots >= 0 else np.inf
        return float(found) if np.isfinite(found) else None

    def _needed_all(self, k: int) -> int:
        """Slots that a stage's own forward and backward need, its saves included."""
        stage = self.stages[k]
        forward = stage.saved_bytes + stage.forward_more_bytes
        return min(_SLOTS + 1, self._slots(max(forward, stage.saved_bytes + stage.backward_more_bytes)))


def _later(costs: np.ndarray, slots: int) -> np.ndarray:
    """Costs where `slots` fewer are left."""
    found = np.full_like(costs, np.inf)
    if slots < len(costs):
        found[slots:] = costs[: len(costs) - slots]
    return found


def chain_of(graph: StepGraph, plain: Timeline, blocks: Sequence[int]) -> Chain | None:
    """The step as a chain, None where values worth a tenth of all that is saved skip a block."""
    blocks = sorted(blocks)
    if len(blocks) < 2 or any(graph.calls[a].end > graph.calls[b].first for a, b in pairwise(blocks)):
        return None
    starts = [0, *(graph.calls[call].first for call in blocks), graph.calls[blocks[-1]].end]
    stage_of = np.searchsorted(np.array(starts), np.arange(graph.num_forward), side="right") - 1
    if _bytes(graph, _skipping(graph, stage_of)) > 0.1 * graph.saved_bytes:
        return None
    inputs = [
        [v for v in _activations(graph, graph.calls[call].inputs) if graph.values[v].born >= before]
        for call, before in zip(blocks, starts, strict=False)
    ]
    ends = [*starts[1:], graph.num_forward]
    entering = [0, *(_bytes(graph, values) for values in inputs)]
    entering.append(_bytes(graph, _activations(graph, graph.calls[blocks[-1]].outputs)))
    stops, saved = list(starts), [set[int]() for _ in starts]
    more = [[0] * len(starts), [0] * len(starts)]  # bytes that no save holds, at most, forward and backward
    current = len(starts) - 1
    for event, op in enumerate(plain.ops):
        if op < 0:
            continue
        if op >= graph.num_forward:
            made_by = graph.ops[op].forward_op
            current = int(stage_of[made_by]) if made_by >= 0 else current
        direction, stage = (0, int(stage_of[op])) if op < graph.num_forward else (1, current)
        more[direction][stage] = max(more[direction][stage], int(plain.live_bytes[event, 2]))
    for save in graph.saves:
        entered = graph.calls[save.call].first if save.call >= 0 else 0  # an input may be saved before the first op
        stage = int(stage_of[max(entered, save.made - 1)])
        stops[stage] = max(stops[stage], save.made)
        if graph.values[save.value].kind == "activation" and graph.values[save.value].born >= 0:
            saved[stage].add(save.value)
    stages = []
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inner = {value for value in saved[k] if graph.values[value].born >= start}
        leaving = entering[k + 1] if k + 1 < len(starts) else 0
        forward_s, replay_s = (sum(op.seconds for op in graph.ops[start:stop]) for stop in (end, stops[k]))
        held = max(leaving, _bytes(graph, inner | _next_inputs(graph, k, inputs)))
        stages.append(Stage(forward_s, replay_s, entering[k], leaving, held, more[0][k], more[1][k]))
    static = int(plain.live_bytes[plain.peak_event, [0, 3]].sum())  # gradients as they are at the peak
    return Chain(graph, stages, [-1, *blocks, -1], static, plain.peak_bytes)


def _skipping(graph: StepGraph, stage_of: np.ndarray) -> set[int]:
    """Values that a stage reads which one before the last has made."""
    found: set[int] = set()
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        for value in op.inputs:
            born = graph.values[value].born
            if born >= 0 and stage_of[index] > stage_of[born] + 1:
                found.add(value)
    return found


def _next_inputs(graph: StepGraph, stage: int, inputs: list[list[int]]) -> set[int]:
    """What a stage makes for the next: stage `k` comes before block `k`."""
    return set(inputs[stage]) if stage < len(inputs) else set()


def _activations(graph: StepGraph, values: Sequence[int]) -> list[int]:
    return sorted({value for value in values if graph.values[value].kind == "activation"})


def _bytes(graph: StepGraph, values: Sequence[int] | set[int]) -> int:
    return sum(graph.values[value].bytes for value in values)


def compare(name: str, graph: StepGraph, blocks: Sequence[int]) -> None:
    """Print the rows of a chain: at budgets of equal distance, what the plans of both add to the step, in percent."""
    graph = line_of(graph, 0.0)
    plain = simulate(graph)
    chain = chain_of(graph, plain, blocks)
    assert chain is not None
    judged = [simulate(graph, plan) for plan in thinned(chain.full_plans(), _MOST_JUDGED)]
    floor, least = lowtide.sweep(graph, budgets=()).floor_bytes, min(each.peak_bytes for each in judged)
    judged = [each for each in judged if each.peak_bytes >= floor]
    lowest = min(each.peak_bytes for each in judged)
    for step in range(_NUM_BUDGETS):
        budget = lowest + (plain.peak_bytes - lowest) * step // _NUM_BUDGETS
        rotors = min((each for each in judged if each.peak_bytes <= budget), key=lambda each: each.extra_s)
        ours = simulate(graph, lowtide.solve(graph, rotors.peak_bytes, time_limit_s=_TIME_LIMIT_S))
        extra = [100 * each.extra_s / plain.step_s for each in (ours, rotors)]
        sizes = " | ".join(f"{size / 2**20:.1f}" for size in (floor, least, rotors.peak_bytes))
        print(f"| {name} | {sizes} | {extra[0]:+.2f} | {extra[1]:+.2f} | {extra[0] - extra[1]:+.2f} |", flush=True)


def main() -> None:
    chains = segments.chains("cpu")
    for name in options_of(__doc__, chains).parse_args().cases:
        chain, x = chains[name]()
        graph = lowtide.trace(chain, functools.partial(segments.loss_of, chain), x, mode="fake", device="H100")
        compare(name, graph, [graph.calls_by_path[f"blocks.{n}"][0] for n in range(len(chain.blocks))])


if __name__ == "__main__":
    main()
