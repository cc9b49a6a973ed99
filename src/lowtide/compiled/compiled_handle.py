"""The handle that `lowtide.compile` puts on a model, with the same names as the one that `lowtide.fit` returns.

`lowtide.handle_of(model)` returns it. The handle reads its numbers from the model's `Session`, which plans in the first
step, so most of them are None or empty before that. It holds no reference to the model.

A step of several compiled graphs, as in regional mode, is shown as one: the graphs of its calls are joined.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from lowtide import _compat
from lowtide.compiled.backend import SESSIONS, warn_unplanned
from lowtide.compiled.joined_steps import plan_of, references
from lowtide.compiled.other_memory import FirstForward
from lowtide.compiled.session import Session, count_of
from lowtide.compiled.split_head import SplitHead
from lowtide.errors import LowtideError
from lowtide.plans.step_plan import Plan
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.plans.step_plan import Frontier
    from lowtide.reports.report_text import Report


@dataclass(frozen=True)
class CompiledCall:
    """One call of a compiled graph in a step. `num_kept_ops` is None where torch's own partitioner decides."""

    graph: int  # numbered from 0, in the order of their first calls
    saved_bytes: int
    num_kept_ops: int | None
    moved_bytes: int


@dataclass(frozen=True)
class CompiledStats:
    """What the calls of the last step save, and what the compiled engine did so far. Empty before the first step.

    `peak_bytes` and the bytes of `calls` are predicted. `stored_bytes` are in host memory now; so far `moved_bytes`
    were copied there, and compute waited `waited_s` for copies.
    """

    calls: tuple[CompiledCall, ...] = ()
    peak_bytes: int = 0
    stored_bytes: int = 0
    moved_bytes: int = 0
    waited_s: float = 0.0
    compiling_s: float = 0.0
    planning_s: float = 0.0

    @property
    def num_graphs(self) -> int:
        return len({call.graph for call in self.calls})

    @property
    def saved_bytes(self) -> int:
        return sum(call.saved_bytes for call in self.calls)

    def __str__(self) -> str:
        moved = f", {format_bytes(self.moved_bytes)} moved so far" if self.moved_bytes else ""
        return (
            f"{len(self.calls)} calls of {self.num_graphs} compiled graphs: {format_bytes(self.saved_bytes)} saved, "
            f"peak {format_bytes(self.peak_bytes)} predicted; {format_seconds(self.compiling_s)} of compiling, "
            f"{format_seconds(self.planning_s)} of planning{moved}"
        )


