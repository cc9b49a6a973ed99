"""Segments: runs of calls recomputed as one region, under policies and plans, bit-equal to the plain model."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential

import lowtide
from lowtide import Plan
from lowtide.graph.segments import with_segments
from lowtide.plans import Move, Recompute
from lowtide.policies import Policy, Segment, Segments
from lowtide.simulator import simulate
from lowtide.solvers.solve import shortlist
from stepping import RunsOf
from sweeps import sweep

WIDTH = 16


def segment(first: int, last: int, path: str = "layers.{}") -> Recompute:
    return Recompute(path.format(first), more=tuple((path.format(layer), 0) for layer in range(first + 1, last + 1)))


class Layer(nn.Module):
    """With random numbers, statistics and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.dropout(torch.tanh(self.norm(self.linear(x))))
        return x if mask is None else x * mask


class Loop(nn.Module):
    def __init__(self, num_layers: int, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


def steps(model: nn.Module, *inputs: Any, num_steps: int = 3) -> list[Any]:
    """Losses, gradients, buffers and the random state after each step."""
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(num_steps):
        model.zero_grad(set_to_none=True)
        output = model(*inputs)
        loss = (output if isinstance(output, Tensor) else output[0]).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters()), *map(torch.clone, model.buffers())]
        found.append(torch.get_rng_state())
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


PLANS = {
    "one": (segment(0, 7),),
    "two": (segment(0, 3), segment(4, 7)),
    "in the middle": (segment(2, 5),),
    "with calls inside": (segment(0, 5), Recompute("layers.1"), Recompute("layers.4"), Recompute("layers.4.linear")),
    "in segments": (segment(0, 7), segment(0, 3), segment(0, 1), segment(4, 7), segment(6, 7), Recompute("layers.3")),
    "begun alike": (segment(0, 7), segment(0, 6), segment(0, 5), Recompute("layers.0")),
}


@pytest.mark.parametrize("regions", PLANS.values(), ids=PLANS)
def test_plans_are_the_plain_model(regions: tuple[Recompute, ...]) -> None:
    plain, x, mask = Loop(8), torch.randn(4, WIDTH), torch.rand(4, WIDTH)
    model = copy.deepcopy(plain)
    expected = steps(plain, x, mask)
    with lowtide.apply(model, Plan(regions=regions)) as handle:
        assert_same(steps(model, x, mask), expected)
    assert len(handle.stats().segments) == sum(bool(region.more) for region in regions)
    assert_same(steps(model, x, mask), steps(plain, x, mask))


