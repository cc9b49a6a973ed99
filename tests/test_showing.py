"""Outputs that a region holds by their place among what is saved: no mode in the forward, and never another value."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from lowtide.engines.lessons import Lessons
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.plans import Move, Plan, Recompute
from stepping import RunsOf

pytestmark = pytest.mark.usefixtures("one_thread")

Body = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Runs `body`, and notes at its end how many dispatch modes are on."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.flag = False
        self.num_modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self, x)
        self.num_modes.append(torch._C._len_torch_dispatch_stack())
        return y


def feed_forward(block: Block, x: Tensor) -> Tensor:
    return x + block.down(F.gelu(block.up(x)))


def stack(body: Body) -> nn.Sequential:
    return nn.Sequential(Block(body), nn.Linear(16, 16))


def data(batch: int = 4) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(batch)).requires_grad_()


def ops_of(model: nn.Module) -> list[str]:
    graph = lowtide.trace(model, lambda x: model(x).sum(), data(), mode="real")
    call = graph.calls[graph.calls_by_path["0"][0]]
    return [op.name.removeprefix("aten.").split(".")[0] for op in graph.ops[call.first : call.end]]


def holds(model: nn.Module, *names: str, nth: int = 0) -> Plan:
    """A plan that holds the output of the nth op of each name."""
    ops = ops_of(model)
    found = tuple(sorted([at for at, op in enumerate(ops) if op == name][nth] for name in names))
    return Plan((Recompute("0", keep_ops=found),))


Change = Callable[[nn.Module, int], None]


def left_behind(model: nn.Module, inputs: list[Tensor], change: Change | None = None) -> list[Tensor]:
    """All that some steps leave: outputs, gradients, inputs, weights and buffers, random state."""
    torch.manual_seed(3)
    found = []
    for number, x in enumerate(inputs):
        if change is not None:
            change(model, number)
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None)]
        found += [tensor.detach().clone() for tensor in (x, *model.state_dict().values())]
    return [*found, torch.get_rng_state()]


def check(model: nn.Module, plan: Plan, inputs: list[Tensor] | None = None, change: Change | None = None) -> list[int]:
    """With the plan and without, the same is left behind. How many modes each forward had."""
    inputs = inputs or [data() for _ in range(4)]
    plain = left_behind(copy.deepcopy(model), inputs, change)
    model[0].num_modes.clear()
    with lowtide.apply(model, plan):
        actual = left_behind(model, inputs, change)
    assert len(actual) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))
    return list(model[0].num_modes)


def num_runs(model: nn.Module, op: Any, steps: int = 3) -> list[int]:
    """How often an op runs in the backward of each step."""
    found = []
    for _ in range(steps):
        loss = model(data()).square().sum()
        with RunsOf(op) as runs:
            loss.backward()
        found.append(runs.count)
    return found


def test_only_the_first_forward_is_watched() -> None:
    model = stack(feed_forward)
    modes = check(model, holds(model, "gelu"))
    assert modes == [1, 0, 0, 0]  # replays end before
    with lowtide.apply(model, holds(model, "gelu")):
        assert num_runs(model, torch.ops.aten.gelu.default) == [0, 0, 0]


def test_fewer_objects_wait_for_the_backward_than_with_torch() -> None:
    """Their number wakes the garbage collector, which takes long on a large heap."""

    def body(block: Block, x: Tensor) -> Tensor:
        for _ in range(100):
            x = x.sin()
        return x

    def num_objects(model: nn.Module) -> int:
        for _ in range(3):
            model(x).sum().backward()
        gc.collect()
        before = len(gc.get_objects())
        loss = model(x).sum()
        gc.collect()
        num = len(gc.get_objects()) - before
        loss.backward()
        return num

    model, x = stack(body), data()
    with lowtide.apply(model, holds(model, "sin")):
        ours = num_objects(model)
    block = model[0]
    block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    assert ours < 0.9 * num_objects(model)


def test_an_output_that_nobody_saves_takes_a_watch() -> None:
    model = stack(lambda block, x: (block.down(block.up(x).tanh() * 2) + 1).exp())
    plan = holds(model, "mul")
    assert check(model, plan) == [1, 0, 0, 0]  # the product is an input of the second layer
    plan = holds(model, "addmm", nth=1)
    assert check(model, plan) == [1, 1, 1, 1]  # nothing is saved to add one
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.addmm.default) == [1, 1, 1]


def test_an_output_is_saved_as_a_view() -> None:
    model = stack(lambda block, x: block.down((x.sin() @ block.down.weight).t().contiguous().t()))
    with lowtide.apply(model, holds(model, "sin")):
        assert num_runs(model, torch.ops.aten.sin.default) == [0, 0, 0]

    def body(block: Block, x: Tensor) -> Tensor:
        return x * (x + 1).t().exp().t().sin()  # saved turned by exp, as it was made; by sin turned back

    model = stack(body)
    assert check(model, holds(model, "exp")) == [1, 0, 0, 0]
    with lowtide.apply(model, holds(model, "exp")):
        assert num_runs(model, torch.ops.aten.exp.default) == [0, 0, 0]


def test_an_output_is_saved_as_a_view_that_does_not_say_so() -> None:
    """A product of more than two dimensions, as every linear layer without a bias makes it; saved once, and twice."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = (x[None].expand(3, -1, -1) @ block.down.weight)[..., :16]
        return (made.sin() * made.cos()).sum(dim=0)

    model = stack(body)
    plan = holds(model, "mm")
    assert "_unsafe_view" in ops_of(model)
    assert check(model, plan) == [1, 0, 0, 0]
    plain = num_runs(model, torch.ops.aten.mm.default)
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.mm.default) == plain


