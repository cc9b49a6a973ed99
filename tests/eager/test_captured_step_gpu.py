"""`handle.capture` on a CUDA device: a captured step is the eager step, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.eager.captured_step import CapturedStep
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from lowtide.tracing.devices import EngineCosts

pytestmark = pytest.mark.gpu

WIDTH, LENGTH, BATCH, LAYERS, WORDS = 64, 32, 4, 6, 128


class Attention(nn.Module):
    """Of single matrix products, whose kernels give the same bits each time."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(self.dropout((q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)) @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT().cuda()


def tokens(number: int = 0, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (batch, length), generator=generator).cuda()


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss_fn(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return loss_fn


def seen(model: nn.Module) -> list[Tensor]:
    """Everything a step may change, by value."""
    gradients = [p.grad.clone() if p.grad is not None else torch.zeros(0) for p in model.parameters()]
    tensors = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*gradients, *tensors, torch.cuda.get_rng_state(), torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(model: nn.Module, step: Callable[..., Tensor], batches: list[Any], kind: str) -> list[list[Tensor]]:
    """What is there after each step of a training loop."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if kind == "SGD" else torch.optim.AdamW(model.parameters())
    torch.manual_seed(7)
    found = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch)
        found.append([loss.detach(), *seen(model)])
        optimizer.step()
    return found


def eagerly(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def step(*batch: Any) -> Tensor:
        loss = loss_fn(*batch)
        loss.backward()
        return loss.detach()

    return step


def segment(first: int, last: int) -> Recompute:
    return Recompute(f"layers.{first}", more=tuple((f"layers.{layer}", 0) for layer in range(first + 1, last + 1)))


def blocks(*layers: int) -> tuple[Recompute, ...]:
    return tuple(Recompute(f"layers.{layer}") for layer in layers)


PLANS: dict[str, tuple[Recompute, ...]] = {
    "plain": (),
    "every block": blocks(*range(LAYERS)),
    "every second": blocks(0, 2, 4),
    "nested": (*blocks(1, 2), Recompute("layers.1.mlp"), Recompute("layers.2.attention"), Recompute("layers.4.mlp")),
    "segments": (segment(0, 2), segment(3, 5)),
    "segments in segments": (segment(0, 5), segment(1, 3), Recompute("layers.2"), Recompute("layers.4.mlp")),
    "everything": (Recompute(""), *blocks(0, 1)),
}


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", PLANS)
def test_five_steps(name: str, kind: str) -> None:
    model, batches = gpt(), [tokens(number) for number in range(5)]
    reference = copy.deepcopy(model)
    expected = trained(reference, eagerly(loss_of(reference)), batches, kind)
    with lowtide.apply(model, Plan(regions=PLANS[name])) as handle:
        before = seen(model)
        step = handle.capture(loss_of(model), batches[0])
        assert same(before, seen(model))
        found = trained(model, step, batches, kind)
    assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True] * 5


def floor_and_peak(graph: lowtide.StepGraph) -> tuple[int, int]:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(graph, 1)
    return caught.value.floor_bytes, simulate(graph).peak_bytes


def test_plans_for_random_budgets() -> None:
    """With retained ops among them."""
    reference, batches = gpt(), [tokens(number) for number in range(5)]
    expected = trained(reference, eagerly(loss_of(reference)), batches, "AdamW")
    graph = lowtide.trace(reference, loss_of(reference), batches[0])
    # A device that limits and a host that costs nothing: there it pays to retain outputs.
    ops = tuple(dataclasses.replace(op, host_s=0.0) for op in graph.ops)
    hardware = dataclasses.replace(graph.hardware, **EngineCosts()._asdict())
    graph = dataclasses.replace(graph, ops=ops, hardware=hardware, step_s=sum(op.seconds for op in ops))
    floor, peak = floor_and_peak(graph)
    generator, num_retained = random.Random(0), 0
    for _ in range(6):
        model = gpt()
        plan = lowtide.solve(graph, generator.randint(floor, peak), time_limit_s=1.0)
        num_retained += any(region.keep_ops for region in plan.regions)
        with lowtide.apply(model, plan) as handle:
            step = handle.capture(loss_of(model), batches[0])
            assert all(map(same, trained(model, step, batches, "AdamW"), expected))
    assert num_retained


def test_fitted_steps_are_within_their_budget_or_refused() -> None:
    model, batch = gpt(), tokens(batch=256)
    optimizer, loss_fn = torch.optim.AdamW(model.parameters()), loss_of(model)
    loss_fn(batch).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    floor, peak = floor_and_peak(lowtide.trace(model, loss_fn, batch, optimizer=optimizer))
    held = []
    for share in (0.2, 0.5, 0.8, 1.2, 2.0):
        budget = floor + int(share * (peak - floor)) + (96 << 20)  # for workspaces of one more stream
        with lowtide.fit(model, loss_fn, batch, budget=budget, optimizer=optimizer, time_limit_s=1.0) as handle:
            try:
                step = handle.capture(loss_fn, batch)
            except lowtide.InfeasibleBudgetError as error:
                assert error.floor_bytes > budget
                continue
            held.append(share)
            assert step.peak_bytes <= budget
            assert step.plan is not None and step.plan.peak_bytes <= budget
            step(batch)
            optimizer.step()
            step(batch)
            model.zero_grad(set_to_none=True)
            outside = torch.cuda.memory_allocated()
            assert outside + step.pool_bytes - sum(p.nbytes for p in model.parameters()) <= budget
    assert {0.8, 1.2, 2.0} <= set(held)


def test_a_graph_over_its_budget_is_captured_again_in_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here only the first graph is said to be over. The second pool begins with the room that the budget leaves."""
    model, batches = gpt(), [tokens(number) for number in range(3)]
    reference = copy.deepcopy(model)
    expected = trained(reference, eagerly(loss_of(reference)), batches, "AdamW")
    measure, peaks = CapturedStep._measure, []

    def over_at_first(step: CapturedStep) -> None:
        measure(step)
        peaks.append(step.peak_bytes)
        if len(peaks) == 1:
            raise lowtide.InfeasibleBudgetError("over", step.peak_bytes)

    monkeypatch.setattr(CapturedStep, "_measure", over_at_first)
    budget = 2 * lowtide.estimate(model, loss_of(model), batches[0]).peak_bytes + (96 << 20)
    with lowtide.fit(model, loss_of(model), batches[0], budget=budget) as handle:
        step = handle.capture(loss_of(model), batches[0])
        assert len(peaks) == 2 and peaks[0] < peaks[1] <= budget
        sizes = [each["total_size"] for each in step._segments() if each["segment_type"] == "large"]
        assert len(sizes) == 1 and peaks[1] > budget - (8 << 20)
        assert all(map(same, trained(model, step, batches, "AdamW"), expected))
        allocated = torch.cuda.memory_reserved()
        step.release()
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= allocated - sizes[0]


@pytest.mark.parametrize("is_other", [False, True])
def test_another_path_while_a_stream_is_capturing_is_said(is_other: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = gpt(), tokens(batch=256)

    def loss_fn(ids: Tensor) -> Tensor:
        logits = model(ids)
        if is_other and torch.cuda.is_current_stream_capturing():
            logits = (logits * 2).sigmoid()  # saves its output
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle, caplog.at_level(logging.WARNING):
        handle.capture(loss_fn, ids).release()
    assert ("takes another path" in caplog.text) is is_other


def test_a_fitted_step_with_host_memory_is_captured_without_moves() -> None:
    model, ids = gpt(), tokens(batch=64)
    reference = copy.deepcopy(model)
    expected = trained(reference, eagerly(loss_of(reference)), [ids] * 3, "SGD")
    floor, peak = floor_and_peak(lowtide.trace(model, loss_of(model), ids))
    budget = (floor + peak) // 2 + (96 << 20)
    with lowtide.fit(model, loss_of(model), ids, budget=budget, host="1GiB", tune_s=0) as handle:
        step = handle.capture(loss_of(model), ids)
        assert step.plan is not None and not step.plan.moves
        assert all(map(same, trained(model, step, [ids] * 3, "SGD"), expected))


def test_peak_and_budget() -> None:
    model, batch = gpt().train(), tokens(batch=256)
    loss_fn = loss_of(model)
    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        handle.capture(loss_fn, batch).release()  # the stream has its workspaces from then on
        gc.collect()
        torch.cuda.empty_cache()
        outside = torch.cuda.memory_allocated()
        eager = lowtide.measure(lambda: loss_fn(batch).backward(), repeat=3).total_peak_bytes
        model.zero_grad(set_to_none=True)
        step = handle.capture(loss_fn, batch)
        assert step.pool_bytes + outside <= step.peak_bytes <= step.pool_bytes + outside + (80 << 20)
        assert step.peak_bytes >= eager - (2 << 20)
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        assert torch.cuda.max_memory_allocated() <= step.peak_bytes
        kept = torch.cuda.memory_reserved()
        step.release()
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= kept - step.pool_bytes + (4 << 20)
        with pytest.raises(lowtide.CaptureError, match="capture again"):
            step(batch)
    with lowtide.fit(model, loss_fn, batch, budget="60GiB") as handle:
        handle.watch.budget_bytes = step.peak_bytes // 2  # type: ignore[union-attr]
        before, allocated = seen(model), torch.cuda.memory_allocated()
        with pytest.raises(lowtide.InfeasibleBudgetError, match="memory pool of 1 graph,") as caught:
            handle.capture(loss_fn, batch)
        assert caught.value.floor_bytes > step.peak_bytes // 2
        del caught
        assert same(before, seen(model))
        gc.collect()
        assert torch.cuda.memory_allocated() <= allocated + (1 << 20)


def test_a_batch_of_many_rows() -> None:
    """For which some kernels add in any order: what eager steps agree on, on two streams, the captured one has too."""
    model, ids = gpt(), tokens(batch=256)

    def run(step: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        return [step(ids), *seen(model)]

    eager = [run(eagerly(loss_of(model))) for _ in range(3)]
    with torch.cuda.stream(torch.cuda.Stream()):
        eager.append(run(eagerly(loss_of(model))))
    torch.cuda.synchronize()
    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        captured = run(handle.capture(loss_of(model), ids))
    agreed = [all(torch.equal(value, first) for value in values) for first, *values in zip(*eager, strict=True)]
    found = [torch.equal(one, other) for one, other in zip(captured, eager[0], strict=True)]
    assert [n for n, is_agreed in enumerate(agreed) if is_agreed and not found[n]] == []
    assert agreed[0]
    assert agreed[-2:] == [True, True]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("regions", [(), blocks(0, 1, 2), (segment(0, 2),)])
def test_batch_norm(regions: tuple[Recompute, ...]) -> None:
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model = Normed().cuda()
    reference, batches = copy.deepcopy(model), [torch.randn(4, 8, 16, 16, device="cuda") for _ in range(5)]
    expected = trained(reference, eagerly(lambda x: reference(x).square().mean()), batches, "SGD")
    with lowtide.apply(model, Plan(regions=regions)) as handle:
        step = handle.capture(lambda x: model(x).square().mean(), batches[0])
        found = trained(model, step, batches, "SGD")
    torch.backends.cudnn.deterministic = False
    assert all(map(same, found, expected))
    assert model.layers[0][1].num_batches_tracked == 5


def accumulated(model: nn.Module, step: Callable[..., Tensor], batches: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    return [*(step(batch) for batch in batches), *seen(model)]


def test_gradients_add_up() -> None:
    model, batches = gpt(), [tokens(number) for number in range(4)]
    mixed = [tokens(0), tokens(1, length=16), tokens(2), tokens(3, length=16)]
    reference = copy.deepcopy(model)
    expected = accumulated(reference, eagerly(loss_of(reference)), batches)
    with lowtide.apply(model, Plan(regions=PLANS["nested"])) as handle:
        step = handle.capture(loss_of(model), batches[0], accumulate=True)
        assert same(accumulated(model, step, batches), expected)
        assert same(accumulated(model, step, batches), expected)
        # Among batches of two forms, whose graphs share memory; and on top of gradients from elsewhere.
        assert same(accumulated(model, step, mixed), accumulated(reference, eagerly(loss_of(reference)), mixed))
        for parameters in (model.parameters(), reference.parameters()):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(1)
        ours = [step(batches[1], accumulate=True), *seen(model)]
        torch.manual_seed(1)
        assert same(ours, [eagerly(loss_of(reference))(batches[1]), *seen(reference)])
        torch.manual_seed(1)
        fresh = [step(batches[1], accumulate=False), *seen(model)]
        reference.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        assert same(fresh, [eagerly(loss_of(reference))(batches[1]), *seen(reference)])


def test_gradients_from_before_and_losses_are_kept() -> None:
    model, batch = gpt(), tokens()
    loss_fn = loss_of(model)
    loss_fn(batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]  # type: ignore[union-attr]
    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        step = handle.capture(loss_fn, batch)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        assert same(gradients, values)  # type: ignore[arg-type]
        losses = [step(tokens(number)) for number in range(3)]
        assert len({loss.item() for loss in losses}) == 3
        assert not any(loss.requires_grad for loss in losses)
        assert same(gradients, values)  # type: ignore[arg-type]
        assert all(p.grad is not gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        # Zeroed in place or not: the next step's are fresh.
        torch.manual_seed(1)
        step(batch)
        expected = seen(model)
        model.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        step(batch)
        assert same(seen(model), expected)


def test_other_forms(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    batches = [tokens(0), tokens(1, 2), tokens(2, 2, 16), tokens(3), tokens(4, 3), tokens(5, 3), tokens(6, 2)]
    reference = copy.deepcopy(model)
    expected = trained(reference, eagerly(loss_of(reference)), batches, "SGD")
    with lowtide.apply(model, Plan(regions=PLANS["segments"])) as handle, caplog.at_level(logging.WARNING, "lowtide"):
        step = handle.capture(loss_of(model), batches[0], max_graphs=3)
        found = trained(model, step, batches, "SGD")
        assert step.num_graphs == 3
    assert all(map(same, found, expected))
    assert sum("max_graphs" in record.message for record in caplog.records) == 1


def test_python_numbers_are_never_stale() -> None:
    model, ids = gpt(), tokens()
    options = {"scale": 1.0}

    def loss_fn(batch: dict[str, Any], scale: float) -> Tensor:
        return loss_of(model)(batch["ids"]) * scale

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        step = handle.capture(loss_fn, {"ids": ids, "name": "a"}, 1.0)
        for scale in (1.0, 2.0, 3.0, 1.0, 5.0, 6.0, 7.0):
            torch.manual_seed(1)
            found = [step({"ids": ids, "name": "a"}, scale), *seen(model)]
            model.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            assert same(found, [eagerly(loss_fn)({"ids": ids, "name": "a"}, scale), *seen(model)])
        with pytest.raises(lowtide.CaptureError, match="type object"):
            step({"ids": ids, "name": object()}, 1.0)
    assert options


def test_variables_and_attributes_are_never_stale() -> None:
    model, ids, scale = gpt(), tokens(), 1.0

    def loss_fn(ids: Tensor) -> Tensor:
        return loss_of(model)(ids) * scale

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        step = handle.capture(loss_fn, ids)

        def is_right() -> bool:
            torch.manual_seed(1)
            found = [step(ids), *seen(model)]
            model.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            return same(found, [eagerly(loss_fn)(ids), *seen(model)])

        assert is_right()
        scale = 3.0
        assert is_right()
        model.layers[2].dropout.p = 0.5
        assert is_right()
        model.eval()
        assert is_right()
        model.train()
        assert is_right()
        assert step.num_graphs == 4


def test_numbers_made_on_the_device_are_captured() -> None:
    model, ids = gpt(), tokens()

    def loss_fn(ids: Tensor) -> Tensor:
        penalty = torch.tensor(0.1, device=ids.device) * model.head.weight.square().mean()
        return loss_of(model)(ids) + penalty + torch.as_tensor(1, device=ids.device)

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        step = handle.capture(loss_fn, ids)
        torch.manual_seed(1)
        found = [step(ids), *seen(model)]
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        assert same(found, [eagerly(loss_fn)(ids), *seen(model)])


LINES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.max().item(),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x),
    "if": lambda x: 1 if x.sum() > 0 else 0,
}


@pytest.mark.parametrize("name", LINES)
def test_what_waits_for_the_device_is_refused_by_line(name: str) -> None:
    model, ids = gpt(), tokens()

    def loss_fn(ids: Tensor) -> Tensor:
        logits = model(ids)
        LINES[name](logits)
        return logits.square().mean()

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        eagerly(loss_fn)(ids)
        before = seen(model)
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with pytest.raises(lowtide.CaptureError) as caught:
            handle.capture(loss_fn, ids)
        message = str(caught.value)
        del caught
        assert "test_captured_step_gpu.py:" in message
        assert f'"{name}": lambda x: ' in message or "LINES[name]" in message
        assert "aten." in message or name == "print"  # which switches dispatch modes off
        assert same(before, seen(model))
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
        assert torch.cuda.memory_reserved() <= reserved + (64 << 20)
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        eagerly(loss_fn)(ids)
        step = handle.capture(loss_of(model), ids)
        step(ids)


def test_a_line_in_a_module_is_named() -> None:
    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.detach().abs().max())

    model = nn.Sequential(nn.Linear(8, 8), Waits()).cuda()
    x = torch.randn(4, 8, device="cuda")
    with (
        lowtide.apply(model, Plan(regions=(Recompute("1"),))) as handle,
        pytest.raises(lowtide.CaptureError, match=r"return x \* float"),
    ):
        handle.capture(lambda x: model(x).mean(), x)


def test_errors_of_the_loss_are_its_own() -> None:
    model, ids = gpt(), tokens()
    own = KeyError("mine")

    def loss_fn(ids: Tensor) -> Tensor:
        model(ids)
        raise own

    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        before = seen(model)
        with pytest.raises(KeyError) as caught:
            handle.capture(loss_fn, ids)
        assert caught.value is own
        assert same(before, seen(model))
        with pytest.raises(TypeError, match="not a tensor"):
            handle.capture(lambda ids: model(ids).mean().item(), ids)
        assert same(before, seen(model))


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(16, 16), torch.Generator("cuda").manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, device=x.device, generator=self.generator)
        return nn.functional.dropout(self.linear(x) * noise, 0.3)


def test_generators_end_where_eager_steps_leave_them() -> None:
    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Noisy() for _ in range(4))).cuda()
        x = torch.randn(8, 16, device="cuda")

        def loss_fn(x: Tensor, model: nn.Module = model) -> Tensor:
            return model(x).square().mean()

        with lowtide.apply(model, Plan(regions=tuple(Recompute(str(n)) for n in range(4)))) as handle:
            torch.manual_seed(2)
            step = handle.capture(loss_fn, x) if captured else eagerly(loss_fn)
            assert torch.cuda.default_generators[0].get_offset() == 0
            rows = []
            for number in range(3):
                if number == 2:
                    torch.manual_seed(11)
                model.zero_grad(set_to_none=True)
                rows += [step(x), *seen(model), *(layer.generator.get_state() for layer in model)]
                torch.rand(3, device="cuda")
            rows.append(torch.tensor(torch.cuda.default_generators[0].get_offset()))
        found.append(rows)
    assert same(*found)
    assert found[0][-1] > 0