POLICIES = [
    *(lowtide.Uniform(1), lowtide.Uniform(3), lowtide.SqrtN(), lowtide.Revolve(1), lowtide.Revolve(2)),
    *(lowtide.Revolve(3), Segments((Segment(1, 3), Segment(5, 20)))),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies_are_the_plain_model(policy: Policy) -> None:
    plain, x, mask = Loop(8), torch.randn(4, WIDTH), torch.rand(4, WIDTH)
    model = copy.deepcopy(plain)
    expected = steps(plain, x, mask)
    with lowtide.apply(model, policy, regions="layers.*"):
        assert_same(steps(model, x, mask), expected)


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """The most bytes that a step allocates."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    return lowtide.measure(step, device="cpu").peak_bytes


class Tanh(nn.Module):
    """Saves two tensors of the size of its input."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.tanh().tanh()


@pytest.mark.parametrize(("num_layers", "by_hand"), sweep([(16, 13), (64, 25), (144, 37)], keep=2))
def test_memory_grows_with_the_square_root_of_the_depth(num_layers: int, by_hand: int) -> None:
    model, x = Loop(num_layers, Tanh), torch.randn(64, 1024, requires_grad=True)
    with lowtide.apply(model, lowtide.SqrtN(), regions="layers.*"):
        assert peak_bytes(model, x) / x.nbytes <= by_hand
    side = round(num_layers**0.5)
    plan = Plan(regions=tuple(segment(start, start + side - 1) for start in range(0, num_layers, side)))
    with lowtide.apply(model, plan):
        assert peak_bytes(model, x) / x.nbytes <= by_hand
    inner = tuple(Recompute(f"layers.{layer}") for layer in range(num_layers))
    with lowtide.apply(model, Plan(regions=(*plan.regions, *inner))):  # layer by layer
        assert peak_bytes(model, x) / x.nbytes <= 2 * side + 6


class Gelu(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.dropout(nn.functional.gelu(self.linear(x)))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("inner", [False, True])
def test_predicted_peaks_are_the_measured_ones(dropout: float, inner: bool) -> None:
    """To the byte, also where layers draw random numbers: their random states are no tensors."""
    model, x = Loop(16, functools.partial(Gelu, dropout)), torch.randn(256, 64)
    graph = lowtide.trace(model, lambda x: model(x).sum(), x, mode="real")
    model.zero_grad(set_to_none=True)
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    last_kept = tuple(segment(start, start + 3) for start in (0, 4, 8))  # as torch's checkpoint_sequential cuts
    layers = tuple(Recompute(f"layers.{layer}") for layer in range(16))
    plan = Plan(regions=(*last_kept, segment(12, 15), *layers) if inner else last_kept)
    with lowtide.apply(model, plan):
        assert peak_bytes(model, x) == simulate(graph, plan).peak_bytes - there


@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_frozen_layers_at_the_start_of_a_segment_are_part_of_it(num_frozen: int) -> None:
    """Autograd saves nothing in them, and the layers after them keep none of their outputs all the same."""
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))), torch.randn(256, WIDTH)
    model[:num_frozen].requires_grad_(False)
    plan = Plan(regions=(segment(0, 3, "{}"),))
    graph = lowtide.trace(model, lambda x: model(x).sum(), x)
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    with lowtide.apply(model, plan):
        assert peak_bytes(model, x) == lowtide.simulator.simulate(graph, plan).peak_bytes - there


def test_random_states_take_no_memory_of_tensors() -> None:
    """torch allocates one copy when it is asked for the state; it is freed at once."""
    x = torch.randn(4, requires_grad=True)
    state_bytes = torch.get_rng_state().nbytes
    for layer in (nn.Tanh(), nn.Dropout(0.5)):
        model = nn.Sequential(layer)
        outputs: list[Tensor] = []

        def forward(model: nn.Module = model, outputs: list[Tensor] = outputs) -> None:
            outputs.append(model(x))

        with lowtide.apply(model, Plan(regions=(Recompute("0"),))):
            measured = lowtide.measure(forward, device="cpu")
            assert measured.peak_bytes < 2 * state_bytes
            assert measured.left_bytes < state_bytes


class Forked(Layer):
    """Draws numbers and puts the state of the generator back."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.norm(self.linear(x)))
        with torch.random.fork_rng(devices=[]):
            x = self.dropout(x)
        return torch.sin(x)


@pytest.mark.parametrize("regions", [(segment(0, 3),), tuple(map(Recompute, ("layers.0", "layers.2")))])
def test_numbers_drawn_with_the_generator_put_back(regions: tuple[Recompute, ...]) -> None:
    model = nn.Sequential(Loop(4, Forked), nn.Dropout(0.5))
    x = torch.randn(8, WIDTH)
    plain = steps(copy.deepcopy(model), x)
    with lowtide.apply(model[0], Plan(regions=regions)):
        assert_same(steps(model, x), plain)


def test_a_segment_is_replayed_up_to_the_input_of_its_last_region() -> None:
    """Two levels: the segment's replay runs three of four layers, as they are replayed one by one afterwards."""
    model, x = Loop(8, functools.partial(Gelu, 0.1)), torch.randn(8, 64)
    layers = tuple(Recompute(f"layers.{layer}") for layer in range(8))
    with lowtide.apply(model, Plan(regions=(segment(0, 3), segment(4, 7), *layers))):
        loss = model(x).sum()
        with RunsOf(torch.ops.aten.addmm.default) as runs:
            loss.backward()
    assert runs.count == 2 * 3 + 8