def test_random_ops() -> None:
    """Numbers drawn later are the same again."""

    def body(block: Block, x: Tensor) -> Tensor:
        return (x * torch.rand_like(x)).exp() * torch.rand_like(x)

    model = stack(body)
    for nth in range(2):
        assert check(model, holds(model, "rand_like", nth=nth)) == [1, 0, 0, 0]
    with lowtide.apply(model, holds(model, "rand_like")):
        assert num_runs(model, torch.ops.aten.rand_like.default) == [1, 1, 1]

    def attention(block: Block, x: Tensor) -> Tensor:
        heads = block.up(x)[None, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[0, 0, :, :16] * torch.rand(())

    model = stack(attention)
    (name,) = (op for op in ops_of(model) if "attention" in op)
    assert check(model, holds(model, name)) == [1, 0, 0, 0]


def test_random_numbers_that_are_shown_when_others_were_drawn_take_a_watch() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return x * second + (x * first).exp() * torch.rand_like(x)

    model = stack(body)
    assert check(model, holds(model, "rand_like")) == [1, 1, 1, 1]
    assert check(model, holds(model, "rand_like", nth=1)) == [1, 0, 0, 0]

    def twice(block: Block, x: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return x * second + x * first + x.sin() * first

    model = stack(twice)
    assert check(model, holds(model, "rand_like")) == [1, 1, 1, 1]


def test_an_output_that_is_changed_is_not_held() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return (x + 1).mul_(2).sin() * 3

    model = stack(body)
    assert check(model, holds(model, "add")) == [1, 1, 0, 0]  # the second time it holds nothing, and learns that


def test_inputs_of_other_shapes() -> None:
    model = stack(feed_forward)
    inputs = [data(4), data(6), data(4), data(6), data(2), data(4)]
    assert check(model, holds(model, "gelu"), inputs) == [1, 1, 0, 0, 1, 0]


def switched(model: nn.Module, number: int) -> None:
    model[0].flag = number >= 2


def alternating(model: nn.Module, number: int) -> None:
    model[0].flag = bool(number % 2)


def test_another_branch_saves_more() -> None:
    """The step that is other computes everything, and the next one is watched."""

    def body(block: Block, x: Tensor) -> Tensor:
        x = x.exp() if block.flag else x
        return feed_forward(block, x)

    model = stack(body)
    inputs = [data() for _ in range(5)]
    plan = holds(model, "gelu")
    modes = check(model, plan, inputs, switched)
    assert modes[:2] == [1, 0]
    assert modes[-1] == 0, "learned again"
    model[0].flag = False
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.addmm.default, 2) == [1, 1]  # that of the gelu's output is held
        model[0].flag = True
        assert num_runs(model, torch.ops.aten.addmm.default, 1) == [1], "found out before the replay"


def two_of_a_kind(block: Block, x: Tensor) -> Tensor:
    """Which of two is saved, of the same form and at the same place, changes."""
    first, second = x + 1, x + 2
    return (second if block.flag else first).sin() * 3


@pytest.mark.parametrize("change", [switched, alternating])
def test_another_value_is_saved_in_its_place(change: Change, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="lowtide")
    model = stack(two_of_a_kind)
    check(model, holds(model, "add"), [data() for _ in range(8)], change)
    assert "0 runs otherwise than before: its replay computes everything" in caplog.messages


def test_one_held_output_is_saved_in_the_place_of_another() -> None:
    """In the replay it is what was taken, then, though not for that op."""

    def body(block: Block, x: Tensor) -> Tensor:
        first = x.sin()
        second = first.exp().tanh()
        return (second * (first if block.flag else second)) * first.exp()

    model = stack(body)
    for names in (("sin", "tanh"), ("sin", "exp", "tanh")):
        check(model, holds(model, *names), [data() for _ in range(6)], switched)
        check(model, holds(model, *names), [data() for _ in range(6)], alternating)


def test_a_region_that_is_often_otherwise_is_watched_for_good() -> None:
    model = stack(two_of_a_kind)
    modes = check(model, holds(model, "add"), [data() for _ in range(12)], alternating)
    assert modes[-4:] == [1, 1, 1, 1]


def test_another_op_of_the_same_form() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = (x.sin(), x.cos()) if block.flag else (x.cos(), x.sin())
        return first.exp() * second.exp().exp()

    model = stack(body)
    for change in (switched, alternating):
        check(model, holds(model, "sin"), [data() for _ in range(6)], change)
        check(model, holds(model, "cos", "sin"), [data() for _ in range(6)], change)


@pytest.mark.parametrize("when", ["before", "after", "before the last save"])
def test_a_write_that_no_version_tells_of(when: str) -> None:
    """It begins when the region is not watched any more: the forward's is in what is held, and the replay's on top."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        if block.flag and when == "before":
            made.data.mul_(3)
        y = made.sin()
        if block.flag and when != "before":
            made.data.mul_(3)
        return y.exp() if when == "before the last save" else y * 2

    model = stack(body)
    check(model, holds(model, "add"), [data() for _ in range(5)], switched)


@pytest.mark.parametrize("when", ["before it is saved", "after it is saved"])
def test_a_write_that_no_op_tells_of(when: str) -> None:
    """As kernels launched by hand do it, in every step."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        other = made.cos() if when == "after it is saved" else 1
        made.detach().numpy()[...] *= 3
        return made.sin() * other * 2

    model = stack(body)
    check(model, holds(model, "add"))


def test_a_write_before_the_replay() -> None:
    kept: list[Tensor] = []

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        if not lowtide.is_recomputing():
            kept.append(made)
        return made.sin() * 2

    model = stack(body)
    x = data()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with lowtide.apply(model, holds(model, "add")):
        for _ in range(3):
            loss = model(x).sum()
            with torch.no_grad():
                kept[-1].mul_(5)
            (actual,) = torch.autograd.grad(loss, x)
            assert torch.equal(actual, expected)


def test_two_backwards_of_one_forward() -> None:
    model = stack(feed_forward)
    x = data()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with lowtide.apply(model, holds(model, "gelu")):
        for _ in range(3):
            loss = model(x).sum()
            for keeps in (True, False):
                (actual,) = torch.autograd.grad(loss, x, retain_graph=keeps)
                assert torch.equal(actual, expected)


def test_several_forwards_before_their_backwards() -> None:
    model = stack(feed_forward)
    x = data()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with lowtide.apply(model, holds(model, "gelu")):
        losses = [model(x).sum() for _ in range(3)]
        for loss in reversed(losses):
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_an_output_whose_branch_is_not_used() -> None:
    """Nobody asks for what is saved in its place, so nothing tells whether it is the right one."""

    class Two(Block):
        def forward(self, x: Tensor) -> Any:
            self.num_modes.append(torch._C._len_torch_dispatch_stack())
            made = x + 1
            return made.sin(), (made * x).exp()

    class First(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x)[1])

    model = First(Two(feed_forward), nn.Linear(16, 16))
    check(model, holds(model, "add"))