def test_random_numbers_that_a_graph_would_freeze() -> None:
    model, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    draws: dict[str, Callable[[], Any]] = {"CPU": lambda: torch.rand(()), "Python": random.random}
    with lowtide.apply(model, Plan()) as handle:
        for name, draw in draws.items():

            def loss_fn(x: Tensor, draw: Callable[[], Any] = draw) -> Tensor:
                return model(x).mean() if draw() > -1 else x.sum()

            with pytest.raises(lowtide.CaptureError, match=name):
                handle.capture(loss_fn, x)
            handle.capture(loss_fn, x, ignore_host_draws=True)(x)


@pytest.mark.parametrize("own", [lowtide.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)])
def test_a_checkpoint_of_ones_own_that_draws(own: Callable[..., Tensor]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    x = torch.randn(1024, 64, device="cuda")
    with lowtide.apply(model, Plan()) as handle:
        step = handle.capture(lambda x: own(model, own(model, x)).square().mean(), x)
        torch.manual_seed(1)
        found = [step(x), *seen(model)]
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        assert same(found, [eagerly(lambda x: model(model(x)).square().mean())(x), *seen(model)])


def test_a_step_that_seeds_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda(), torch.randn(4, 8, device="cuda")
    seed = torch.cuda.initial_seed()

    def loss_fn(x: Tensor) -> Tensor:
        torch.cuda.manual_seed(seed)
        return model(x).mean()

    with lowtide.apply(model, Plan()) as handle, pytest.raises(lowtide.CaptureError, match=r"random numbers|seeds"):
        handle.capture(loss_fn, x)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.by_length = nn.Linear(16, 16), None, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(16, device=x.device).float().sin()
        if len(x) not in self.by_length:
            self.by_length[len(x)] = torch.arange(len(x), device=x.device).float().cos()
        return self.linear(x) * self.cache + self.by_length[len(x)][:, None]


def test_caches_that_the_step_fills() -> None:
    torch.manual_seed(0)
    model, x = Remembers().cuda(), torch.randn(8, 16, device="cuda")
    reference = copy.deepcopy(model)
    with lowtide.apply(model, Plan(regions=(Recompute("linear"),))) as handle:
        step = handle.capture(lambda x: model(x).square().mean(), x)
        assert model.cache is None
        assert not model.by_length
        for _ in range(3):
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))  # what was freed is used for something else
            torch.empty(16, device="cuda").fill_(float("nan"))
            found = [step(x), *seen(model)]
            reference.zero_grad(set_to_none=True)
            assert same(found, [eagerly(lambda x: reference(x).square().mean())(x), *seen(reference)])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