class Counting(nn.Module):
    """Counts its runs outside of what a replay restores."""

    runs = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        Counting.runs += 1
        return x.tanh().tanh()


def runs_of_a_step(model: nn.Module, x: Tensor, handle: Any) -> tuple[int, int]:
    """How often a layer runs in a step, and how many replays the handle counts meanwhile."""
    before, Counting.runs = handle.stats().num_replays, 0
    model(x).sum().backward()
    return Counting.runs, handle.stats().num_replays - before


DEPTHS_AND_SLOTS = [(depth, slots) for slots in (1, 2, 4, 10) for depth in (1, 2, 16)] + [(64, 4), (64, 10)]
DEPTHS_AND_SLOTS += [(64, 2), (64, 1)]  # many replays: with one slot, half the square of the depth


@pytest.mark.parametrize(("num_layers", "slots"), sweep(DEPTHS_AND_SLOTS, keep=14))
def test_revolve_takes_the_memory_and_the_replays_of_its_formula(num_layers: int, slots: int) -> None:
    """Slots, one layer's saves and a gradient, and replays of the last part beside the schedule's runs."""
    policy, model = lowtide.Revolve(slots), Loop(num_layers, Counting)
    x = torch.randn(64, 1024, requires_grad=True)
    last = max((each for each in policy.regions(num_layers)), key=lambda each: (each.end, -each.start))
    with lowtide.apply(model, policy, regions="layers.*") as handle:
        assert peak_bytes(model, x) / x.nbytes <= min(slots, num_layers) + 3.1
        runs, replays = runs_of_a_step(model, x, handle)
        assert runs - num_layers == replays == policy.num_forwards(num_layers) - 1 + last.end + 1 - last.start


def test_replays_that_end_at_the_input_of_a_region_are_not_counted() -> None:
    model, x = Loop(4, Counting), torch.randn(4, WIDTH, requires_grad=True)
    layers = tuple(Recompute(f"layers.{layer}") for layer in range(4))
    with lowtide.apply(model, Plan(regions=(segment(0, 3), *layers))) as handle:
        assert runs_of_a_step(model, x, handle) == (4 + 3 + 4, 3 + 4)


# Models as they are.


class Glued(Loop):
    """With something done between the calls."""

    def __init__(self, glue: Callable[[Tensor], Tensor]) -> None:
        super().__init__(6)
        self.glue = glue

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, mask)
            if number == 2:
                x = self.glue(x)
        return x


def changed_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2.0)
    return x


