"""`handle.capture` without a GPU: its refusals, and the guards of a captured step."""

from __future__ import annotations

import functools
import random
import sys
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._compat.dispatch import DispatchMode, OpNames
from lowtide.eager import captured_step, cuda_graph
from lowtide.eager.captured_step import CapturedPlan, least_reserve
from lowtide.eager.cuda_graph import StepGuards, batch_form, changed_value
from lowtide.plans import Plan, Recompute
from lowtide.snapshot import generator_states

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


@without_gpu
@pytest.mark.parametrize("what", [Plan(regions=(Recompute("0"),)), lowtide.RecomputeAll()])
def test_without_a_gpu(what: Any) -> None:
    model, x = model_of_two(), torch.randn(2, 4)
    regions = {} if isinstance(what, Plan) else {"regions": "*"}
    with lowtide.apply(model, what, **regions) as handle:
        state = torch.get_rng_state()
        with pytest.raises(lowtide.CaptureError, match="need a CUDA device"):
            handle.capture(lambda x: model(x).mean(), x)
        assert torch.equal(state, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in model.parameters())
        model(x).mean().backward()


@without_gpu
def test_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = model_of_two()
    with lowtide.apply(model, Plan()) as handle:
        with pytest.raises(lowtide.CaptureError, match="the model is on cpu"):
            handle.capture(lambda x: model(x).mean(), torch.randn(2, 4))
        with pytest.raises(ValueError, match="max_graphs"):
            handle.capture(lambda x: model(x).mean(), torch.randn(2, 4), max_graphs=0)


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_numbers_are_filled_in_on_an_accelerator(make: Any) -> None:
    for number in (0.1, 3, True):
        plain = make(number, device="meta")
        with cuda_graph.NumbersFilledIn() as mode, OpNames() as ops:
            on_host, empty = make(number), make([], device="meta")
            assert not mode.has_filled
            found = make(number, device="meta")
            assert mode.has_filled
        assert ops.names[-1] == "full" and (found.shape, found.dtype) == (plain.shape, plain.dtype)
        assert on_host.item() == make(number).item() and empty.shape == (0,)
    with cuda_graph.NumbersFilledIn(), torch.device("meta"):
        assert make(0.5, dtype=torch.bfloat16).dtype == torch.bfloat16


class Pools:
    """Pools of plans that hold from some reserve on; each byte of reserve makes a plan slower."""

    def __init__(self, needed: int, *, budget: int = 1000, floor: int = 0, slowdown_per_byte: float = 0.001) -> None:
        self.captured: list[int] = []
        self._needed, self._budget, self._floor, self._slowdown = needed, budget, floor, slowdown_per_byte

    def capture(self, reserve: int) -> CapturedPlan:
        if self._budget - reserve < self._floor:
            raise lowtide.InfeasibleBudgetError("below the floor", self._floor)
        self.captured.append(reserve)
        over = lowtide.InfeasibleBudgetError("over", self._budget + 500) if reserve < self._needed else None
        return CapturedPlan(self._slowdown * reserve, over)


def test_a_pool_that_holds_is_captured_once() -> None:
    pools = Pools(0)
    assert least_reserve(pools.capture, 1000) == 0 and pools.captured == [0]


@pytest.mark.parametrize("needed", [1, 15, 16, 55, 99, 101, 150, 240])
def test_gaps_in_a_pool_cost_little_more_than_they_must(needed: int) -> None:
    """The excess of each capture, half the budget here, is not what the next plan gives up."""
    pools = Pools(needed)
    reserve = least_reserve(pools.capture, 1000)
    assert needed <= reserve <= max(15, needed + 40)
    assert pools.captured[-1] == reserve and len(pools.captured) <= 8


def test_no_further_captures_where_nothing_is_to_gain() -> None:
    pools = Pools(200, slowdown_per_byte=0.00001)
    assert least_reserve(pools.capture, 1000) == 250 and pools.captured == [0, 15, 40, 100, 250]


def test_the_smallest_plan_is_captured_before_a_budget_is_refused() -> None:
    pools = Pools(55, floor=940)
    assert least_reserve(pools.capture, 1000) <= 60 and 60 in pools.captured
    pools = Pools(70, floor=940)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="over"):
        least_reserve(pools.capture, 1000)
    assert pools.captured == [0, 15, 40, 60]
    with pytest.raises(lowtide.InfeasibleBudgetError, match="over"):
        least_reserve(Pools(2000).capture, 1000)


def test_a_pool_that_does_not_hold_a_second_time_is_refused() -> None:
    pools = Pools(240)
    least_reserve(pools.capture, 1000)
    last = len(pools.captured)
    pools.captured.clear()

    def capture(reserve: int) -> CapturedPlan:
        found = pools.capture(reserve)
        over = lowtide.InfeasibleBudgetError("over", 1500)
        return found._replace(over_budget=over) if len(pools.captured) == last else found

    with pytest.raises(lowtide.InfeasibleBudgetError, match="over"):
        least_reserve(capture, 1000)


def test_the_error_is_in_the_tree() -> None:
    assert issubclass(lowtide.CaptureError, lowtide.LowtideError)
    assert issubclass(lowtide.CaptureError, RuntimeError)


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


