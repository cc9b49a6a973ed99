"""`fit` keeps a candidate by measured steps: with a simulated clock, and no effects of the others."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from api.tuned_job import NUM_LAYERS, PER_BLOCK, Clock, Job, Model, Part, has_parts, trace
from graphs import repeated_blocks, with_host_line
from lowtide.api import measure, tuner
from lowtide.api.plan_search import PlanSearch
from lowtide.eager import Applied
from lowtide.eager.moves import Moves
from lowtide.eager.replanning import Limits
from lowtide.graph.time_lines import StepLines
from lowtide.simulator import simulate
from lowtide.solvers import placement, solve
from lowtide.solvers.baselines import reference_plans
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import NEARLY, SEARCHED, SMALLEST, UNMOVED, ShortlistedPlan, shortlist
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_thread")


def outcome(handle: Any, name: str) -> str:
    return next(trial.outcome for trial in handle.candidates if trial.name == name)


# Which candidate is kept.


def test_the_measured_fastest_is_kept_not_the_predicted(job: Job, clock: type[Clock]) -> None:
    budget = job.budget(0.5)
    with job.fit(budget, tune_s=0) as trusting:
        assert has_parts(trusting.plan)
        assert [trial.name for trial in trusting.candidates if trial.outcome == "kept"] == [SEARCHED]
    clock.part_s = 10.0
    with job.fit(budget) as handle:
        measured = {trial.name: trial.measured_step_s for trial in handle.candidates if trial.measured_step_s}
        (kept,) = (trial for trial in handle.candidates if trial.outcome == "kept")
        assert kept.name != SEARCHED and "slower than the one kept" in outcome(handle, SEARCHED)
        assert kept.measured_step_s == min(measured.values()) == handle.plan.measured_step_s
        assert not has_parts(handle.plan)
        # Layers run once, those that are recomputed twice.
        assert handle.plan.measured_slowdown == pytest.approx(len(handle.plan.regions) / NUM_LAYERS)
        assert handle.measured_slowdown == handle.plan.measured_slowdown
        assert handle.measured_peak_bytes <= budget and handle.plan.measured_peak_bytes == handle.measured_peak_bytes
    assert job.untouched()


def test_no_candidate_that_holds_is_below_the_bound_of_the_one_kept(
    job: Job, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept plan is of a later round, with a bound for more memory than the one that holds takes."""
    budget, honest = job.budget(0.5), Limits.candidates

    def with_high_bound(self: Limits, graph: Any, budget_bytes: int) -> Any:
        found, error = honest(self, graph, budget_bytes)
        high_s = max(each.plan.extra_s for each in found)
        parts = [has_parts(each.plan) for each in found]
        bounds = [each.plan.lower_bound_s if has else high_s for each, has in zip(found, parts, strict=True)]
        plans = [replace(each.plan, lower_bound_s=bound) for each, bound in zip(found, bounds, strict=True)]
        return [replace(each, plan=plan) for each, plan in zip(found, plans, strict=True)], error

    monkeypatch.setattr(Limits, "candidates", with_high_bound)
    clock.part_s = 10.0  # the plan that is predicted to be fastest is slow
    with job.fit(budget) as handle:
        assert "slower than the one kept" in outcome(handle, SEARCHED) and not has_parts(handle.plan)
        fastest = next(trial for trial in handle.candidates if trial.name == SEARCHED)
        assert handle.plan.lower_bound_s / handle.plan.step_s <= fastest.predicted_slowdown < handle.plan.slowdown


@pytest.mark.parametrize("tune_s", [0.0, 10.0])
def test_torchs_way_is_used_where_it_holds_by_measurement(
    job: Job, clock: type[Clock], monkeypatch: pytest.MonkeyPatch, tune_s: float
) -> None:
    """By simulation a checkpoint per block is 1 % over the budget, and what fits is slow."""
    clock.part_s, honest = 10.0, measure.RealSteps._whole_peak
    budget = int(job.peak_of(PER_BLOCK) / 1.01)
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: int(honest(*args) / 1.02))
    with job.fit(budget, tune_s=tune_s) as handle:
        assert handle.measured_peak_bytes <= budget
        if tune_s:
            assert "over the budget" not in outcome(handle, PER_BLOCK)
            assert handle.plan.measured_step_s <= 2 * NUM_LAYERS  # as each layer recomputed
            assert handle.plan.peak_bytes > budget
            assert lowtide.Plan.from_json(handle.plan.to_json()) == handle.plan  # although it is over by prediction