def test_counting_in_python_is_refused() -> None:
    model, x = nn.Sequential(Counts()).cuda(), torch.randn(4, 8, device="cuda")
    with lowtide.apply(model, Plan()) as handle:
        with pytest.raises(lowtide.CaptureError, match=r"0\.calls from 0 to 1"):
            handle.capture(lambda x: model(x).mean(), x)
        assert model[0].calls == 0
        with pytest.raises(lowtide.CaptureError, match="batch in place"):
            handle.capture(lambda x: model[0].linear(x.mul_(2)).mean(), x)
        with pytest.raises(lowtide.CaptureError, match="requires gradients"):
            handle.capture(lambda x: model(x).mean(), x.clone().requires_grad_())


@pytest.fixture
def captured() -> Iterator[tuple[GPT, Any, Any, Tensor]]:
    model, ids = gpt(), tokens()
    with lowtide.apply(model, Plan(regions=PLANS["every second"])) as handle:
        yield model, handle, handle.capture(loss_of(model), ids), ids


def test_parameters_elsewhere(captured: tuple[GPT, Any, Any, Tensor]) -> None:
    model, _, step, ids = captured
    model.head.weight.requires_grad_(False)
    with pytest.raises(lowtide.CaptureError, match=r"head\.weight became frozen.*capture again"):
        step(ids)
    model.head.weight.requires_grad_(True)
    step(ids)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(lowtide.CaptureError, match=r"head\.weight was replaced or moved"):
        step(ids)
    model.head = copy.deepcopy(model.head)
    with pytest.raises(lowtide.CaptureError, match="modules were added or replaced"):
        step(ids)


