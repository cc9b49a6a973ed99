"""Plans carried out on live models: the same step to the last bit, and a measured peak that holds."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.api import measure
from lowtide.plans import Move, Plan, PlannedModule, Recompute
from lowtide.solvers.eager_search import EagerSearch
from sweeps import sweep

JOBS = ["custom_function", "unet", "block_called_again", "gpt_autocast", "hf_t5", "gpt_dropout", "lora", "hf_llama"]


pytestmark = pytest.mark.usefixtures("one_thread")


def make(name: str) -> zoo.Job:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    return zoo.make(name, scale=1)


def outcome(job: zoo.Job, steps: int = 2) -> list[Tensor]:
    """Everything that a few steps of training leave behind."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    left = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = job.loss_fn(*job.batch)
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in job.model.parameters() if p.grad is not None)]
        optimizer.step()
    optimizer.zero_grad()
    return [*left, *(buffer.clone() for buffer in job.model.buffers()), torch.get_rng_state()]


def measured_peak(job: zoo.Job, graph: lowtide.StepGraph) -> int:
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    peak = lowtide.measure(job.step, device="cpu").peak_bytes
    job.model.zero_grad(set_to_none=True)
    return there + peak


def budgets(graph: lowtide.StepGraph, shares: tuple[float, ...]) -> list[int]:
    frontier = lowtide.sweep(graph, [])
    low, high = frontier.floor_bytes, frontier.plain_peak_bytes
    return [int(low + (high - low) * share) for share in shares]


@pytest.mark.parametrize("name", sweep(JOBS, keep=2))
def test_plans_run_exactly_and_peak_as_predicted(name: str) -> None:
    job = make(name)
    weights = copy.deepcopy(job.model.state_dict())
    expected = outcome(job)
    job.model.load_state_dict(weights)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    search = EagerSearch(graph)
    low, high = search.floor.peak_bytes, search.plain.peak_bytes
    for share in (0.05, 0.6):
        plan = search.plan(int(low + (high - low) * share))
        with lowtide.apply(job.model, plan) as handle:
            actual = outcome(job)
            assert handle.stats().num_replays > 0 or not plan.regions
            job.model.load_state_dict(weights)
            measured = measured_peak(job, graph)
        job.model.load_state_dict(weights)
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert measured == pytest.approx(plan.peak_bytes, rel=0.04)


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("name", sweep(["unet", "gpt_dropout"], keep=1))
def test_fit_holds_the_budget_and_leaves_the_model_alone(name: str) -> None:
    job = make(name)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    for budget in budgets(graph, (0.3, 0.7)):
        before = copy.deepcopy(job.model.state_dict()), torch.get_rng_state()
        handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget, tune_s=1.0)
        assert all(torch.equal(a, b) for a, b in zip(before[0].values(), job.model.state_dict().values(), strict=True))
        assert torch.equal(before[1], torch.get_rng_state())
        assert all(parameter.grad is None for parameter in job.model.parameters())
        assert handle.measured_peak_bytes is not None
        assert handle.measured_peak_bytes <= budget
        assert measured_peak(job, graph) <= budget
        handle.remove()
        assert "forward" not in vars(job.model)