def test_what_holds_by_measurement_is_not_infeasible(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan fits by simulation."""
    honest, share, budget = measure.RealSteps._whole_peak, 1.05, int(0.97 * job.floor)
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: int(share * honest(*args)))
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.solve(job.graph, budget)
    with pytest.raises(lowtide.InfeasibleBudgetError, match=r"floor of(.|\n)*the smallest peak measured is"):
        job.fit(budget)
    assert job.untouched()
    share = 0.95
    for tune_s in (0.0, 10.0):
        with job.fit(budget, tune_s=tune_s) as handle:
            assert handle.measured_peak_bytes <= budget < handle.plan.peak_bytes
    with pytest.raises(lowtide.InfeasibleBudgetError, match="is below this step's floor"):
        job.fit(budget, verify=False)


@pytest.mark.parametrize("below", [0.5, 0.97])
def test_the_floor_that_is_named_holds(job: Job, monkeypatch: pytest.MonkeyPatch, below: float) -> None:
    """Also where measured peaks are above predicted ones, and no plan is near the budget."""
    honest = measure.RealSteps._whole_peak
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: int(1.05 * honest(*args)))
    with pytest.raises(lowtide.InfeasibleBudgetError, match="the smallest peak measured is") as raised:
        job.fit(int(below * job.floor))
    assert job.untouched()
    with job.fit(raised.value.floor_bytes) as handle:
        assert handle.measured_peak_bytes <= raised.value.floor_bytes


def test_the_smallest_plan_is_for_the_budget_given(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all others are measured far above their predictions."""
    honest, smallest, factor = measure.RealSteps._whole_peak, PlanSearch.smallest, 3
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: factor * honest(*args))

    def honest_from_now_on(self: Any) -> Any:
        nonlocal factor
        factor = 1
        return smallest(self)

    monkeypatch.setattr(PlanSearch, "smallest", honest_from_now_on)
    budget = job.budget(0.5)
    with job.fit(budget) as handle:
        assert outcome(handle, SMALLEST) == "kept"
        assert handle.plan.budget_bytes == budget