GLUES = {
    "nothing": lambda x: x,
    "sum": lambda x: x + 1.0,
    "view": lambda x: x.view(-1, WIDTH),
    "clone": lambda x: x.clone(),
    "detached": lambda x: x.detach(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "in place": changed_in_place,
    "added in place": lambda x: x.add_(1.0),
    "a number drawn": lambda x: x if torch.rand([]) >= 0 else -x,
}


@pytest.mark.parametrize("glue", GLUES.values(), ids=GLUES)
def test_what_is_between_calls_is_not_replayed(glue: Callable[[Tensor], Tensor]) -> None:
    plain, x = Glued(glue), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    for regions in [(segment(0, 5),), (segment(0, 5), segment(1, 4)), (segment(0, 5), Recompute("layers.3"))]:
        run, again = copy.deepcopy(plain), copy.deepcopy(model)
        expected = steps_without_missing(run, x)
        with lowtide.apply(again, Plan(regions=regions)):
            assert_same(steps_without_missing(again, x), expected)


def test_statistics_list_the_segments_that_layers_joined() -> None:
    """An op between two calls ends a segment: the statistics say so once a forward has shown it."""
    names = [f"layers.{number}" for number in range(6)]
    for glue, found in ((GLUES["nothing"], (tuple(names),)), (GLUES["sum"], (tuple(names[:3]), tuple(names[3:])))):
        model = Glued(glue)
        with lowtide.apply(model, lowtide.Uniform(1)) as handle:
            assert handle.stats().segments == (tuple(names),)
            model(torch.randn(4, WIDTH)).sum().backward()
            assert handle.stats().segments == found
    model = Glued(GLUES["sum"])
    with lowtide.apply(model, lowtide.Revolve(1)) as handle:
        model(torch.randn(4, WIDTH)).sum().backward()
        joined = {(0, 1, 2), (0, 1), (3, 4, 5), (3, 4)}
        assert set(handle.stats().segments) == {tuple(names[number] for number in each) for each in joined}


@pytest.mark.parametrize("max_checkpoints", range(4))
def test_a_limit_on_inputs_counts_segments(max_checkpoints: int) -> None:
    """A layer that joins a segment holds no further input."""
    model, x = Loop(9, Counting), torch.randn(4, WIDTH, requires_grad=True)
    with lowtide.apply(model, lowtide.Uniform(3), regions="layers.*", max_checkpoints=max_checkpoints) as handle:
        assert runs_of_a_step(model, x, handle) == (9 + 3 * max_checkpoints, 3 * max_checkpoints)


def steps_without_missing(model: nn.Module, x: Tensor) -> list[Any]:
    """As `steps`, with zeros for gradients that are not there."""
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        found += [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
        found += [*map(torch.clone, model.buffers()), torch.get_rng_state()]
    return found


def test_layers_that_change_what_the_layer_before_made() -> None:
    plain = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))))
    model, x = copy.deepcopy(plain), torch.randn(4, WIDTH)
    expected = steps(plain, x)
    with lowtide.apply(model, lowtide.Uniform(2), regions="*"):
        assert_same(steps(model, x), expected)


def test_the_first_layer_may_not_change_its_input() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    stem = nn.Linear(WIDTH, WIDTH)
    with lowtide.apply(model, lowtide.Uniform(1), regions="*"):
        loss = model(stem(torch.randn(4, WIDTH))).sum()
        with pytest.raises(lowtide.CheckpointError, match="changed by the region itself"):
            loss.backward()