@pytest.mark.usefixtures("quick_search")
def test_a_budget_holds_while_the_optimizer_steps() -> None:
    """Its workspace is as large as the parameters, and no forward or backward has it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)))
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(64, 128)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.fit(model, loss_fn, x, budget=1, optimizer=optimizer)
    floor = refused.value.floor_bytes
    with pytest.raises(lowtide.InfeasibleBudgetError):  # what torch's ways hold in forward and backward
        lowtide.fit(model, loss_fn, x, budget=int(0.9 * floor), optimizer=optimizer, tune_s=0)
    with lowtide.fit(model, loss_fn, x, budget=floor, optimizer=optimizer, tune_s=0) as handle:
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn(x).backward()
            of_optimizer = max(cpu_allocation_totals(optimizer.step))
        state = sum(4 * each.nbytes for each in model.parameters()) + x.nbytes
        assert state + of_optimizer <= handle.measured_peak_bytes <= floor


def test_fit_does_nothing_to_a_model_that_fits() -> None:
    job = make("custom_function")
    handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget="1GiB")
    assert handle.plan.regions == ()
    assert all("forward" not in vars(module) for module in job.model.modules())


@pytest.mark.usefixtures("quick_search")
def test_fit_undoes_everything_where_nothing_holds() -> None:
    job = make("custom_function")
    with pytest.raises(lowtide.InfeasibleBudgetError, match="floor"):
        lowtide.fit(job.model, job.loss_fn, *job.batch, budget="100KiB")
    assert all("forward" not in vars(module) for module in job.model.modules())


@pytest.mark.usefixtures("quick_search")
def test_fit_undoes_everything_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make("custom_function")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    (budget,) = budgets(graph, (0.5,))

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowtide.api.measure.RealSteps._measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget)
    assert all("forward" not in vars(module) for module in job.model.modules())


@pytest.mark.usefixtures("quick_search")
def test_fit_plans_again_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make("gpt_dropout")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    graph = replace(graph, ops=tuple(replace(op, seconds=op.flops * 1e-9 + 1e-6) for op in graph.ops))
    monkeypatch.setattr(measure, "trace", lambda *_, **__: graph)  # measured times would decide what runs first
    (budget,) = budgets(graph, (0.6,))
    honest, calls = measure.RealSteps._whole_peak, []

    def pessimistic(*args: Any) -> int:
        calls.append(honest(*args))
        return calls[-1] + 200_000 if calls[-1] + 200_000 > budget else calls[-1]

    monkeypatch.setattr(measure.RealSteps, "_whole_peak", pessimistic)
    for tune_s in (0.0, 1.0):
        calls.clear()
        handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget, tune_s=tune_s)
        assert len(calls) >= 2
        assert handle.measured_peak_bytes in calls
        assert handle.measured_peak_bytes + 200_000 <= budget < calls[0] + 200_000
        assert sum(trial.outcome == "kept" for trial in handle.candidates) == 1
        assert any("over the budget" in trial.outcome for trial in handle.candidates)
        handle.remove()


@pytest.mark.usefixtures("quick_search")
def test_plan_is_trace_and_solve() -> None:
    job = make("custom_function")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    (budget,) = budgets(graph, (0.5,))
    plan = lowtide.plan(job.model, job.loss_fn, *job.batch, budget=budget)
    assert plan.fingerprint == graph.fingerprint
    assert plan.peak_bytes <= budget


def test_several_forwards_before_a_backward_and_evaluation_in_between() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(zoo.Block(32, 4) for _ in range(3)))
    batches = [torch.randn(2, 16, 32) for _ in range(2)]

    def both() -> list[Tensor]:
        model.zero_grad()
        losses = [model(batch).square().mean() for batch in batches]
        with torch.no_grad():
            model(batches[0])
        sum(losses).backward()  # type: ignore[union-attr]
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = both()
    with lowtide.apply(model, Plan(regions=(Recompute("0"), Recompute("1", keep_ops=(0, 4)), Recompute("2.mlp")))):
        assert all(torch.equal(a, b) for a, b in zip(expected, both(), strict=True))


def test_one_call_of_several() -> None:
    job = make("block_called_again")
    expected = outcome(job, steps=1)
    with lowtide.apply(job.model, Plan(regions=(Recompute("block", 1), Recompute("block", 3)))) as handle:
        job = zoo.Job(job.model, job.loss_fn, job.batch, job.blocks)
        for parameter in job.model.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        job.step()
        assert handle.stats().num_replays == 2
        job.step()
        assert handle.stats().num_replays == 4
    assert expected


def test_calls_are_counted_in_the_replay_of_a_region_around_them() -> None:
    """Of a block called twice the second call is recomputed, inside regions that are replayed themselves."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(), Twice()), torch.randn(16, 16)

    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    for inner in (0, 1):
        planned = copy.deepcopy(model)
        regions = (Recompute(""), Recompute("0"), Recompute("0.block", inner), Recompute("1.block", inner))
        with lowtide.apply(planned, Plan(regions=regions)):
            assert all(torch.equal(a, b) for a, b in zip(left_behind(planned, step), expected, strict=True))