def test_regions_of_ones_own_inside() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        made = torch.utils.checkpoint.checkpoint(lambda x: (x.sin() + 1).exp(), x, use_reentrant=False)
        return (made + 1).sin()

    model = stack(body)
    assert check(model, holds(model, "add", nth=1)) == [1, 0, 0, 0]
    assert all(check(model, holds(model, "sin")))  # saved inside, where others are told


def test_a_compiled_module_inside() -> None:
    """The compiler is not to look at what is done with saves: it would warn of that, and warnings are errors here."""

    class Compiled(Block):
        def __init__(self) -> None:
            super().__init__(lambda block, x: (block.inner((x + 1).sin()) * x).exp())  # type: ignore[operator]
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    model = nn.Sequential(Compiled(), nn.Linear(16, 16))
    plan = holds(model, "sin")
    x = data()
    model[0].inner.compile(backend="aot_eager")
    expected = [torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True) for _ in range(4)]
    model[0].num_modes.clear()
    with lowtide.apply(model, plan):
        for each in expected:
            actual = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(actual, each, strict=True))
    assert model[0].num_modes == [1, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_a_compiled_module_inside_that_the_compiler_gives_up_on() -> None:
    """What such a module saves, the compiler sees the hooks for: it is not to compile those."""

    def inner(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.tanh()
            torch._dynamo.graph_break()
        return x

    compiled = torch.compile(inner, backend="eager")
    model = stack(lambda block, x: x + compiled(block.down(F.gelu(block.up(x)))))
    with lowtide.apply(model, holds(model, "gelu", "tanh")):
        num_frames = []
        for step in range(5):
            if step == 2:
                torch._dynamo.reset()
            model(data()).sum().backward()
            num_frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert num_frames[-1] == num_frames[2]


def test_under_autocast() -> None:
    model = stack(feed_forward)
    x = data()
    plan = holds(model, "gelu")
    for precise in (True, False, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            model.zero_grad()
            model(x).float().square().sum().backward()
            expected = [parameter.grad for parameter in model.parameters()]
            with lowtide.apply(model, plan):
                for _ in range(3):
                    model.zero_grad()
                    model(x).float().square().sum().backward()
                    actual = [parameter.grad for parameter in model.parameters()]
                    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))  # type: ignore[arg-type]


def test_held_outputs_that_are_elsewhere() -> None:
    model = stack(feed_forward)
    plan = holds(model, "gelu")
    (op,) = plan.regions[0].keep_ops
    for place in ("host", "disk"):
        moved = Plan(plan.regions, (Move("0", 0, 0, to=place, op=op),))
        inputs = [data(64) for _ in range(4)]
        assert check(model, moved, inputs) == [1, 0, 0, 0]


def test_nothing_stays_when_a_forward_is_given_up() -> None:
    held: list[weakref.ref[Any]] = []

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        y = made.sin() * 2
        held.append(weakref.ref(made.untyped_storage()))
        return y

    model = stack(body)
    gc.collect()
    gc.disable()
    try:
        with lowtide.apply(model, holds(model, "add")):
            for _ in range(3):
                held.clear()
                y = model(data())
                del y
                y = model(data()).sum()
                y.backward()
                del y
                assert all(reference() is None for reference in held)
    finally:
        gc.enable()


def test_an_error_in_the_forward() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        y = (x + 1).sin()
        if block.flag:
            raise RuntimeError("as asked")
        return y * 2

    model = stack(body)
    plan = holds(model, "add")
    with lowtide.apply(model, plan):
        for flag in (False, True, False, True):
            model[0].flag = flag
            if flag:
                with pytest.raises(RuntimeError, match="as asked"):
                    model(data())
            else:
                model(data()).sum().backward()
    check(model, plan, change=lambda model, number: setattr(model[0], "flag", False))


def test_lessons_are_few() -> None:
    lessons = Lessons("")
    assert lessons.known(()) is None
    model = stack(feed_forward)
    inputs = [data(batch) for batch in range(2, 24)] * 2
    modes = check(model, holds(model, "gelu"), inputs)
    assert len(modes) == len(inputs)


# What is saved may be the output in another guise.


def check_all(body: Body, change: Change | None = None, *, reset: Callable[[], Any] = dict) -> None:
    """Whatever is held."""
    model = stack(body)
    ops = ops_of(model)
    for held in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
        plain, planned = copy.deepcopy(model), copy.deepcopy(model)
        reset()
        expected = left_behind(plain, [data() for _ in range(5)], change)
        reset()
        with lowtide.apply(planned, Plan((Recompute("0", keep_ops=held),))):
            actual = left_behind(planned, [data() for _ in range(5)], change)
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), (held, ops)