def test_candidates_that_run_out_of_memory(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Part.forward

    def full(self: Part, x: Tensor) -> Tensor:
        if "forward" in vars(self):  # a region of its own
            raise torch.OutOfMemoryError("out of memory, for the test")
        return forward(self, x)

    budget = job.budget(0.5)
    monkeypatch.setattr(Part, "forward", full)
    with job.fit(budget) as handle:
        assert "out of memory" in [trial.outcome for trial in handle.candidates if trial.name == SEARCHED]
        assert not has_parts(handle.plan)
        assert handle.measured_peak_bytes <= budget
    assert job.untouched()


def test_a_plain_step_that_runs_out_of_memory(job: Job, clock: type[Clock], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = measure.RealSteps.timed

    def full(self: measure.RealSteps) -> float:
        if all("forward" not in vars(module) for module in self.model.modules()):
            raise torch.OutOfMemoryError("out of memory, for the test")
        return timed(self)

    monkeypatch.setattr(measure.RealSteps, "timed", full)
    with job.fit(job.budget(0.5)) as handle:
        assert not handle.plan.is_plain and handle.plan.measured_plain_s == handle.plan.step_s  # as traced


def test_host_memory_never_makes_a_step_slower(job: Job, clock: type[Clock], monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is predicted to be fast, and is slow."""
    budget, keep = job.budget(0.5), Moves.keep

    def slow(self: Moves, *args: Any, **options: Any) -> Any:
        Clock.now += Clock.moved_s
        return keep(self, *args, **options)

    def linked(*args: Any, **options: Any) -> lowtide.StepGraph:
        graph = trace(*args, **options)
        return replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=1e15))

    monkeypatch.setattr(measure, "trace", linked)
    monkeypatch.setattr(placement, "_SMALLEST", 1)
    monkeypatch.setattr(Moves, "keep", slow)
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: budget)  # on the CPU no move frees anything
    with job.fit(budget, host="1GiB") as handle:
        assert handle.plan.moves and outcome(handle, SEARCHED) == "kept"
    clock.moved_s = 10.0
    with job.fit(budget, host="1GiB") as handle:
        assert not handle.plan.moves and handle.plan.regions
        assert "slower than the one kept" in outcome(handle, SEARCHED)
        assert UNMOVED in [trial.name for trial in handle.candidates]
        moved = next(trial for trial in handle.candidates if trial.name == SEARCHED)
        assert handle.plan.lower_bound_s / handle.plan.step_s <= moved.predicted_slowdown  # moves are allowed
    with job.fit(budget) as without:
        assert handle.plan.measured_step_s <= without.plan.measured_step_s


# Few steps, and nothing left of them.


def count_steps(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found, forward = [0], Model.forward

    def counted(self: Model, x: Tensor) -> Tensor:
        found[0] += 1
        return forward(self, x)

    monkeypatch.setattr(Model, "forward", counted)
    return found


def test_no_step_is_run_that_decides_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, some = 2 * job.budget(1.0), job.budget(0.5)
    steps, timed = count_steps(job, monkeypatch), [0]
    turn = measure.RealSteps.timed

    def counted(self: measure.RealSteps) -> float:
        timed[0] += 1
        return turn(self)

    monkeypatch.setattr(measure.RealSteps, "timed", counted)

    def num_of(call: Callable[[], Any]) -> int:
        steps[0] = timed[0] = 0
        result = call()
        if isinstance(result, Applied):
            result.remove()
        return steps[0]

    assert num_of(lambda: job.fit(plain)) == 3 and timed == [0]  # two measured, one timed
    assert num_of(lambda: job.fit(some, verify=False)) == 0
    assert num_of(lambda: job.fit(some, tune_s=0)) >= 3 and timed == [0]


def state_of(job: Job) -> list[Any]:
    gradients = [parameter.grad for parameter in job.model.parameters()]
    tensors = [*job.model.state_dict().values(), *(g for g in gradients if g is not None)]
    generators = [torch.get_rng_state(), job.model.noise.get_state()]
    copies = [tensor.clone() for tensor in (*tensors, *generators)]
    attributes = [job.model.num_calls, list(job.model.seen), id(job.model.seen), job.model.training]
    return [copies, [id(gradient) for gradient in gradients], attributes]


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert before[1:] == after[1:]
    assert all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))


def test_nothing_is_left_of_the_steps(job: Job, clock: type[Clock]) -> None:
    clock.part_s, other = 0.5, Job()
    torch.manual_seed(0)
    job.loss_fn(job.batch).backward()
    before = state_of(job)
    with job.fit(job.budget(0.4)) as handle:
        assert sum(trial.measured_step_s is not None for trial in handle.candidates) > 1
        assert_same(before, state_of(job))
        torch.manual_seed(1)
        job.loss_fn(job.batch).backward()
    planned = state_of(job)
    torch.manual_seed(0)
    other.loss_fn(other.batch).backward()
    torch.manual_seed(1)
    other.loss_fn(other.batch).backward()
    assert job.model.norm.running_mean.isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(planned[0], state_of(other)[0], strict=True))


@pytest.mark.usefixtures("quick_fit")
def test_an_interruption_while_candidates_take_turns(
    job: Job, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.loss_fn(job.batch).backward()
    before, budget = state_of(job), job.budget(0.4)
    turn, forward = measure.RealSteps.timed, Model.forward
    left = [0]

    def interrupted(self: Model, x: Tensor) -> Tensor:
        result = forward(self, x)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    def begun(self: measure.RealSteps) -> float:
        num_turns[0] += 1
        if num_turns[0] == wanted:
            left[0] = 2
        return turn(self)

    monkeypatch.setattr(Model, "forward", interrupted)
    monkeypatch.setattr(measure.RealSteps, "timed", begun)
    for wanted in (1, 2):  # the plain step's, and that of a candidate
        num_turns = [0]
        with pytest.raises(KeyboardInterrupt):
            job.fit(budget)
        assert num_turns[0] == wanted
        assert_same(before, state_of(job))
        assert job.untouched()


def test_a_refit_tunes_too(job: Job, clock: type[Clock]) -> None:
    with job.fit(job.budget(0.5), tune_s=0.5) as handle:
        same, first = handle, handle.plan
        clock.part_s = 10.0
        handle.refit()
        assert handle is same and handle.enabled
        assert handle.plan != first or not has_parts(first)
        assert not has_parts(handle.plan) and handle.plan.measured_step_s <= 2 * NUM_LAYERS
        assert "kept" in [trial.outcome for trial in handle.candidates]
        job.loss_fn(job.batch).backward()
        assert handle.stats().num_replays > 0
    assert job.untouched()


# Words.


def test_what_was_tried_is_said(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lowtide"):
        handle = job.fit(job.budget(0.4))
    (table,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("candidates:"))
    for text in (table, str(handle)):
        for trial in handle.candidates:
            assert trial.name in text and trial.outcome in text
    assert "measured   peak " in str(handle.plan)
    handle.report(tmp_path / "report.md")
    handle.report(tmp_path / "report.html", time_limit_s=0.5)
    markdown, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "Candidates tried" in markdown and "Candidates tried" in page
    for trial in handle.candidates:
        assert trial.name in page and trial.outcome in page and trial.name in markdown
    handle.remove()
    handle.plan.report(tmp_path / "plan.html", time_limit_s=0.5)
    assert "Candidates tried" not in (tmp_path / "plan.html").read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("quick_fit")
def test_progress_on_a_terminal(job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    budget = job.budget(0.4)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    job.fit(budget).remove()
    assert terminal.getvalue() == ""  # someone has replaced stderr: that is no terminal
    monkeypatch.setattr(sys, "__stderr__", terminal)
    job.fit(budget).remove()
    stages = terminal.getvalue().split("\r\x1b[2K")
    assert stages[1] == "lowtide: tracing the step " and stages[-1] == ""  # the line is gone
    assert any("trying candidate 1 of " in stage for stage in stages)
    assert "\n" not in terminal.getvalue()
    with caplog.at_level(logging.ERROR, logger="lowtide"):
        terminal.truncate(0)
        job.fit(budget).remove()
        assert terminal.getvalue().strip("\0") == ""


@pytest.mark.parametrize(
    ("options", "error"), [({"tune_s": -1}, ValueError), ({"tune_s": "a"}, TypeError), ({"cache": 3}, TypeError)]
)
def test_arguments_that_cannot_be_meant(job: Job, options: Any, error: Any) -> None:
    with pytest.raises(error):
        lowtide.fit(job.model, None, job.batch, budget="1GiB", **options)


def test_one_disturbed_turn_drops_no_candidate() -> None:
    disturbed, steady = (
        tuner.MeasuredCandidate(ShortlistedPlan(name, lowtide.Plan()), 0, 2.0, times)
        for name, times in (("disturbed", [9.0, 1.0]), ("steady", [1.1, 1.1]))
    )
    assert disturbed.seconds == 1.0 and steady.seconds == 1.1
    disturbed.times.pop()
    assert tuner._near_fastest([disturbed, steady], 2.0) == [disturbed, steady]  # its first step was not


def test_what_a_busy_host_would_add_counts() -> None:
    """A plan that only just keeps the host ahead is slower than others as soon as the host is."""
    graph = with_host_line(1, repeated_blocks(1, num_blocks=6))
    graph = replace(graph, ops=tuple(replace(op, host_s=0.9 * op.seconds, flags=()) for op in graph.ops))
    found = {name: with_predictions(simulate(graph, plan), 0, 0.0) for name, plan in reference_plans(graph).items()}
    heavy, light = found["a checkpoint per block"], found["nothing"]
    on_heavy, on_light = (
        tuner.MeasuredCandidate(ShortlistedPlan("", plan), 0, 24.0, [24.0], lines=tuner._lines_of(plan))
        for plan in (heavy, light)
    )
    assert on_heavy.lines == simulate(graph, heavy).lines and on_heavy.expected_s > on_light.expected_s
    assert tuner._near_fastest([on_heavy, on_light], 1.0) == [on_light]


def test_no_more_host_time_counts_than_was_measured() -> None:
    """A region's time on the host may be predicted several times too high."""
    light, heavy = (
        tuner.MeasuredCandidate(ShortlistedPlan("", lowtide.Plan()), 0, seconds, lines=StepLines(host_s, 20.0, host_s))
        for seconds, host_s in ((27.0, 27.0), (24.0, 60.0))
    )
    assert heavy.expected_s == 24.0 * 1.125 and light.expected_s == 27.0 * 1.125
    assert tuner._lines_of(lowtide.Plan()) is None


@pytest.mark.parametrize(("host_s", "expected_s"), [(0.0, 0.0), (7.0, 0.0), (8.0, 0.0), (10.0, 1.25), (20.0, 2.5)])
def test_a_busy_host_adds_what_the_device_has_to_wait_for(host_s: float, expected_s: float) -> None:
    """A quarter of the host's time, half of the time; nothing as long as the host stays ahead of ten seconds."""
    assert StepLines(host_s, 10.0, max(host_s, 10.0)).busy_host_s == expected_s


# Candidates.


@pytest.mark.parametrize("share", sweep([-1.0, 0.0, 0.97, 1.0, 0.3, 0.6], keep=4))
def test_candidates_differ_and_are_ranked(job: Job, share: float) -> None:
    graph, budget = job.graph, job.budget(share) if share >= 0 else int(0.97 * job.floor)
    found, error = shortlist(graph, budget)
    assert 1 <= len(found) <= 8
    assert len({(each.plan.regions, each.plan.moves) for each in found}) == len(found)
    assert [each.plan.extra_s for each in found] == sorted(each.plan.extra_s for each in found)
    for each in found:
        timeline = simulate(graph, each.plan)
        assert (each.plan.peak_bytes, each.plan.extra_s) == (timeline.peak_bytes, pytest.approx(timeline.extra_s))
        assert each.plan.peak_bytes <= (1.05 if error is None else 1.25) * budget and each.plan.budget_bytes == budget
    if share < 0:
        assert error is not None and SEARCHED not in [each.name for each in found]
        return
    assert error is None
    (own,) = (each for each in found if each.name == SEARCHED)
    assert own.plan == lowtide.solve(graph, budget) and own.is_essential
    assert len(found) == 1 or share < 1.0  # where the plain step fits


def test_torchs_ways_are_candidates_where_they_fit_or_nearly_do(job: Job) -> None:
    per_block = job.peak_of(PER_BLOCK)

    def by_name(budget: int) -> dict[str, ShortlistedPlan]:
        return {each.name: each for each in shortlist(job.graph, budget)[0]}

    for budget in (per_block, int(per_block / 1.01), int(per_block / 1.04)):
        assert by_name(budget)[PER_BLOCK].is_essential
    assert PER_BLOCK not in by_name(int(per_block / 1.06))
    plain = simulate(job.graph).peak_bytes
    assert by_name(int(plain / 1.04))["nothing"].plan.is_plain
    assert "nothing" not in by_name(int(plain / 1.06))
    half = by_name(job.peak_of("every second block"))
    blocks = [each.plan for name, each in half.items() if "block" in name]
    assert min(len(plan.regions) for plan in blocks if plan.peak_bytes <= plan.budget_bytes) == NUM_LAYERS // 2
    assert any(name.startswith("selective") for name in by_name(job.peak_of("selective, all matmuls kept")))


def test_if_no_plan_fits_torchs_ways_are_candidates_however_their_peaks_are_predicted(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = int(0.99 * job.floor)
    most = job.peak_of(PER_BLOCK) / budget - 1
    assert most > NEARLY
    for nearly, is_candidate in ((most - 0.01, False), (most + 0.01, True)):
        monkeypatch.setattr(solve, "_NEARLY_IF_NONE_FITS", nearly)
        found, error = shortlist(job.graph, budget)
        assert error is not None
        assert ({each.name: each.is_essential for each in found}.get(PER_BLOCK) is True) == is_candidate


def test_with_moves_the_best_plan_without_is_a_candidate(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SMALLEST", 1)
    graph = replace(job.graph, hardware=replace(job.graph.hardware, link_bytes_per_s=1e15))
    budget = job.budget(0.5)
    found = {each.name: each for each in shortlist(graph, budget, host="1GiB")[0]}
    assert found[SEARCHED].plan.moves and found[SEARCHED].plan.extra_s < found[UNMOVED].plan.extra_s
    unmoved = lowtide.solve(graph, budget)
    assert found[UNMOVED].plan == replace(unmoved, lower_bound_s=found[UNMOVED].plan.lower_bound_s)
    # Plans with moves are allowed: the bound of a search without them is none.
    assert found[SEARCHED].plan.extra_s < unmoved.lower_bound_s
    assert all(each.plan.lower_bound_s <= found[SEARCHED].plan.extra_s for each in found.values())