def test_switch_names_and_copies() -> None:
    model = nn.Sequential(zoo.Block(32, 4), zoo.Block(32, 4))
    names = list(model.state_dict())
    handle = lowtide.apply(model, Plan(regions=(Recompute("0"),)))
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(torch.randn(2, 4, 32)).sum().backward()
    assert handle.stats().num_replays == 2
    handle.enabled = False
    model(torch.randn(2, 4, 32)).sum().backward()
    assert handle.stats().num_replays == 2
    handle.remove()
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan(regions=(Recompute("layers.0"),)), "no such module"),
        (Plan(moves=(Move("1"),)), "no such module"),
        (Plan(engine="compiled", keeps=(0,)), "compiled engine"),
    ],
)
def test_plans_for_something_else(plan: Plan, problem: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(lowtide.PlanError, match=problem):
        lowtide.apply(model, plan)
    assert "forward" not in vars(model)


def test_a_plan_is_given_alone() -> None:
    with pytest.raises(TypeError, match="give it alone"):
        lowtide.apply(nn.Linear(2, 2), Plan(), regions="*")


def test_apply_refuses_a_second_plan() -> None:
    model = nn.Sequential(zoo.Block(32, 4))
    with lowtide.apply(model, Plan(regions=(Recompute("0"),))):
        with pytest.raises(lowtide.LowtideError, match="already"):
            lowtide.apply(model, Plan(regions=(Recompute("0"),)))


@pytest.mark.usefixtures("quick_search")
def test_max_batch_is_the_largest() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def make_batch(size: int) -> Tensor:
        return torch.randn(size, 64, 16)

    largest = lowtide.max_batch(model, loss_fn, make_batch, budget="1MiB", confirm=False)
    assert largest > 8  # found by doubling and then by halving
    assert largest.plan.regions
    assert largest.plan.peak_bytes <= 1 << 20
    assert largest.measured_peak_bytes is None
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.solve(lowtide.trace(model, loss_fn, make_batch(largest + 1), mode="fake"), "1MiB")
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.max_batch(model, loss_fn, make_batch, budget="16KiB")
    assert lowtide.max_batch(model, loss_fn, make_batch, budget="1GiB", max_samples=5, confirm=False) == 5


class Random(nn.Module):
    """Random numbers drawn by ops that return something of their own, buffers, and an activation written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu_(self.norm(self.first(x)))
        hidden = torch.native_dropout(hidden, 0.5, self.training)[0]
        hidden = torch.native_dropout(self.second(hidden), 0.5, self.training)[0]
        return x + hidden * hidden


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Random()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def left_behind(model: nn.Module, step: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loss = step(model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def two_under_one_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # which casts parameters once, for the first of the forwards
        loss = model(x).square().mean() + model(x.flip(0)).square().mean()
    loss.backward()
    return loss


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    loss = model.eval()(x).square().mean()  # other ops than in training
    loss.backward()
    model.train()(x).square().mean().backward()
    return loss


def backward_twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [two_under_one_autocast, evaluated, backward_twice])
def test_whichever_outputs_are_held_the_step_is_the_same(step: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Random(), Twice()), torch.randn(16, 16)
    expected = left_behind(copy.deepcopy(model), lambda model: step(model, x))
    for op in range(24):
        regions = (Recompute("0", keep_ops=(op,)), Recompute("1", keep_ops=(op, op + 3)))
        planned = copy.deepcopy(model)
        with lowtide.apply(planned, Plan(regions=regions)):
            actual = left_behind(planned, lambda model: step(model, x))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), op


def test_calls_outside_of_the_models_forward_are_not_counted() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(), Twice()), torch.randn(16, 16)

    def step(model: Any) -> Tensor:
        for _ in range(2):
            inner = lowtide.checkpoint(lambda x: model[1].block(model[1].block(x)), x)
            loss = model[0](x).square().mean() + inner.square().mean() + model(x).square().mean()
            loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    plan = Plan(regions=(Recompute("0"), Recompute("0.block", 1), Recompute("1.block", 0)))
    with lowtide.apply(model, plan):
        assert all(torch.equal(a, b) for a, b in zip(left_behind(model, step), expected, strict=True))


def test_the_whole_model_as_a_region() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Random(), Random()), torch.randn(16, 16)

    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    with lowtide.apply(model, Plan(regions=(Recompute("", keep_ops=(1, 4)), Recompute("1")))) as handle:
        assert all(torch.equal(a, b) for a, b in zip(left_behind(model, step), expected, strict=True))
        assert handle.stats().num_replays == 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_compiled_under_a_plan() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(), Twice()).eval(), torch.randn(16, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with lowtide.apply(model, Plan(regions=(Recompute("0"), Recompute("0.block", 1), Recompute("1.block", 1)))):
        for run in (torch.compile(model, backend="eager"), model):
            actual = torch.autograd.grad(run(x).sum(), list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_fit_leaves_gradients_alone() -> None:
    job, other = make("custom_function"), nn.Linear(1, 1)
    job.step()
    before = [parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None]

    def loss_fn(*batch: Any) -> Tensor:
        return other(job.loss_fn(*batch).reshape(1, 1)).sum()

    lowtide.fit(job.model, loss_fn, *job.batch, budget="1GiB")
    after = [parameter.grad for parameter in job.model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert other.weight.grad is None


def untouched(model: nn.Module) -> bool:
    return all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())


class Interrupted(nn.Module):
    """Interrupts the n-th forward, in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers(x)) + torch.rand(())
        type(self).counter -= 1
        if type(self).counter == 0:
            raise KeyboardInterrupt
        return x

    counter = 1 << 30


