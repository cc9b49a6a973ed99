"""The plan of a compiled step as people see it: `handle.plan`, and torch's own ways beside it in reports.

In regional mode a step is a chain of calls of compiled graphs, one per block. `joined_step` puts their ops in the order
in which they run: the forwards, then the backwards from the last call to the first. Values are renumbered; the output
of a call lives until its backward begins, as the input of the next call. What is outside of the compiled graphs
(embedding, head, loss) has no ops here: its memory is part of `other_bytes`.

Nothing is decided here: `variant_choice` chooses, without joining graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.session import Session
from lowtide.compiled.settling import CallSequence
from lowtide.compiled.variant_choice import torch_way
from lowtide.graph.segments import with_structures
from lowtide.graph.step_graph import Call, Op, Save, StepGraph, Value
from lowtide.plans.step_plan import Plan, Reference
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.shared_budget import Variant

_NOTE = "only the compiled blocks are shown op by op; the memory of everything else is in 'other'"


def plan_of(session: Session, sequence: CallSequence) -> Plan:
    """The plan of a sequence, with its graph; several calls are joined.

    Memory outside of several calls is set so that the plan has the peak of the choice.
    """
    instances, choice = session.instances_of(sequence), sequence.choice
    steps = [graph.step for graph in instances if graph.step is not None]
    if len(instances) == 1:
        (step,), firsts = steps, [0]
        other_bytes = session.chooser.start_bytes(instances)
    else:
        step, firsts = joined_step(steps, session.modules_of(sequence))
        inside = _simulated(step, _saved(instances, choice.variants, firsts)).peak_bytes
        other_bytes = max(0, choice.peak_bytes - inside)
    step = replace(step, other_bytes=other_bytes)
    timeline = _simulated(step, _saved(instances, choice.variants, firsts))
    return with_predictions(step, timeline, simulate(step), session.budget_bytes, choice.lower_bound_s)


def references(session: Session, sequence: CallSequence, plan: Plan) -> tuple[Reference, ...]:
    """What torch's partitioner does at each fraction, simulated on the graph of `plan_of(session, sequence)`."""
    assert plan.graph is not None
    instances = session.instances_of(sequence)
    firsts = [0, *accumulate(graph.step.num_forward for graph in instances if graph.step is not None)][:-1]
    found = []
    for fraction in sorted({each for graph in instances for each in graph.torch_ways}, reverse=True):
        ways = [torch_way(graph, fraction) for graph in instances]
        timeline = _simulated(plan.graph, _saved(instances, ways, firsts))
        found.append(Reference(f"activation_memory_budget {fraction:g}", timeline.peak_bytes, timeline.extra_s))
    return tuple(found)


def _simulated(step: StepGraph, saved: tuple[int, ...]) -> Timeline:
    return simulate(step, Plan(engine="compiled", keeps=saved, budget_bytes=1))


def _saved(instances: list[PlannedGraph], variants: list[Variant], firsts: list[int]) -> tuple[int, ...]:
    """The ops whose outputs are saved, numbered in the joined step."""
    saved = (
        graph.default if variant.keeps is None else variant.keeps
        for graph, variant in zip(instances, variants, strict=True)
    )
    return tuple(first + op for first, ops in zip(firsts, saved, strict=True) for op in ops)


def joined_step(steps: Sequence[StepGraph], modules: Sequence[tuple[str, str]]) -> tuple[StepGraph, list[int]]:
    """The calls `steps` as one step, and the number of the first op of each. `modules` are their paths and classes."""
    forwards = [step.num_forward for step in steps]
    backwards = [len(step.ops) - step.num_forward for step in steps]
    first_forward = [0, *accumulate(forwards)]
    num_forward = first_forward[-1]
    first_backward = [num_forward + sum(backwards[index + 1 :]) for index in range(len(steps))]
    end = num_forward + sum(backwards)
    ops: list[Op] = [Op("", -1, 0.0, 0, (), ())] * end
    values: list[Value] = []
    saves: list[Save] = []
    calls: list[Call] = []
    for index, (step, (path, kind)) in enumerate(zip(steps, modules, strict=True)):
        joined = _Joined(step, first_forward[index], first_backward[index], len(values), len(calls) + 1)
        outputs = (n for n, value in enumerate(step.values) if 0 <= value.born < step.num_forward < value.dropped)
        first = first_forward[index]
        made = tuple(number + len(values) for number in outputs)
        calls.append(Call(path, kind, -1, first, first + step.num_forward, (), made))
        for number, op in enumerate(step.ops):
            ops[joined.op(number)] = joined.as_op(op)
        # Its gradient goes to the call before, whose backward runs next.
        gradient_until = first_backward[index - 1] + 1 if index else end
        values += [joined.value(value, gradient_until, end) for value in step.values]
        saves += map(joined.save, step.saves)
        calls += [joined.call(call, path) for call in step.calls]
    return (
        StepGraph(
            ops=tuple(ops),
            num_forward=num_forward,
            values=tuple(values),
            saves=tuple(saves),
            calls=tuple(with_structures(ops[:num_forward], calls, values, saves)),
            hardware=steps[0].hardware,
            step_s=sum(step.step_s for step in steps),
            notes=(_NOTE,),
            versions=steps[0].versions,
        ),
        first_forward[:-1],
    )


class _Joined:
    """Maps the numbers of one call's step to those of the joined step."""

    def __init__(
        self, step: StepGraph, first_forward: int, first_backward: int, first_value: int, first_call: int
    ) -> None:
        self._step, self._forward, self._backward = step, first_forward, first_backward
        self._value, self._call = first_value, first_call

    def op(self, number: int) -> int:
        """The joined number of an op, or of a position: the one before the first op of the backward counts to it."""
        is_forward = number < self._step.num_forward
        return number + (self._forward if is_forward else self._backward - self._step.num_forward)

    def _values(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number + self._value for number in numbers)

    def _call_of(self, number: int) -> int:
        return number + self._call if number >= 0 else self._call - 1  # the call of the whole graph

    def as_op(self, op: Op) -> Op:
        return replace(
            op,
            call=self._call_of(op.call),
            inputs=self._values(op.inputs),
            outputs=self._values(op.outputs),
            mutates=self._values(op.mutates),
            forward_op=self.op(op.forward_op) if op.forward_op >= 0 else -1,
        )

    def value(self, value: Value, gradient_until: int, end: int) -> Value:
        step = self._step
        if value.born < 0 or value.kind == "gradient":
            dropped = end
        elif value.dropped < len(step.ops):
            # A position is the end of an op: the last one of the forward lies before the other calls' ops.
            dropped = self.op(value.dropped - 1) + 1
        else:
            dropped = self._backward if value.born < step.num_forward else gradient_until
        born = self.op(value.born) if value.born >= 0 else -1
        return replace(value, born=born, dropped=max(dropped, born + 1))

    def save(self, save: Save) -> Save:
        used = self.op(save.used - 1) + 1 if save.used >= 0 else -1
        return replace(
            save,
            value=save.value + self._value,
            call=self._call_of(save.call),
            made=self.op(save.made - 1) + 1,
            read=self.op(save.read) if save.read >= 0 else -1,
            released=self.op(save.released - 1) + 1,
            used=used,
        )

    def call(self, call: Call, path: str) -> Call:
        return replace(
            call,
            path=f"{path}.{call.path}".strip("."),
            parent=self._call_of(call.parent),
            first=self._forward + call.first,
            end=self._forward + call.end,
            inputs=self._values(call.inputs),
            outputs=self._values(call.outputs),
        )