class Passing(nn.Module):
    """Gives and takes several values, as decoder layers with a position bias do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: dict[str, Tensor], bias: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        bias = states["x"].mean(0) if bias is None else bias
        return {"x": torch.tanh(self.linear(states["x"])) + bias, "first": states.get("first", states["x"])}, bias


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Passing() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        states, bias, seen = {"x": x}, None, []
        for layer in self.layers:
            states, bias = layer(states, bias)
            seen.append(states["x"])  # an early output that is read at the end
        return states["x"] + states["first"] + seen[2].sin() + seen[4].cos()


def test_several_values_are_passed_on() -> None:
    plain, x = Stack(), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    expected = steps(plain, x)
    for regions in [(segment(0, 5),), (segment(0, 5), segment(1, 4), Recompute("layers.3"))]:
        with lowtide.apply(model, Plan(regions=regions)):
            assert_same(steps(model, x), expected)


def test_a_layer_that_is_called_again() -> None:
    class Twice(Loop):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(super().forward(x, mask), mask)

    plain, x = Twice(3), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    expected = steps(plain, x)
    calls = [(f"layers.{layer}", nth) for nth in range(2) for layer in range(3)]
    region = Recompute(*calls[1], more=tuple(calls[2:5]))
    with lowtide.apply(model, Plan(regions=(region,))) as handle:
        assert_same(steps(model, x), expected)
        assert handle.stats().num_replays == 3 * 4
    with lowtide.apply(model, lowtide.Uniform(1), regions="layers.*"):
        assert_same(steps(model, x), steps(plain, x))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_hosts_loops(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64}
    if name == "llama":
        config = transformers.LlamaConfig(
            **small, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
        )
        plain, path = transformers.LlamaForCausalLM(config), "model.layers.{}"
    elif name == "gpt2":
        config = transformers.GPT2Config(**small, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
        plain, path = transformers.GPT2LMHeadModel(config), "transformer.h.{}"
    else:
        config = transformers.T5Config(**small, d_model=32, d_ff=64, d_kv=16, num_layers=4, num_heads=2)
        config.decoder_start_token_id = 0
        plain, path = transformers.T5ForConditionalGeneration(config), "encoder.block.{}"
    plain.train()
    model, words = copy.deepcopy(plain), torch.randint(0, 64, (2, 12))
    mask = torch.ones_like(words)
    mask[0, :3] = 0

    def gradients(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        output = model(input_ids=words, attention_mask=mask, labels=words, use_cache=False, output_hidden_states=True)
        (output.loss + (output.get("hidden_states") or output.encoder_hidden_states)[2].sum()).backward()
        return [output.loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]

    expected = gradients(plain)
    for regions in [(segment(0, 3, path),), (segment(0, 3, path), segment(1, 2, path), Recompute(path.format(3)))]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = lowtide.apply(model, Plan(regions=regions))
        with handle:
            assert_same(gradients(model), expected)
            assert handle.stats().num_replays >= 4


# Backwards of every kind.


def planned_loop() -> tuple[Loop, Loop, Tensor]:
    plain = Loop(6)
    model = copy.deepcopy(plain)
    lowtide.apply(model, Plan(regions=(segment(0, 4), segment(2, 3))))
    return plain, model, torch.randn(4, WIDTH)


def test_backward_twice_and_several_forwards() -> None:
    plain, model, x = planned_loop()
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        first, second = each(x).square().sum(), each(x * 2).square().sum()
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        found.append([p.grad for p in each.parameters()])
    assert_same(found[1], found[0])


def test_partial_and_double_gradients() -> None:
    plain, model, x = planned_loop()
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        loss = each(leaf).square().sum()
        last = torch.autograd.grad(loss, [each.layers[5].linear.weight], retain_graph=True)
        middle = torch.autograd.grad(loss, [each.layers[2].linear.weight], retain_graph=True)
        (once,) = torch.autograd.grad(loss, [leaf], create_graph=True)
        once.square().sum().backward()
        found.append([*last, *middle, once.detach(), leaf.grad, *(p.grad for p in each.parameters())])
    assert_same(found[1], found[0])


def test_an_exception_in_the_forward_leaves_nothing() -> None:
    _, model, x = planned_loop()
    broken = model.layers[3].linear.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    broken.remove()
    plain = Loop(6)
    plain.load_state_dict(model.state_dict())
    assert_same(steps(model, x), steps(plain, x))


def test_a_layer_that_fails_and_is_left_out() -> None:
    class Failing(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            super().forward(x, mask)
            raise RuntimeError("no")

    class Careful(Loop):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            for layer in self.layers:
                with contextlib.suppress(RuntimeError):
                    x = layer(x, mask)
            return x

    plain, x = Careful(5), torch.randn(4, WIDTH)
    plain.layers[2] = Failing()
    model = copy.deepcopy(plain)
    with lowtide.apply(model, Plan(regions=(segment(0, 4),))):
        assert_same(steps_without_missing(model, x), steps_without_missing(plain, x))


def test_nothing_is_kept_alive() -> None:
    _, model, x = planned_loop()
    seen: list[weakref.ref[Tensor]] = []
    model.layers[2].register_forward_hook(lambda _module, _args, output: seen.append(weakref.ref(output)))
    loss = model(x).sum()
    gc.collect()
    assert seen[0]() is None  # between the calls of a segment nothing is held
    loss.backward()
    del loss
    assert all(each() is None for each in seen)


def test_removed_and_switched_off_before_the_backward() -> None:
    for change in ("remove", "off", "eval"):
        plain, x = Loop(6), torch.randn(4, WIDTH)
        model = copy.deepcopy(plain)
        handle = lowtide.apply(model, Plan(regions=(segment(0, 4), segment(2, 3), Recompute("layers.1.linear"))))
        found = []
        for each in (plain, model):
            torch.manual_seed(3)
            loss = each(x).square().sum()
            if each is model and change == "remove":
                handle.remove()
            elif each is model and change == "off":
                handle.enabled = False
            elif change == "eval":
                each.eval()
            loss.backward()
            found.append([p.grad for p in each.parameters()])
        assert_same(found[1], found[0])


def test_a_segment_with_a_replay_that_differs_says_which_layer() -> None:
    class Differing(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x.exp() if lowtide.is_recomputing() else x, mask)

    model = Loop(4)
    model.layers[2] = Differing()
    with lowtide.apply(model, Plan(regions=(segment(0, 3),))):
        loss = model(torch.randn(4, WIDTH)).sum()
        with pytest.raises(lowtide.CheckpointError, match=r"region: .*Differing"):
            loss.backward()


def test_a_changed_input_is_refused() -> None:
    model, stem = Loop(4), nn.Linear(WIDTH, WIDTH)
    with lowtide.apply(model, Plan(regions=(segment(0, 3),))):
        x, mask = stem(torch.randn(4, WIDTH)), torch.rand(4, WIDTH)
        loss = model(x, mask).sum()
        mask.zero_()
        with pytest.raises(lowtide.CheckpointError, match="changed in place"):
            loss.backward()


@pytest.mark.parametrize("checkpoint", [lowtide.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)])
def test_a_checkpoint_of_ones_own_around_some_of_the_layers(checkpoint: Callable[..., Any]) -> None:
    class Own(Loop):
        def some(self, x: Tensor) -> Tensor:
            for layer in self.layers[2:5]:
                x = layer(x)
            return x

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = checkpoint(self.some, self.layers[1](self.layers[0](x)))
            return self.layers[6](self.layers[5](x))

    model, x = Own(7), torch.randn(4, WIDTH)
    for layer in model.layers:
        layer.norm = nn.LayerNorm(WIDTH)  # torch's own counts batches twice
    expected = steps(model, x)
    for policy in (lowtide.Uniform(1), lowtide.Uniform(3), lowtide.Revolve(2)):
        with lowtide.apply(model, policy, regions="layers.*"):
            assert_same(steps(model, x), expected)


def test_copies_of_a_model_run_beside_it() -> None:
    plain, x = Loop(4), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    with lowtide.apply(model, lowtide.Uniform(2), regions="layers.*"):
        twin = copy.deepcopy(model)
        expected = steps(plain, x)
        assert_same(steps(model, x), expected)
        assert_same(steps(twin, x), expected)


def test_words_of_a_plan_that_cannot_be() -> None:
    with pytest.raises(lowtide.PlanError, match="no such module"):
        lowtide.apply(Loop(4), Plan(regions=(segment(2, 6),)))


# Segments that retain outputs.


def retaining(model: nn.Module, x: Tensor, mask: Tensor | None, first: int, last: int, *names: str) -> Recompute:
    """A segment that retains all outputs of some ops that it can."""
    graph = lowtide.trace(model, lambda x, mask: model(x, mask).square().mean(), x, mask, mode="real")
    model.zero_grad(set_to_none=True)
    calls = [graph.calls_by_path[f"layers.{layer}"][0] for layer in (first, last)]
    segmented = with_segments(graph, [(calls[0], calls[1])])
    at = next(index for index, call in enumerate(segmented.calls) if call.kind == "Segment")
    call, depths = segmented.calls[at], segmented.retainable.depths
    ops = [op - call.first for op in range(call.first, call.end) if graph.ops[op].name.split(".")[1] in names]
    kept = tuple(op for op in ops if depths[call.first + op] >= segmented.depths[at])
    assert kept
    return replace(segment(first, last), keep_ops=kept)


class Noisy(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x * torch.rand_like(x), mask)


@pytest.mark.parametrize("names", sweep(["rand_like mul tanh addmm", "addmm", "tanh", "rand_like"], keep=2))
def test_segments_that_retain_are_the_plain_model(names: str) -> None:
    plain, x, mask = Loop(8, Noisy), torch.randn(4, WIDTH), torch.rand(4, WIDTH)
    model = copy.deepcopy(plain)
    regions = tuple(retaining(copy.deepcopy(plain), x, mask, first, first + 2, *names.split()) for first in (1, 5))
    expected = steps(plain, x, mask, num_steps=5)
    with lowtide.apply(model, Plan(regions=regions)):
        assert_same(steps(model, x, mask, num_steps=5), expected)


def test_what_a_segment_retains_is_not_computed_again() -> None:
    model, x = Loop(6), torch.randn(4, WIDTH, requires_grad=True)
    with lowtide.apply(model, Plan(regions=(retaining(copy.deepcopy(model), x, None, 1, 4, "tanh"),))):
        num_tanh = []
        for _ in range(3):
            loss = model(x).square().mean()
            with RunsOf(torch.ops.aten.tanh.default) as runs:
                loss.backward()
            num_tanh.append(runs.count)
    assert num_tanh == [4, 0, 0]


def test_what_a_segment_retains_is_moved() -> None:
    plain, x = Loop(6), torch.randn(64, WIDTH)
    model = copy.deepcopy(plain)
    region = retaining(copy.deepcopy(plain), x, None, 1, 4, "tanh")
    moves = tuple(Move("layers.1", 0, 0, "host", op=op) for op in region.keep_ops)
    expected = steps(plain, x)
    with lowtide.apply(model, Plan(regions=(region,), moves=moves)) as handle:
        assert_same(steps(model, x), expected)
        assert handle.stats().moved_bytes == 2 * 4 * x.nbytes  # of four layers, from the second step on


def test_a_segment_that_retains_and_is_broken_up() -> None:
    """Calls that do not follow each other make segments of their own, which retain nothing."""
    plain, x = Glued(torch.neg), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)
    region = retaining(Loop(6), x, None, 0, 5, "tanh", "addmm")
    expected = steps(plain, x, num_steps=5)
    with lowtide.apply(model, Plan(regions=(region,))):
        assert_same(steps(model, x, num_steps=5), expected)


def test_a_segment_that_retains_has_several_forwards_and_backwards() -> None:
    plain, x = Loop(6), torch.randn(4, WIDTH)
    model = copy.deepcopy(plain)

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            losses = [model(x * scale).square().mean() for scale in (1, 2)]
            losses[0].backward(retain_graph=True)
            sum(losses, torch.zeros(())).backward()
        return [*(p.grad for p in model.parameters()), *map(torch.clone, model.buffers()), torch.get_rng_state()]

    expected = run(plain)
    with lowtide.apply(model, Plan(regions=(retaining(copy.deepcopy(plain), x, None, 0, 5, "tanh", "addmm"),))):
        assert_same(run(model), expected)


# Plans that are found.


class Routed(Layer):
    """Every layer chooses among its rows. A replay must not choose anew."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y + y[y.sum(1).topk(2).indices].mean(0)