def test_loaded_weights_are_used(captured: tuple[GPT, Any, Any, Tensor]) -> None:
    model, _, step, ids = captured
    model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()})
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    found = [step(ids), *seen(model)]
    torch.manual_seed(1)
    assert same(found, [eagerly(loss_of(reference))(ids), *seen(reference)])


def test_switched_off_and_removed(captured: tuple[GPT, Any, Any, Tensor]) -> None:
    model, handle, step, ids = captured
    torch.manual_seed(1)
    expected = [step(ids), *seen(model)]
    handle.enabled = False
    replays = handle.stats().num_replays
    torch.manual_seed(1)
    assert same([step(ids), *seen(model)], expected)
    assert handle.stats().num_replays == replays
    handle.enabled = True
    with torch.no_grad(), pytest.raises(lowtide.CaptureError, match="switched off"):
        step(ids)
    with pytest.raises(lowtide.CaptureError, match="cannot be copied"):
        copy.deepcopy(step)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    assert same([eagerly(loss_of(reference))(ids), *seen(reference)], expected)
    torch.manual_seed(1)
    assert same([step(ids), *seen(model)], expected)
    handle.remove()
    with pytest.raises(lowtide.CaptureError, match="removed"):
        step(ids)


def test_refit() -> None:
    model, ids = gpt(), tokens()
    handle = lowtide.fit(model, loss_of(model), ids, budget="8GiB")
    step = handle.capture(loss_of(model), ids)
    step(ids)
    handle.refit()
    with pytest.raises(lowtide.CaptureError, match="refit"):
        step(ids)
    handle.capture(loss_of(model), ids)(ids)
    handle.remove()


