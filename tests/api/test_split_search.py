"""`split=True`: what is split and into how many parts, budgets below the floor, and budgets that need no split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.api.measure import RealSteps, TracedStep
from lowtide.api.split_search import SplitSearch
from lowtide.eager.replanning import Limits
from lowtide.errors import PlanError
from lowtide.plans import Split
from lowtide.simulator import simulate
from lowtide.tracing.trace import trace_once

pytestmark = pytest.mark.usefixtures("quick_search")

WORDS, WIDTH, LENGTH = 1500, 16, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(x)


class Language(nn.Module):
    """A language model whose loss fills the step."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(batch: int = 1, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Any:
    def loss_fn(ids: Tensor) -> Tensor:
        logits = model(ids).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss_fn


@pytest.fixture(scope="module")
def model() -> Language:
    torch.manual_seed(0)
    return Language()


@pytest.fixture(scope="module")
def floor(model: Language) -> int:
    """The smallest peak without splits."""
    return lowtide.estimate(model, loss_of(model), tokens()).floor_bytes


def gradients(model: nn.Module, loss_fn: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss_fn(ids).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_a_budget_below_the_floor_is_held_and_measured(model: Language, floor: int) -> None:
    ids, loss_fn = tokens(), loss_of(model)
    budget = int(0.6 * floor)
    plain = gradients(model, loss_fn, ids)
    with lowtide.fit(model, loss_fn, ids, budget=budget, split=True, tune_s=0, time_limit_s=1) as handle:
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
        assert [split.path for split in handle.plan.splits] == ["head"]
        for one, other in zip(gradients(model, loss_fn, ids), plain, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
        (split,) = handle.stats().splits
        assert split.num_calls > 0 and split.num_whole == 0
        assert "head and the loss in" in str(handle) and "1 modules in parts" in str(handle.stats())
        handle.enabled = False
        assert all(map(torch.equal, gradients(model, loss_fn, ids), plain))
    assert all(map(torch.equal, gradients(model, loss_fn, ids), plain))


def test_an_infeasible_budget_says_what_split_would_reach(model: Language, floor: int) -> None:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.plan(model, loss_of(model), tokens(), budget=int(0.6 * floor))
    first, *_ = str(caught.value).splitlines()
    assert first.endswith("with split=True") and caught.value.floor_bytes == floor
    with pytest.raises(lowtide.InfeasibleBudgetError, match="with split=True"):
        lowtide.max_batch(model, loss_of(model), tokens, budget=int(0.6 * floor), max_samples=1)
    reached = lowtide.estimate(model, loss_of(model), tokens(), split=True)
    assert reached.split_floor_bytes is not None and reached.split_floor_bytes < 0.6 * floor
    assert "with split=True" in str(reached)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.plan(model, loss_of(model), tokens(), budget=int(0.9 * reached.split_floor_bytes), split=True)
    assert caught.value.floor_bytes < floor


def test_a_budget_that_needs_no_split_gives_the_same_plan(model: Language) -> None:
    plans = [lowtide.plan(model, loss_of(model), tokens(), budget="1GiB", split=split) for split in (False, True)]
    assert plans[0].is_plain and plans[1].is_plain and not plans[1].splits


def test_a_plan_with_splits_is_data(model: Language, floor: int, tmp_path: Path) -> None:
    plan = lowtide.plan(model, loss_of(model), tokens(), budget=int(0.6 * floor), split=True)
    again = lowtide.Plan.from_json(plan.to_json())
    assert again == plan and again.splits == plan.splits and again.graph is not None
    assert again.graph.splits == plan.splits
    assert simulate(again.graph, again).peak_bytes == plan.peak_bytes
    with pytest.raises(PlanError, match="in parts"):
        simulate(lowtide.trace(model, loss_of(model), tokens()), plan)
    assert "runs in" in plan.explain("head")
    plan.report(tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "Alternatives and curves are compared with the step in parts" in text
    saved = 1 - plan.peak_bytes / plan.plain_peak_bytes
    assert f"{100 * saved:.1f} % less than the plain step; {100 * plan.slowdown:.1f} % slower predicted" in text
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PlanError):
        lowtide.apply(other, plan)


def test_token_wise_modules_are_split_where_the_loss_is_not_enough() -> None:
    torch.manual_seed(0)
    model = Language(words=32)
    ids, loss_fn = tokens(1, words=32), loss_of(model)
    graph = lowtide.trace(model, loss_fn, ids)
    search = SplitSearch(TracedStep(model, loss_fn, [(ids,)], None, graph), Limits(split=True))
    assert search.floor_bytes < 0.8 * lowtide.estimate(model, loss_fn, ids).floor_bytes
    budget = int(1.05 * search.floor_bytes)
    plain = gradients(model, loss_fn, ids)
    with lowtide.fit(model, loss_fn, ids, budget=budget, split=True, tune_s=0, time_limit_s=1) as handle:
        assert {split.path for split in handle.plan.splits if split.kind == "tokens"} == {
            "blocks.0.mlp",
            "blocks.1.mlp",
        }
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
        for one, other in zip(gradients(model, loss_fn, ids), plain, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_few_traces_are_made(model: Language, floor: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the split step: one that also finds what can be split, and one with as few parts as will do."""
    traces: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return trace_once(*args, **kwargs)

    monkeypatch.setattr("lowtide.api.split_search.trace_once", counted)
    monkeypatch.setattr("lowtide.api.split_search.trace", None)  # no real steps, though the plain step was measured
    graph = lowtide.trace(model, loss_of(model), tokens(), mode="real")
    step = TracedStep(model, loss_of(model), [(tokens(),)], None, graph)
    search = SplitSearch(step, Limits(split=True, time_limit_s=1))
    plan = search.solve(int(share * floor))
    assert plan.splits and len(traces) <= 2
    search.solve(int((share + 0.05) * floor))
    assert len(traces) <= 3


def test_what_was_measured_corrects_plans_with_splits_too(model: Language, floor: int) -> None:
    """As `max_batch` needs it: its graphs are predicted, and it solves again where a step took more than that."""
    budget, missing_bytes = int(0.8 * floor), floor // 10
    search = SplitSearch(
        TracedStep(
            model, loss_of(model), [(tokens(),)], None, lowtide.trace(model, loss_of(model), tokens(), mode="fake")
        ),
        Limits(split=True, time_limit_s=1),
    )
    search.correct(missing_bytes)
    plan = search.solve(budget)
    assert plan.splits
    assert simulate(search.graph(plan.splits), plan).peak_bytes + missing_bytes == plan.peak_bytes <= budget


def test_logits_that_are_read_are_not_split() -> None:
    torch.manual_seed(0)
    model = Language()

    def loss_fn(ids: Tensor) -> Tensor:
        logits = model(ids)
        hits = (logits.argmax(-1) == ids).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) * (1 + 0 * hits)

    graph = lowtide.trace(model, loss_fn, tokens())
    search = SplitSearch(TracedStep(model, loss_fn, [(tokens(),)], None, graph), Limits(split=True))
    assert not any(split.kind == "loss" for plan in search.plans(1 << 20) for split in plan.splits)
    assert not search._rows["loss"]


def test_larger_inputs_are_planned_for_with_the_same_splits(model: Language, floor: int) -> None:
    loss_fn = loss_of(model)
    with lowtide.fit(model, loss_fn, tokens(), budget=int(0.9 * floor), split=True, tune_s=0, time_limit_s=1) as handle:
        plain_splits = handle.plan.splits
        loss_fn(tokens(2)).backward()
        (replan,) = handle.stats().replans
        assert replan.is_new and handle.plan.splits == plain_splits
        assert handle.plan.input_shapes == ((2, LENGTH),)
        assert handle.plan.peak_bytes < 2 * floor  # the parts of the loss are not all there at once
    model.zero_grad()


@pytest.mark.slow
def test_the_largest_batch_grows_with_split(model: Language, floor: int) -> None:
    options: dict[str, Any] = {"budget": int(1.2 * floor), "confirm": False, "max_samples": 4, "time_limit_s": 0.5}
    plain = lowtide.max_batch(model, loss_of(model), tokens, **options)
    split = lowtide.max_batch(model, loss_of(model), tokens, **options, split=True)
    assert split >= 2 * plain and split.plan.splits


def test_a_fit_with_splits_is_remembered(model: Language, floor: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "budget": int(0.6 * floor),
        "split": True,
        "tune_s": 0,
        "time_limit_s": 1,
        "cache": tmp_path / "fit.json",
    }
    replanned_bytes = []
    for _ in range(2):
        with lowtide.fit(model, loss_of(model), tokens(), **options) as handle:
            plan, names = handle.plan, [trial.name for trial in handle.candidates]
            handle.report(tmp_path / "report.md")
            loss_of(model)(tokens(2)).backward()
            replanned_bytes.append(handle.plan.peak_bytes)
            model.zero_grad()
        assert plan.graph is not None and plan.graph.splits == plan.splits != ()
        assert simulate(plan.graph, plan).peak_bytes == plan.peak_bytes
    assert names == ["kept before"] and len(set(replanned_bytes)) == 1


@pytest.mark.parametrize("split", [True, False])
def test_no_candidate_is_on_the_model_while_the_split_step_is_traced(
    model: Language, floor: int, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one from the cache, which does not hold any more, nor those before the hint of what split reaches."""
    file, budget, honest, num_traced = tmp_path / "fits.json", int(0.6 * floor), SplitSearch._traced, 0

    def traced(search: SplitSearch) -> Any:
        nonlocal num_traced
        num_traced += 1
        with pytest.raises(lowtide.LowtideError):
            lowtide.handle_of(model)
        return honest(search)

    monkeypatch.setattr(SplitSearch, "_traced", traced)
    loss_fn = loss_of(model)
    if split:
        lowtide.fit(model, loss_fn, tokens(), budget=budget, split=True, cache=file, tune_s=0).remove()
        measured, excess = RealSteps.measured, [budget]
        monkeypatch.setattr(
            RealSteps, "measured", lambda steps: (measured(steps)[0] + (excess.pop() if excess else 0), 1.0)
        )
        lowtide.fit(model, loss_fn, tokens(), budget=budget, split=True, cache=file, tune_s=0).remove()
    else:
        texts = []
        for verb in (lowtide.plan, lowtide.fit):
            with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
                verb(model, loss_fn, tokens(), budget=budget)
            texts.append(str(caught.value).partition("Plans near it")[0].strip())
        assert texts[0] == texts[1]
    assert num_traced


def test_split_is_yes_or_no(model: Language) -> None:
    with pytest.raises(TypeError, match="split is True or False"):
        lowtide.plan(model, loss_of(model), tokens(), budget="1GiB", split=8)  # type: ignore[arg-type]
    with pytest.raises(lowtide.errors.GraphError, match="at least one"):
        Split("head", 0)