class Skipping(Loop):
    """Layers are left out by chance, as in Hugging Face's encoders with `layerdrop`: a number is drawn before each."""

    probability = 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) >= self.probability:
                x = layer(x, mask=mask)
        return x


def test_layers_that_are_left_out_by_chance() -> None:
    plain, x = Skipping(8), torch.randn(4, WIDTH)
    plain.probability = 0.4
    model = copy.deepcopy(plain)
    expected = steps_without_missing(plain, x)
    with lowtide.apply(model, Plan(regions=(segment(0, 3), segment(4, 7), Recompute("layers.5")))):
        assert_same(steps_without_missing(model, x), expected)


def test_a_segment_with_ops_between_its_calls_retains_nothing() -> None:
    model, x = Skipping(4), torch.randn(64, WIDTH)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode="real")
    assert simulate(graph, Plan(regions=(segment(0, 3),))).extra_s > 0
    with pytest.raises(lowtide.PlanError, match="between its calls"):
        simulate(graph, Plan(regions=(replace(segment(0, 3), keep_ops=(1,)),)))


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(("loop", "layer"), sweep([(Loop, Routed), (Skipping, Layer), (Loop, Layer)], keep=2))
def test_found_plans_hold_and_are_the_plain_model(loop: type[Loop], layer: Callable[[], nn.Module]) -> None:
    plain, x = loop(12, layer), torch.randn(1024, WIDTH)
    model = copy.deepcopy(plain)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode="real")
    model.zero_grad(set_to_none=True)
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    floor = lowtide.sweep(graph, []).floor_bytes
    plan = lowtide.solve(graph, int(1.1 * floor))
    of_layers = [region for region in plan.regions if region.more and region.path.count(".") == 1]
    assert of_layers
    assert bool(plan.choosers) == (layer is Routed)
    expected = steps(plain, x)
    with lowtide.apply(model, plan):
        assert_same(steps(model, x), expected)
        model.zero_grad(set_to_none=True)

        def step() -> None:
            model(x).square().mean().backward()

        assert lowtide.measure(step, device="cpu").peak_bytes + there <= 1.01 * 1.1 * floor