@pytest.mark.parametrize("outside", [True, False])
def test_autocast(outside: bool) -> None:
    model, batches = gpt(), [tokens(number) for number in range(4)]
    reference = copy.deepcopy(model)

    def cast(of: nn.Module) -> Callable[[Tensor], Tensor]:
        def loss_fn(ids: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=torch.is_autocast_enabled("cuda") or not outside):
                return nn.functional.cross_entropy(of(ids).flatten(0, 1).float(), ids.flatten())

        return loss_fn

    with torch.autocast("cuda", torch.bfloat16, enabled=outside, cache_enabled=False):
        expected = trained(reference, eagerly(cast(reference)), batches, "SGD")
    with lowtide.apply(model, Plan(regions=PLANS["nested"])) as handle:
        with torch.autocast("cuda", torch.bfloat16, enabled=outside):
            step = handle.capture(cast(model), batches[0])
            found = trained(model, step, batches, "SGD")
        assert all(map(same, found, expected))
        if outside:  # without it, another graph
            torch.manual_seed(1)
            ours = [step(batches[0]), *seen(model)]
            reference.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            assert same(ours, [eagerly(cast(reference))(batches[0]), *seen(reference)])
            assert step.num_graphs == 2


def test_policies_and_moves() -> None:
    model, ids = gpt(), tokens()
    reference = copy.deepcopy(model)
    expected = trained(reference, eagerly(loss_of(reference)), [ids] * 3, "SGD")
    with lowtide.apply(model, lowtide.EveryN(2), regions="layers.*") as handle:
        assert all(map(same, trained(model, handle.capture(loss_of(model), ids), [ids] * 3, "SGD"), expected))
    with (
        lowtide.apply(model, lowtide.RecomputeAll(), regions="layers.*", store=lowtide.ActivationStore()) as handle,
        pytest.raises(lowtide.CaptureError, match="moves or compresses"),
    ):
        handle.capture(loss_of(model), ids)