@pytest.mark.usefixtures("quick_search")
def test_an_interrupted_fit_leaves_the_model_as_it_was() -> None:
    model, x = Interrupted(), torch.randn(64, 8)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss_fn(x).backward()
    guess = lowtide.estimate(model, loss_fn, x)
    budget = (guess.floor_bytes + guess.peak_bytes) // 2
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    before = [t.clone() for t in (*model.state_dict().values(), *(g for _, g in gradients if g is not None))]
    random_state = torch.get_rng_state()
    num_interrupted = 0
    while True:
        Interrupted.counter = num_interrupted + 1
        try:
            handle = lowtide.fit(
                model, loss_fn, x, budget=budget, tune_s=0
            )  # tests/api/test_tuner.py interrupts the rest
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            Interrupted.counter = 1 << 30
        if num_interrupted == 0 or "handle" in locals():
            break
        now = [*model.state_dict().values(), *(g for _, g in gradients if g is not None)]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert all(parameter.grad is gradient for parameter, gradient in gradients)
        assert torch.equal(random_state, torch.get_rng_state())
        assert untouched(model)
    assert num_interrupted >= 7  # in fake traces, real ones and the steps that are measured
    handle.remove()
    assert untouched(model)


@pytest.mark.usefixtures("quick_search")
def test_fit_logs_what_it_does_and_what_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    job = make("custom_function")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    (budget,) = budgets(graph, (0.6,))
    with caplog.at_level("INFO", logger="lowtide"):
        handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "tracing the step" and lines[1].startswith("solving for ")
    assert any(line.startswith("trying candidate 1 of ") for line in lines)
    (line,) = (line for line in lines if line.startswith("fitted: "))
    table = [line for line in lines if line.startswith("candidates:")]
    assert len(table) == (len(handle.candidates) > 1) and all("kept" in each for each in table)
    for part in ("fitted: ", " regions", " kept", " recomputed", " offloaded", " predicted", " measured", "slower"):
        assert part in line
    assert handle.measured_slowdown is not None
    assert f"{100 * handle.measured_slowdown:.1f} % measured" in line
    handle.remove()
    caplog.clear()
    with caplog.at_level("INFO", logger="lowtide"):
        lowtide.fit(job.model, job.loss_fn, *job.batch, budget="1GiB")
    assert "nothing to do" in caplog.records[-1].getMessage()


@pytest.mark.usefixtures("quick_search")
def test_a_plan_for_a_model_of_another_size_is_refused() -> None:
    def model_of(width: int) -> nn.Module:
        return nn.Sequential(zoo.Block(width, 4), zoo.Block(width, 4))

    model, x = model_of(32), torch.randn(4, 16, 32)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode="fake")
    (budget,) = budgets(graph, (0.4,))
    solved = lowtide.solve(graph, budget)
    planned = lowtide.plan(model, lambda x: model(x).square().mean(), x, budget=budget)
    assert {module.path: module.kind for module in solved.modules}.get("0", "Block") == "Block"
    wider = model_of(64)
    with pytest.raises(lowtide.PlanError, match=r"made for another model: .* had \d+ parameters of [\d,]+ elements"):
        lowtide.apply(wider, Plan.from_json(planned.to_json()))
    assert untouched(wider)
    path = solved.modules[0].path
    other = model_of(32)
    parent, _, name = path.rpartition(".")
    setattr(other.get_submodule(parent) if parent else other, name, nn.Identity())
    with pytest.raises(lowtide.PlanError, match=r"was a \w+ and is a Identity|no such module"):
        lowtide.apply(other, solved)
    lowtide.apply(model_of(32), planned).remove()


def test_planning_under_a_plan_is_refused() -> None:
    model, x = nn.Sequential(zoo.Block(32, 4)), torch.randn(2, 4, 32)
    with lowtide.apply(model, Plan(regions=(Recompute("0"),))):
        for call in (lowtide.plan, lowtide.fit):
            with pytest.raises(lowtide.LowtideError, match="already"):
                call(model, lambda x: model(x).sum(), x, budget="1GiB")
        with pytest.raises(lowtide.LowtideError, match="already"):
            lowtide.max_batch(model, lambda x: model(x).sum(), lambda n: x, budget="1GiB")
    with pytest.raises(lowtide.LowtideError, match="DataParallel"):
        lowtide.apply(nn.DataParallel(model), Plan(regions=(Recompute("module.0"),)))