class DownUp(nn.Module):
    """What takes long makes something small."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 8, stride=8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + nn.functional.interpolate(nn.functional.gelu(self.down(x)), scale_factor=8)


def test_found_segments_retain_small_outputs_that_take_long() -> None:
    plain, x = Loop(12, DownUp), torch.randn(4, 4, 64, 64)
    model = copy.deepcopy(plain)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode="real")
    model.zero_grad(set_to_none=True)
    long = {"aten.convolution.default": 1.0, "aten.convolution_backward.default": 2.0}
    graph = replace(graph, ops=tuple(replace(op, seconds=long.get(op.name, 2.0**-6)) for op in graph.ops))
    plan = lowtide.solve(graph, int(0.6 * simulate(graph, Plan()).peak_bytes))
    retaining = [region for region in plan.regions if region.more and region.keep_ops]
    assert retaining
    assert plan.extra_s < 3.0  # of twelve convolutions hardly any runs again
    dropping = replace(plan, regions=tuple(replace(region, keep_ops=()) for region in plan.regions))
    assert simulate(graph, dropping).extra_s > 6.0
    expected = steps(plain, x)
    with lowtide.apply(model, plan):
        assert_same(steps(model, x), expected)
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        with RunsOf(torch.ops.aten.convolution.default) as runs:
            loss.backward()
        assert runs.count < 3


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("num_parts", sweep([4, 2, 8], keep=1))
def test_what_checkpoint_sequential_holds_is_feasible(num_parts: int) -> None:
    """Within the measured peak of torch's cut, that cut is a candidate of `fit`, or a faster plan fits."""
    model, x = Loop(16, functools.partial(Gelu, 0.0)), torch.randn(256, 64)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).sum()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        checkpoint_sequential(list(model.layers), num_parts, x, use_reentrant=False).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    torchs_bytes = lowtide.measure(step, device="cpu").peak_bytes
    model.zero_grad(set_to_none=True)
    graph = lowtide.trace(model, loss_fn, x, mode="real")
    budget = torchs_bytes + sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    size = 16 // num_parts
    cut = Plan(regions=tuple(segment(start, start + size - 1) for start in range(0, 16 - size, size)))
    told = simulate(graph, cut)
    assert told.peak_bytes <= budget
    found, error = shortlist(graph, budget)
    assert error is None
    fitting = [each for each in found if each.plan.peak_bytes <= budget and each.is_essential]
    assert any(each.plan.extra_s <= told.extra_s for each in fitting)
    with lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0) as handle:
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget


@pytest.mark.usefixtures("quick_search")
def test_fit_goes_below_a_checkpoint_on_every_layer() -> None:
    plain, x = Loop(24), torch.randn(512, WIDTH)
    model = copy.deepcopy(plain)
    every = Plan(regions=tuple(Recompute(f"layers.{layer}") for layer in range(24)))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    graph = lowtide.trace(model, loss_fn, x, mode="real")
    budget = simulate(graph, every).peak_bytes * 7 // 10
    expected = steps(plain, x)
    with lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0) as handle:
        assert handle.stats().segments
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
        assert_same(steps(model, x), expected)