def test_an_unused_parameter_has_no_gradient() -> None:
    model, ids = gpt(), tokens()
    model.extra = nn.Linear(2, 2).cuda()
    with lowtide.apply(model, Plan(regions=PLANS["every block"])) as handle:
        step = handle.capture(loss_of(model), ids)
        model.extra.weight.grad = torch.ones(2, 2, device="cuda")
        step(ids)
        assert model.extra.weight.grad is None
        model.extra.weight.grad = torch.ones(2, 2, device="cuda")
        step(ids, accumulate=True)
        assert torch.equal(model.extra.weight.grad, torch.ones(2, 2, device="cuda"))


def test_devices() -> None:
    model, ids = gpt(), tokens()
    with lowtide.apply(model, Plan()) as handle:
        with pytest.raises(lowtide.CaptureError, match="is on cpu and the model on cuda"):
            handle.capture(loss_of(model), ids.cpu())
        with pytest.raises(lowtide.CaptureError, match="no tensors"):
            handle.capture(lambda: loss_of(model)(ids))
        with handle.disabled(), pytest.raises(lowtide.CaptureError, match="switched off"):
            handle.capture(loss_of(model), ids)
        handle.capture(loss_of(model), ids)(ids)
    with (
        lowtide.apply(model.cpu(), Plan()) as handle,
        pytest.raises(lowtide.CaptureError, match="the model is on cpu"),
    ):
        handle.capture(loss_of(model), ids.cpu())