@pytest.mark.usefixtures("quick_search")
def test_max_batch_is_confirmed_by_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def make_batch(size: int) -> Tensor:
        return torch.randn(size, 8, 16)

    loss_fn(make_batch(4)).backward()
    before = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    random_state = torch.get_rng_state()
    budget = 200_000
    plain = lowtide.max_batch(model, loss_fn, make_batch, budget=budget)
    assert plain.measured_peak_bytes is not None and plain.measured_peak_bytes <= budget
    from lowtide.api.measure import RealSteps

    honest = RealSteps.measured
    monkeypatch.setattr(RealSteps, "measured", lambda self, **how: (honest(self, **how)[0] + 30_000, 0.0))
    less = lowtide.max_batch(model, loss_fn, make_batch, budget=budget)
    assert 1 <= less < plain
    assert less.measured_peak_bytes is not None and less.measured_peak_bytes <= budget
    monkeypatch.setattr(RealSteps, "measured", lambda *_, **__: (budget * 9, 0.0))
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.max_batch(model, loss_fn, make_batch, budget=budget)
    assert untouched(model)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is gradient and torch.equal(gradient, content) for p, gradient, content in before)


class UserCheckpoint(nn.Module):
    """A module called several times, twice of them in a checkpoint of the user's own, and one called once."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.block, self.once, self.run = Random(), Random(), run

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        x = self.run(lambda x: self.once(self.block(self.block(x))), x)
        return self.block(x)


@pytest.mark.parametrize("run", [lowtide.checkpoint, zoo.torch_checkpoint])
def test_a_users_checkpoint_around_a_module_that_is_called_again(run: Any) -> None:
    torch.manual_seed(0)
    options = {"use_reentrant": False} if run is zoo.torch_checkpoint else {}
    model, x = UserCheckpoint(lambda function, x: run(function, x, **options)), torch.randn(16, 16)

    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean() + model(x.flip(0)).square().mean()
        loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    calls = [(Recompute("block", nth),) for nth in range(4)]
    calls += [(Recompute("once", keep_ops=(op,)),) for op in range(12)]
    for regions in (*calls, (Recompute("block", 0), Recompute("block", 2), Recompute("once", keep_ops=(0, 2)))):
        planned = copy.deepcopy(model)
        modules = (PlannedModule("block", "Random", 4), PlannedModule("once", "Random"))
        with lowtide.apply(planned, Plan(regions=regions, modules=modules)):
            actual = left_behind(planned, step)
        pairs = list(zip(actual, expected, strict=True))
        if run is zoo.torch_checkpoint:  # which counts batches twice in BatchNorm, unless it stops before
            pairs = [*pairs[: -1 - len(list(model.buffers()))], pairs[-1]]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_module_called_in_a_nested_region_and_after_it() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(16, 16)

    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    for nth in range(2):
        planned = copy.deepcopy(model)
        regions = (Recompute("outer"), Recompute("outer.inner"), Recompute("outer.inner.shared", nth))
        with lowtide.apply(planned, Plan(regions=regions)):
            assert all(torch.equal(a, b) for a, b in zip(left_behind(planned, step), expected, strict=True))


def test_a_tensor_passed_twice_is_the_same_in_a_nested_replay() -> None:
    layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
    model, x = nn.Sequential(*layers), torch.randn(2, 8, 16)

    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = left_behind(copy.deepcopy(model), step)
    with lowtide.apply(model, Plan(regions=(Recompute("1"), Recompute("1.self_attn")))):
        assert all(torch.equal(a, b) for a, b in zip(left_behind(model, step), expected, strict=True))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Random()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.shared(self.inner(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


def test_what_is_held_is_not_computed_again() -> None:
    """Products of a step under a plan, in FLOPs: the plain step's, and those of what is replayed and not held."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 4))
    batch = torch.randn(6, 8)
    graph = lowtide.trace(model, lambda x: model(x).sum(), batch, mode="fake")
    region = graph.calls[graph.calls_by_path["0"][0]]
    products = [op - region.first for op in range(region.first, region.end) if graph.ops[op].flops]
    sizes = [graph.ops[region.first + op].flops for op in products]

    def flops(*regions: Recompute) -> int:
        with lowtide.apply(model, Plan(regions=regions)):
            model(batch).sum().backward()  # learns at which saves the outputs appear
            with FlopCounterMode(display=False) as counter:
                model(batch).sum().backward()
        return counter.get_total_flops()

    plain = flops()
    # The last product's output is saved by nobody, and the replay stops at what is saved for it.
    assert flops(Recompute("0", keep_ops=tuple(products))) == plain
    assert flops(Recompute("0", keep_ops=(products[0],))) <= plain + sizes[1]
    assert plain + sizes[0] <= flops(Recompute("0")) <= plain + sum(sizes)