def test_an_output_is_saved_conjugated() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x * 2)
        return torch.fft.ifft(spectrum * spectrum.conj()).real.sin()

    check_all(body)


def test_an_output_is_saved_as_a_part_of_it() -> None:
    """The part is the same, of less or of more."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = (x[:1] if block.flag else x) + 1
        return made[:1].sin() + (made.sum(0) * x).exp()

    check_all(body, switched)
    check_all(body, lambda model, number: setattr(model[0], "flag", number < 2))


def test_an_output_is_saved_in_another_form() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        made = (x.view(8, 8) if block.flag else x) + 1
        return made.view(-1).sin().view(4, 16) + (made.sum(1).mean() * made.view(4, 16)[0]).exp()

    check_all(body, switched)


# Random numbers that no lesson was about.


def test_numbers_are_drawn_before_it_is_shown() -> None:
    """They were not when the region was watched."""

    def body(block: Block, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        if block.flag:
            torch.rand(())
        return (x * noise * torch.rand_like(x)).exp()

    check_all(body, switched)


@pytest.fixture
def own_ops() -> Any:
    with torch.library._scoped_library("lowtide_tests", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand(x.shape), "CompositeExplicitAutograd")
        library.define("counted(Tensor x, int k) -> (Tensor, int)")
        library.impl("counted", lambda x, k: (x + 1.0, k), "CompositeExplicitAutograd")
        library.define("chosen(Tensor x, int k) -> (Tensor, Tensor)")
        library.impl("chosen", lambda x, k: (x + 1.0, torch.arange(k)), "CompositeExplicitAutograd")
        yield torch.ops.lowtide_tests


def test_an_op_of_ones_own_draws_numbers_and_does_not_say_so(own_ops: Any) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return (x * own_ops.noisy(x.detach())).sin() * torch.rand_like(x)

    check_all(body)


def test_an_op_of_ones_own_gives_a_number_too(own_ops: Any) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        made, number = own_ops.counted(x.detach(), 5 if block.flag else 2)
        return (x * made * number).sin()

    check_all(body, switched)


def test_an_op_of_ones_own_gives_nothing_at_first(own_ops: Any) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        made, numbers = own_ops.chosen(x.detach(), 5 if block.flag else 0)
        return (x * made * (1 + numbers.sum())).sin()

    check_all(body, switched)


def test_what_is_saved_in_its_place_was_there_before() -> None:
    """An input of the region, or what is computed once for all: those are in their places in the replay too."""
    table = torch.ones(4, 16) + 1

    def an_input(block: Block, x: Tensor) -> Tensor:
        made = x * 0.5
        return (x if block.flag else made).sin() + (made * 3).exp()

    def a_constant(block: Block, x: Tensor) -> Tensor:
        made = x.detach() * 0.5
        return x * (table if block.flag else made) + (x + made * 3).exp()

    check_all(an_input, switched)
    check_all(a_constant, switched)


# What a replay does with a wrong value, before it is known to be one.


def test_it_goes_another_way() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = x + 1, x - 50
        y = (second if block.flag else first).sin()
        return (y * x if first.sum() > 0 else y).exp()

    check_all(body, switched)


def test_it_fails() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = x * 0 + 1, x * 0 + 100
        y = (second if block.flag else first).sin()
        return (x[:, int(first.max().item())][:, None] * y).exp()

    check_all(body, switched)


def test_it_writes_to_it() -> None:
    """To the region's input, or to a weight, which were saved at its place."""

    def to_input(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        if block.flag:
            made.mul_(2)
        return ((x if block.flag else made).sin() + made * 1).exp()

    def to_weight(block: Block, x: Tensor) -> Tensor:
        made = x[0] + 1
        if block.flag:
            made.mul_(2)
        return (x + (block.down.bias if block.flag else made).sin() + made * 1).exp()

    check_all(to_input, switched)
    check_all(to_weight, switched)


class Outer(nn.Module):
    def __init__(self, *, in_checkpoint: bool) -> None:
        super().__init__()
        self.inner, self.linear, self.in_checkpoint = Block(two_of_a_kind), nn.Linear(16, 16), in_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.in_checkpoint:
            return torch.utils.checkpoint.checkpoint(self.call, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(self.linear(x).exp())).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_region_inside_another_replays_once_more(in_checkpoint: bool) -> None:
    model = nn.Sequential(Outer(in_checkpoint=in_checkpoint))
    inner = Recompute("0.inner", keep_ops=(0,))
    plan = Plan((inner,) if in_checkpoint else (Recompute("0"), inner))

    def change(model: nn.Module, number: int) -> None:
        model[0].inner.flag = number >= 2

    plain = left_behind(copy.deepcopy(model), [data() for _ in range(4)], change)
    with lowtide.apply(model, plan):
        actual = left_behind(model, [data() for _ in range(4)], change)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))