def test_batches_of_one_form() -> None:
    x = torch.randn(2, 3)
    for one, other in [
        ((x,), (x.clone(),)),
        ({"a": x, "b": [1, None]}, {"a": x + 1, "b": [1, None]}),
        (Batch(x), Batch(x * 2)),
    ]:
        assert batch_form(one) == batch_form(other)
        assert hash(batch_form(one)) == hash(batch_form(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)),
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        (Colour.RED, Colour.BLUE),
        (Batch(torch.zeros(2)), Batch(torch.zeros(2), 2.0)),
        ("a", b"a"),
    ],
)
def test_batches_of_two_forms(one: Any, other: Any) -> None:
    assert batch_form(one) != batch_form(other)


def test_arguments_that_nobody_can_compare_are_refused() -> None:
    with pytest.raises(lowtide.CaptureError, match="type Generator cannot be captured"):
        batch_form((torch.zeros(2), torch.Generator()))
    with pytest.raises(lowtide.CaptureError, match="plain tensors"):
        batch_form(torch.eye(3).to_sparse())


scale = 1.0
loss = 0  # a global with the name of an attribute that the function below reads


def test_values_that_a_step_reads() -> None:
    model, power = model_of_two(), 2

    def loss_fn(batch: Batch) -> Any:
        return (model(batch.x) ** power).mean().loss * scale  # type: ignore[attr-defined]

    facts = StepGuards(model, functools.partial(loss_fn))
    seen = [facts.values()]

    def has_changed() -> bool:
        seen.append(facts.values())
        return seen[-1] != seen[-2]

    assert not has_changed()
    power = 3
    assert has_changed()
    globals()["scale"] = 2.0
    assert has_changed()
    globals()["loss"] = 1
    assert not has_changed()
    model[1].p = 0.1
    assert has_changed()
    model.eval()
    assert has_changed()
    model(torch.randn(2, 4)).mean().backward()
    assert not has_changed()


def test_what_moved() -> None:
    model = model_of_two()
    facts = StepGuards(model, lambda x: model(x).mean())
    assert facts.what_moved() is None
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict(model.state_dict())
    assert facts.what_moved() is None
    model[0].bias.requires_grad_(False)
    assert facts.what_moved() == "0.bias became frozen"
    model[0].bias.requires_grad_(True)
    data = model[0].weight.data
    model[0].weight.data = data.clone()
    assert facts.what_moved() == "0.weight was replaced or moved"
    model[0].weight.data = data
    assert facts.what_moved() is None
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert facts.what_moved() == "parameters or buffers were added or removed"
    model.append(nn.Linear(4, 4))
    assert facts.what_moved() == "modules were added or replaced"


def test_numbers_that_a_step_changed() -> None:
    model = model_of_two()
    facts = StepGuards(model, lambda x: model(x).mean())
    before = facts.numbers()
    assert changed_value(before, facts.numbers()) is None
    model[1].p = 0.25
    assert changed_value(before, facts.numbers()) == "1.p from 0.5 to 0.25"


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: None, None),
        (lambda: torch.rand(1), "torch's CPU generator"),
        (lambda: random.random(), "Python's random"),
        (lambda: pytest.importorskip("numpy").random.rand(), "numpy"),
    ],
)
def test_draws_on_the_host(draw: Any, said: str | None) -> None:
    before = generator_states(None)
    draw()
    assert cuda_graph._drawn_on_host(before, generator_states(None)) == said


def test_the_users_line_is_the_innermost_outside_of_torch() -> None:
    import traceback

    with pytest.raises(RuntimeError) as caught:
        nn.Linear(3, 3)(torch.zeros(2, 2))  # this line
    found = cuda_graph._user_line(list(traceback.walk_tb(caught.value.__traceback__)))
    assert found is not None
    file, line = found
    assert file == __file__
    with open(file) as text:
        assert "# this line" in text.readlines()[line - 1]


def test_the_line_that_calls_an_op_is_the_users() -> None:
    class Lines(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(cuda_graph._present_line(sys._getframe(1)))
            return func(*args, **(kwargs or {}))

    def loss_fn(x: Tensor) -> Any:
        return wait(x)

    found: list[Any] = []
    wait, x = lambda x: x.item(), torch.ones(1)
    with Lines():
        loss_fn(x)
    assert found == [(__file__, wait.__code__.co_firstlineno)]


@pytest.mark.usefixtures("quick_search")
def test_a_graph_has_a_plan_of_its_own_with_a_smaller_peak_if_need_be() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)))
    batch = torch.randn(512, 32)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss_fn(batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    peak = lowtide.estimate(model, loss_fn, batch).peak_bytes
    with lowtide.fit(model, loss_fn, batch, budget=int(0.8 * peak), tune_s=0) as handle:
        fitted, decisions = handle.plan, handle.decisions
        peaks = []
        for missing in (0, peak // 10):
            planned = handle.plan_for_graph(loss_fn, (batch,), missing)
            with handle.under_graph_plan(planned) as plan:
                assert handle.plan is plan
                peaks.append(plan.peak_bytes)
                assert plan.peak_bytes <= int(0.8 * peak) - missing and not plan.moves
                loss_fn(batch).backward()
                assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))
                model.zero_grad()
        assert peaks[1] < peaks[0]
        with pytest.raises(lowtide.InfeasibleBudgetError):
            handle.plan_for_graph(loss_fn, (batch,), peak)
        assert handle.plan is fitted and handle.decisions is decisions
        assert handle.plans_for_graphs
        handle.ranks = SimpleNamespace(is_alone=False)  # type: ignore[assignment]
        assert not handle.plans_for_graphs
        with handle.under_graph_plan(handle.plan_for_graph(loss_fn, (batch,), peak)) as plan:
            assert plan is fitted