def test_an_optimizer_in_the_backward_is_refused() -> None:
    model, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    with lowtide.apply(model, Plan()) as handle:
        hook = model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(lowtide.CaptureError, match="optimizer in the backward"):
            handle.capture(lambda x: model(x).mean(), x)
        hook.remove()
        handle.capture(lambda x: model(x).mean(), x)(x)


def test_a_larger_batch_is_planned_for() -> None:
    """What is patched for it in the warm-up stays patched."""
    model, small, large = gpt(), tokens(batch=2), tokens(1)
    reference, loss_fn = copy.deepcopy(model), loss_of(model)
    floor, peak = floor_and_peak(lowtide.trace(model, loss_fn, large))
    with lowtide.fit(model, loss_fn, small, budget=peak, verify=False, time_limit_s=1.0) as handle:
        handle.shapes.planner.budget_bytes = (floor + peak) // 2  # type: ignore[union-attr]
        handle.watch.budget_bytes = 1 << 40  # type: ignore[union-attr]
        step = handle.capture(loss_fn, small)
        torch.manual_seed(1)
        found = [step(large), *seen(model)]
        torch.manual_seed(1)
        expected = [eagerly(loss_of(reference))(large), *seen(reference)]
        assert [n for n, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)] == []
        assert step.num_graphs == 2
        assert handle.stats().replans
        replays = handle.stats().num_replays
        loss_fn(large).backward()
        assert handle.stats().num_replays > replays