class CompiledHandle:
    """A budget on a compiled model. `enabled` switches it off and on; `remove()` takes the compiled code off the model.

    With `enabled = False` the model stays compiled and saves what torch's own partitioner chooses, whatever the budget.
    Switch between steps: after a backward, before the next forward.
    """

    def __init__(
        self,
        session: Session,
        modules: list[nn.Module],
        first: FirstForward | None,
        head: SplitHead | None = None,
    ) -> None:
        self.session, self.split_head = session, head
        self.is_removed = False
        self._compiled = [weakref.ref(module) for module in modules]
        self._first = first

    @property
    def enabled(self) -> bool:
        return self.session.enabled and not self.is_removed

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if self.is_removed and enabled:
            raise LowtideError("this handle was removed: call lowtide.compile(model, ...) again")
        self.session.enable(enabled)
        if self.split_head is not None:
            self.split_head.enabled = enabled

    def remove(self) -> None:
        """Let the model run uncompiled again. Graphs whose forward has run still run their backward.

        What `torch.compile(backend="lowtide")` returned stays compiled and saves what torch's own partitioner chooses.
        """
        if self.is_removed:
            return
        self.session.enable(False)
        for module in filter(None, (reference() for reference in self._compiled)):
            _compat.uncompile(module)
        if self._first is not None:
            self._first.remove()
        if self.split_head is not None:
            self.split_head.remove()
        SESSIONS.discard(self.session)
        self.is_removed = True

    def hand_over(self, modules: list[nn.Module]) -> None:
        """Warn if some of these are compiled for this handle: from now on they are compiled for another model.

        They run for that model's budget, also when this model calls them.
        """
        kept = [reference for reference in self._compiled if reference() not in modules]
        num_taken, self._compiled = len(self._compiled) - len(kept), kept
        if num_taken and not self.is_removed:
            warn_unplanned(
                self.session,
                f"{count_of(num_taken, 'module')} of a model that was compiled within {self.session.budget} "
                "became part of a model that was compiled later, and now follow the budget of that one only. Compile "
                "one model that contains both, or give each of them blocks of its own",
            )

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, with its graph; several compiled graphs are joined. None before the first step."""
        sequence = self.session.current
        return None if sequence is None else plan_of(self.session, sequence)

    @property
    def measured_slowdown(self) -> float | None:
        """Time over that of the same compile without a budget, as a share: measured on an accelerator, else None.

        The step is timed as a whole; the time without a budget is that of calls which run torch's own choice. None
        until each graph has run both.
        """
        sequence = self.session.current
        return None if sequence is None else self.session.slowdown_of(sequence)

    @property
    def measured_step_s(self) -> float | None:
        """Measured seconds of forward and backward under the present choice; None on the CPU, and before there are."""
        sequence = self.session.current
        return None if sequence is None else sequence.seconds_of(sequence.choice)

    @property
    def measured_peak_bytes(self) -> int | None:
        """The peak of the last measured step that ran the present choice; None before there is one."""
        sequence = self.session.current
        return sequence.peaks[-1] if sequence is not None and sequence.peaks else None

    def stats(self) -> CompiledStats:
        """The calls of a step and what they save (predicted), bytes moved and seconds spent (measured)."""
        sequence, watch = self.session.current, self.session.watch
        calls: list[CompiledCall] = []
        if sequence is not None:
            names = {number: index for index, number in enumerate(dict.fromkeys(sequence.numbers))}
            choice = sequence.choice
            for number, variant, moved in zip(sequence.numbers, choice.variants, choice.moved, strict=True):
                num_kept = None if variant.keeps is None else len(variant.keeps)
                calls.append(CompiledCall(names[number], variant.saved_bytes, num_kept, sum(moved)))
        store = self.session.store_stats()
        return CompiledStats(
            tuple(calls),
            peak_bytes=0 if sequence is None else sequence.choice.peak_bytes,
            stored_bytes=0 if store is None else store.held_bytes,
            moved_bytes=0 if store is None else store.moved_down_bytes,
            waited_s=0.0 if store is None else store.waited_s,
            compiling_s=watch.compiling_s,
            planning_s=watch.planning_s,
        )

    def report(
        self, path: str | os.PathLike[str], *, frontier: Frontier | None = None, time_limit_s: float = 5.0
    ) -> Report:
        """Write a report, with the measured peak where there is one. A `LowtideError` before the first step.

        The formats are those of `Plan.report`. The page shows memory over the step, the trade-off with torch's
        `activation_memory_budget` and checkpoints beside the plan, and layers; `.md` of a step of several compiled
        graphs is what this handle prints and a table of calls.
        """
        plan, sequence = self.plan, self.session.current
        if plan is None or sequence is None:
            raise LowtideError(f"no report: {describe(self.session)}")
        if Path(path).suffix.lower() == ".md" and len(sequence.numbers) > 1:
            return self._write_calls(Path(path))
        return plan.report(
            path,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_step_s=self.measured_step_s,
            frontier=frontier,
            references=references(self.session, sequence, plan),
            time_limit_s=time_limit_s,
        )

    def _write_calls(self, path: Path) -> Report:
        from lowtide.reports.report_text import Report

        start, text = time.monotonic(), str(self)
        lines = ["# Compiled step", "", "```text", text, "```", "", "| call | graph | saved | kept ops | moved |"]
        lines += ["|---|---|---|---|---|"]
        for number, call in enumerate(self.stats().calls):
            kept = "torch's choice" if call.num_kept_ops is None else call.num_kept_ops
            saved, moved = format_bytes(call.saved_bytes), format_bytes(call.moved_bytes)
            lines.append(f"| {number} | {call.graph} | {saved} | {kept} | {moved} |")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        return Report(path, path.stat().st_size, time.monotonic() - start, text.splitlines()[0])

    def __str__(self) -> str:
        """What `explain_compiled` prints for the model."""
        return NOTHING_YET if self.is_removed else describe(self.session)


ALL_REPLAYED = "all calls of compiled graphs were inside of checkpoints, which drop what graphs save: no plan is needed"
NOTHING_YET = "nothing compiled for training yet: run a step first"


def describe(session: Session) -> str:
    """The budget, the peak, the slowdown and the variant of every call, as text."""
    sequence = session.current
    if sequence is None:
        return session.unplanned or (ALL_REPLAYED if session.graphs else NOTHING_YET)
    choice, instances = sequence.choice, session.instances_of(sequence)
    step_s = max(sum(graph.step_s for graph in instances), 1e-12)
    peaks = sequence.peaks
    num_graphs = len(set(sequence.numbers))
    lines = [
        f"{count_of(len(instances), 'call')} of {count_of(num_graphs, 'compiled graph')} within "
        f"{format_bytes(session.budget_bytes)}",
        f"  peak    {format_bytes(choice.peak_bytes)} predicted"
        + (f", {format_bytes(peaks[-1])} measured" if peaks else ""),
        f"  slower  {100 * choice.extra_s / step_s:.1f} % predicted, at least "
        f"{100 * choice.lower_bound_s / step_s:.1f} % with any choice",
    ]
    lines.append(f"  took    {session.watch}")
    if choice.moves_any:
        lines.append(f"  moved   {format_bytes(sum(map(sum, choice.moved)))} to the host and back")
    names = {number: index for index, number in enumerate(dict.fromkeys(sequence.numbers))}
    calls = zip(sequence.numbers, choice.variants, strict=True)
    for (number, variant), run in itertools.groupby(calls):
        what = "as torch decides" if variant.keeps is None else f"{count_of(len(variant.keeps), 'op')} kept"
        what += ", indices recomputed" if variant.replays_indices else ""
        lines.append(
            f"  {len(list(run))} x graph {names[number]}: {format_bytes(variant.saved_bytes)} saved each, {what}"
        )
    if session.unplanned is not None:
        lines.append(f"  beside  {session.unplanned}")
    return "\n".join(lines)