class FakePool:
    """A memory pool of graphs on the CPU. Each graph adds a segment, which stays until all graphs are freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handle: Any, sizes: list[int]) -> None:
        self.segments: list[int] = []
        self.captured: list[tuple[str, Plan, bool]] = []
        pool = self

        class FakeGraph:
            def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
                self.leaves = {id(each): each for each in model.parameters()}
                self.gradients = {key: torch.zeros_like(leaf) for key, leaf in self.leaves.items()}
                self.adding = None
                self._capture("fresh")

            def _capture(self, kind: str) -> None:
                pool.segments.append(sizes.pop(0))
                pool.captured.append((kind, handle.plan, handle.watch._is_paused))

            def prepare_to_add(self) -> None:
                self.adding = True
                self._capture("adding")

            def run(self, args: Any, *, adds: bool) -> Tensor:
                return torch.zeros(())

        def renew(step: Any) -> None:
            step._graphs.clear()
            self.segments.clear()

        def segments(step: Any) -> list[dict[str, Any]]:
            return [{"total_size": size, "allocated_size": size, "segment_type": "large"} for size in self.segments]

        monkeypatch.setattr(captured_step, "CapturedGraph", FakeGraph)
        monkeypatch.setattr(captured_step, "_refuse_devices", lambda model, args: None)
        monkeypatch.setattr(captured_step.CapturedStep, "_renew_pool", renew)
        monkeypatch.setattr(captured_step.CapturedStep, "_segments", segments)
        monkeypatch.setattr(captured_step.CapturedStep, "_outside_bytes", lambda step, replaced: 0)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.fixture
def fitted() -> Any:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)))
    batch = torch.randn(512, 32)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    peak = lowtide.estimate(model, loss_fn, batch).peak_bytes
    handle = lowtide.fit(model, loss_fn, batch, budget=int(0.8 * peak), tune_s=0)
    yield SimpleNamespace(handle=handle, loss_fn=loss_fn, batch=batch, model=model)
    handle.remove()


@pytest.mark.usefixtures("quick_search")
def test_gradients_are_added_under_the_plan_of_the_graph(monkeypatch: pytest.MonkeyPatch, fitted: Any) -> None:
    pool = FakePool(monkeypatch, fitted.handle, [1, 1])
    step = captured_step.CapturedStep(fitted.handle, fitted.loss_fn, (fitted.batch,), accumulate=True)
    step(fitted.batch)
    for parameter in fitted.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(fitted.batch)
    assert [(kind, is_paused) for kind, _, is_paused in pool.captured] == [("fresh", True), ("adding", True)]
    assert all(plan is step.plan for _, plan, _ in pool.captured) and fitted.handle.plan is not step.plan


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("kind", ["form", "adding"])
def test_a_further_graph_over_the_budget_leaves_a_pool_that_holds(
    monkeypatch: pytest.MonkeyPatch, fitted: Any, kind: str
) -> None:
    budget = fitted.handle.watch.budget_bytes
    pool = FakePool(monkeypatch, fitted.handle, [budget - 1, 2, budget - 1])
    step = captured_step.CapturedStep(fitted.handle, fitted.loss_fn, (fitted.batch,))
    fitted.loss_fn(fitted.batch).backward()
    step(fitted.batch[:8] if kind == "form" else fitted.batch, accumulate=kind == "adding")
    assert pool.segments == [] and step.num_graphs == 0
    for _ in range(2):
        step(fitted.batch)
        step(fitted.batch[:8] if kind == "form" else fitted.batch, accumulate=kind == "adding")
    assert pool.segments == [budget - 1] and step.peak_bytes == budget - 1


@pytest.mark.usefixtures("quick_search")
def test_room_of_the_pool_is_none_for_the_optimizer() -> None:
    model, batch = model_of_two(), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with lowtide.fit(model, lambda x: model(x).mean(), batch, budget="1GiB", optimizer=optimizer, tune_s=0) as handle:
        assert handle.watch.optimizer_workspace_bytes >= sum(each.nbytes for each in model.parameters())
        step = object.__new__(captured_step.CapturedStep)
        step._handle, step._device, step._segments = handle, torch.device("cuda"), list  # type: ignore[method-assign]
        to_come = handle.watch.missing_state_bytes() + handle.watch.optimizer_workspace_bytes
        if not torch.cuda.is_available():
            assert step._outside_bytes(0) == to_come