# Also where the forward is watched.


def test_something_is_computed_once_and_remembered() -> None:
    """The replay runs fewer ops than its forward, so that other ops have the same numbers."""
    remembered: dict[str, Tensor] = {}

    def body(block: Block, x: Tensor) -> Tensor:
        if not remembered:
            remembered["table"] = (torch.ones(4, 16) * 3).cos()
        first = x * remembered["table"]
        second = first * 2
        return (second * second * first).sin()

    check_all(body, reset=remembered.clear)


def test_statistics_are_written_to_it() -> None:
    """Of which the op's schema says nothing."""

    def body(block: Block, x: Tensor) -> Tensor:
        mean, variance = torch.zeros(16) + 0.5, torch.ones(16) + 0.1
        return (F.batch_norm(x, mean, variance, training=True) * mean * variance).sin()

    check_all(body)


def test_what_is_saved_is_changed_in_place_afterwards() -> None:
    """An error, as without a plan."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        y = made.sin()
        if block.flag:
            with torch.no_grad():
                made.mul_(2)
        return (y * 3).exp()

    model = stack(body)
    for held in range(4):
        model[0].flag = False
        with lowtide.apply(model, Plan((Recompute("0", keep_ops=(held,)),))):
            for flag in (False, False, True, True):
                model[0].flag = flag
                loss = model(data()).sum()
                if flag:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()
                else:
                    loss.backward()
