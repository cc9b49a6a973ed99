"""Op outputs that a region retains: learned in the first replay, taken from the second step on, never a wrong value."""

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
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.eager import Applied
from lowtide.plans import Move, Plan, Recompute
from stepping import RunsOf

pytestmark = pytest.mark.usefixtures("one_thread")

Body = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Runs `body`, and notes at its end how many dispatch modes are on in a forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.flag = False
        self.num_modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self, x)
        if not lowtide.is_recomputing():
            self.num_modes.append(torch._C._len_torch_dispatch_stack())
        return y


def feed_forward(block: Block, x: Tensor) -> Tensor:
    return x + block.down(F.gelu(block.up(x)))


def stack(body: Body) -> nn.Sequential:
    return nn.Sequential(Block(body), nn.Linear(16, 16))


def data(batch: int = 4) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(batch)).requires_grad_()


def ops_of(model: nn.Module, precision: torch.dtype | None = None) -> list[str]:
    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            return sum_of(model(x))

    graph = lowtide.trace(model, loss_fn, data(), mode="real")
    call = graph.calls[graph.calls_by_path["0"][0]]
    return [op.name.removeprefix("aten.").split(".")[0] for op in graph.ops[call.first : call.end]]


def sum_of(output: Any) -> Tensor:
    return sum((each.sum() for each in output), torch.zeros(())) if isinstance(output, tuple) else output.sum()


def retains(model: nn.Module, *names: str, nth: int = 0) -> Plan:
    """A plan that retains the output of the nth op of each name."""
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


def check(model: nn.Module, plan: Plan, inputs: list[Tensor] | None = None, change: Change | None = None) -> None:
    """With the plan and without, the same is left behind; and no forward has a dispatch mode."""
    inputs = inputs or [data() for _ in range(4)]
    plain = left_behind(copy.deepcopy(model), inputs, change)
    model[0].num_modes.clear()
    with lowtide.apply(model, plan):
        actual = left_behind(model, inputs, change)
    assert len(actual) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))
    assert not any(model[0].num_modes)


def num_runs(model: nn.Module, op: Any, steps: int = 3, batch: int = 4) -> list[int]:
    """How often an op runs in the backward of each step."""
    found = []
    for _ in range(steps):
        loss = model(data(batch)).square().sum()
        with RunsOf(op) as runs:
            loss.backward()
        found.append(runs.count)
    return found


def test_a_retained_output_is_taken_from_the_second_step_on() -> None:
    model = stack(feed_forward)
    check(model, retains(model, "gelu"))
    with lowtide.apply(model, retains(model, "gelu")):
        assert num_runs(model, torch.ops.aten.gelu.default) == [1, 0, 0]


def test_few_objects_wait_for_the_backward() -> None:
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
    with lowtide.apply(model, retains(model, "sin")):
        ours = num_objects(model)
    block = model[0]
    block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    assert ours < 0.1 * num_objects(model)


def test_an_output_that_is_not_saved_is_computed_again() -> None:
    model = stack(lambda block, x: (block.down(block.up(x).tanh() * 2) + 1).exp())
    plan = retains(model, "mul")
    check(model, plan)
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.addmm.default) == [2, 2, 2]
    plan = retains(model, "addmm", nth=1)
    check(model, plan)
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.addmm.default) == [2, 2, 2]  # nothing is saved to add one


def test_an_output_is_saved_as_a_view() -> None:
    model = stack(lambda block, x: block.down((x.sin() @ block.down.weight).t().contiguous().t()))
    with lowtide.apply(model, retains(model, "sin")):
        assert num_runs(model, torch.ops.aten.sin.default) == [1, 0, 0]

    def body(block: Block, x: Tensor) -> Tensor:
        return x * (x + 1).t().exp().t().sin()  # saved turned by exp, as it was made; by sin turned back

    model = stack(body)
    check(model, retains(model, "exp"))
    with lowtide.apply(model, retains(model, "exp")):
        assert num_runs(model, torch.ops.aten.exp.default) == [1, 0, 0]


def test_an_output_is_saved_as_a_view_that_does_not_say_so() -> None:
    """A product of more than two dimensions, as every linear layer without a bias makes it; saved once, and twice."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = (x[None].expand(3, -1, -1) @ block.down.weight)[..., :16]
        return (made.sin() * made.cos()).sum(dim=0)

    model = stack(body)
    plan = retains(model, "mm")
    assert "_unsafe_view" in ops_of(model)
    check(model, plan)
    plain = num_runs(model, torch.ops.aten.mm.default)
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.mm.default) == [plain[0] + 1, *plain[1:]]


def test_random_ops() -> None:
    """Numbers drawn later are the same again."""

    def body(block: Block, x: Tensor) -> Tensor:
        return (x * torch.rand_like(x)).exp() * torch.rand_like(x)

    model = stack(body)
    for nth in range(2):
        check(model, retains(model, "rand_like", nth=nth))
    with lowtide.apply(model, retains(model, "rand_like")):
        assert num_runs(model, torch.ops.aten.rand_like.default) == [2, 1, 1]

    def attention(block: Block, x: Tensor) -> Tensor:
        heads = block.up(x)[None, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[0, 0, :, :16] * torch.rand(())

    model = stack(attention)
    (name,) = (op for op in ops_of(model) if "attention" in op)
    check(model, retains(model, name))


def test_random_numbers_that_are_saved_when_others_were_drawn_are_drawn_again() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return x * second + (x * first).exp() * torch.rand_like(x)

    model = stack(body)
    check(model, retains(model, "rand_like"))
    check(model, retains(model, "rand_like", nth=1))

    def twice(block: Block, x: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return x * second + x * first + x.sin() * first

    model = stack(twice)
    check(model, retains(model, "rand_like"))


def test_an_output_that_is_changed_in_place_is_not_retained() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return (x + 1).mul_(2).sin() * 3

    model = stack(body)
    check(model, retains(model, "add"))
    with lowtide.apply(model, retains(model, "add")):
        assert num_runs(model, torch.ops.aten.add.Tensor) == [1, 1, 1]


def test_inputs_of_other_shapes() -> None:
    """Each is learned once."""
    model = stack(feed_forward)
    inputs = [data(4), data(6), data(4), data(6), data(2), data(4)]
    check(model, retains(model, "gelu"), inputs)
    with lowtide.apply(model, retains(model, "gelu")):
        for batch, expected in ((4, [1, 0]), (6, [1, 0]), (4, [0]), (6, [0])):
            assert num_runs(model, torch.ops.aten.gelu.default, len(expected), batch) == expected


def test_many_shapes() -> None:
    model = stack(feed_forward)
    check(model, retains(model, "gelu"), [data(batch) for batch in range(2, 24)] * 2)


def switched(model: nn.Module, number: int) -> None:
    model[0].flag = number >= 2


def alternating(model: nn.Module, number: int) -> None:
    model[0].flag = bool(number % 2)


def test_another_branch_saves_more() -> None:
    """The step that is other computes everything, and the next ones retain again."""

    def body(block: Block, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(block.flag):
            more = x.sin()
        return feed_forward(block, x + more)

    model = stack(body)
    plan = retains(model, "gelu")
    check(model, plan, [data() for _ in range(5)], switched)
    model[0].flag = False
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.gelu.default) == [1, 0, 0]
        model[0].flag = True
        assert num_runs(model, torch.ops.aten.gelu.default) == [1, 1, 0]  # found out, learned, taken


def two_of_a_kind(block: Block, x: Tensor) -> Tensor:
    """Which of two is saved, of the same form and at the same place, changes."""
    first, second = x + 1, x + 2
    return ((second if block.flag else first).sin() * 3).exp()


@pytest.mark.parametrize("change", [switched, alternating])
def test_another_value_is_saved_in_its_place(change: Change, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="lowtide")
    model = stack(two_of_a_kind)
    check(model, retains(model, "add"), [data() for _ in range(8)], change)
    assert "0 runs other ops than before: its replay computes everything" in caplog.messages


def test_one_retained_output_is_saved_in_the_place_of_another() -> None:
    """In the replay it is what was taken, then, though not for that op."""

    def body(block: Block, x: Tensor) -> Tensor:
        first = x.sin()
        second = first.exp().tanh()
        return (second * (first if block.flag else second)) * first.exp()

    model = stack(body)
    for names in (("sin", "tanh"), ("sin", "exp", "tanh")):
        check(model, retains(model, *names), [data() for _ in range(6)], switched)
        check(model, retains(model, *names), [data() for _ in range(6)], alternating)


def test_a_region_that_is_often_otherwise_retains_nothing() -> None:
    model = stack(two_of_a_kind)
    check(model, retains(model, "add"), [data() for _ in range(12)], alternating)
    with lowtide.apply(model, retains(model, "add")):
        for number in range(12):
            alternating(model, number)
            num_runs(model, torch.ops.aten.add.Tensor, 1)
        assert num_runs(model, torch.ops.aten.add.Tensor) == [2, 2, 2]


def test_another_op_of_the_same_form() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        first, second = (x.sin(), x.cos()) if block.flag else (x.cos(), x.sin())
        return first.exp() * second.exp().exp()

    model = stack(body)
    for change in (switched, alternating):
        check(model, retains(model, "sin"), [data() for _ in range(6)], change)
        check(model, retains(model, "cos", "sin"), [data() for _ in range(6)], change)


@pytest.mark.parametrize("when", ["before", "after", "before the last save"])
def test_a_write_that_no_version_tells_of(when: str) -> None:
    """It begins after the learning replay: the forward's is in what is kept, and the replay's on top."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        if block.flag and when == "before":
            made.data.mul_(3)
        y = made.sin()
        if block.flag and when != "before":
            made.data.mul_(3)
        return y.exp() if when == "before the last save" else y * 2

    model = stack(body)
    check(model, retains(model, "add"), [data() for _ in range(5)], switched)


@pytest.mark.parametrize("when", ["before it is saved", "after it is saved"])
def test_a_write_that_no_op_tells_of(when: str) -> None:
    """As kernels launched by hand do it, in every step."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        other = made.cos() if when == "after it is saved" else 1
        made.detach().numpy()[...] *= 3
        return made.sin() * other * 2

    model = stack(body)
    check(model, retains(model, "add"))


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
    with lowtide.apply(model, retains(model, "add")):
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
    with lowtide.apply(model, retains(model, "gelu")):
        for _ in range(3):
            loss = model(x).sum()
            for keeps in (True, False):
                (actual,) = torch.autograd.grad(loss, x, retain_graph=keeps)
                assert torch.equal(actual, expected)


def test_several_forwards_before_their_backwards() -> None:
    model = stack(feed_forward)
    x = data()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with lowtide.apply(model, retains(model, "gelu")):
        losses = [model(x).sum() for _ in range(3)]
        for loss in reversed(losses):
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_an_output_whose_branch_is_not_used() -> None:
    """Nobody asks for what is saved in its place, so nothing tells whether it is the right one."""

    class Two(Block):
        def forward(self, x: Tensor) -> Any:
            made = x + 1
            return made.sin(), (made * x).exp()

    class First(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x)[1])

    model = First(Two(feed_forward), nn.Linear(16, 16))
    check(model, retains(model, "add"))


def test_regions_of_ones_own_inside() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        made = torch.utils.checkpoint.checkpoint(lambda x: (x.sin() + 1).exp(), x, use_reentrant=False)
        return (made + 1).sin()

    model = stack(body)
    check(model, retains(model, "add", nth=1))
    check(model, retains(model, "sin"))  # saved inside, where the region does not see it


def test_a_compiled_module_inside() -> None:
    """The compiler is not to look at what is done with saves: it would warn of that, and warnings are errors here."""

    class Compiled(Block):
        def __init__(self) -> None:
            super().__init__(lambda block, x: (block.inner((x + 1).sin()) * x).exp())  # type: ignore[operator]
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    model = nn.Sequential(Compiled(), nn.Linear(16, 16))
    plan = retains(model, "sin")
    x = data()
    model[0].inner.compile(backend="aot_eager")
    expected = [torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True) for _ in range(4)]
    model[0].num_modes.clear()
    with lowtide.apply(model, plan):
        for each in expected:
            actual = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(actual, each, strict=True))
    assert not any(model[0].num_modes)


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
    with lowtide.apply(model, retains(model, "gelu", "tanh")):
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
    plan = retains(model, "gelu")
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


def test_retained_outputs_that_are_moved() -> None:
    model = stack(feed_forward)
    plan = retains(model, "gelu")
    (op,) = plan.regions[0].keep_ops
    for place in ("host", "disk"):
        moved = Plan(plan.regions, (Move("0", 0, 0, to=place, op=op),))
        inputs = [data(64) for _ in range(4)]
        check(model, moved, inputs)


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
        with lowtide.apply(model, retains(model, "add")):
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
    plan = retains(model, "add")
    with lowtide.apply(model, plan):
        for flag in (False, True, False, True):
            model[0].flag = flag
            if flag:
                with pytest.raises(RuntimeError, match="as asked"):
                    model(data())
            else:
                model(data()).sum().backward()
    check(model, plan, change=lambda model, number: setattr(model[0], "flag", False))


# What is saved may be the output in another guise.


def check_all(body: Body, change: Change | None = None, *, reset: Callable[[], Any] = dict) -> None:
    """Whatever is retained."""
    model = stack(body)
    ops = ops_of(model)
    for kept in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
        plain, planned = copy.deepcopy(model), copy.deepcopy(model)
        reset()
        expected = left_behind(plain, [data() for _ in range(5)], change)
        reset()
        with lowtide.apply(planned, Plan((Recompute("0", keep_ops=kept),))):
            actual = left_behind(planned, [data() for _ in range(5)], change)
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), (kept, ops)


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


# Random numbers that no profile was learned with.


def test_numbers_are_drawn_before_it_is_saved() -> None:
    """They were not when the profile was learned."""

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
        library.define("is_large(Tensor x) -> bool")
        library.impl("is_large", lambda x: bool(x.sum() > 0), "CompositeExplicitAutograd")
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
        self.after = Block(lambda block, x: block.down(block.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_checkpoint:
            return torch.utils.checkpoint.checkpoint(self.call, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        return self.linear(self.after(self.inner(self.linear(x).exp()))).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("more", [(), (("0.after", 0),)])
@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_region_inside_another_replays_once_more(in_checkpoint: bool, more: tuple[tuple[str, int], ...]) -> None:
    """torch's checkpoint unpacks each input of a region inside it only once, also of a segment."""
    model = nn.Sequential(Outer(in_checkpoint=in_checkpoint))
    inner = Recompute("0.inner", keep_ops=(0,), more=more)
    plan = Plan((inner,) if in_checkpoint else (Recompute("0"), inner))

    def change(model: nn.Module, number: int) -> None:
        model[0].inner.flag = number >= 2

    plain = left_behind(copy.deepcopy(model), [data() for _ in range(4)], change)
    with lowtide.apply(model, plan):
        actual = left_behind(model, [data() for _ in range(4)], change)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))


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
    """An error as without a plan, or the gradient that would be right if there were none."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = x + 1
        y = made.sin()
        if block.flag:
            with torch.no_grad():
                made.mul_(2)
        return (y * 3).exp()

    model, num_errors = stack(body), 0
    x = data()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    for kept in range(4):
        with lowtide.apply(model, Plan((Recompute("0", keep_ops=(kept,)),))):
            for flag in (False, False, True, True):
                model[0].flag = flag
                loss = model(x).sum()
                try:
                    (actual,) = torch.autograd.grad(loss, x)
                except RuntimeError as error:
                    assert flag and "modified by an inplace operation" in str(error)
                    num_errors += 1
                else:
                    assert torch.equal(actual, expected)
    assert num_errors


# The replay reads a taken value before it is saved: the check at the save would find what the wrong value led to.


@pytest.mark.parametrize("way", ["item", "shape", "mask"])
def test_a_branch_depends_on_a_retained_output(way: str) -> None:
    def is_large(made: Tensor) -> bool:
        if way == "item":
            return bool(made.sum().item() > 0)
        return len(made[0][made[0] > 0] if way == "mask" else made[0].gt(0).nonzero()) > 0

    def body(block: Block, x: Tensor) -> Tensor:
        first, second = x * 0 + (1 if block.flag else -1), x * 0 - 50
        y = (second if is_large(first) else first).sin()
        return (y * first.exp() * x).exp()

    check_all(body, switched)


def test_a_branch_depends_on_a_copy_of_a_retained_output(own_ops: Any) -> None:
    """As an op of one's own reads it."""

    def body(block: Block, x: Tensor) -> Tensor:
        first, second = x * 0 + (1 if block.flag else -1), x * 0 - 50
        y = (second if own_ops.is_large(first) else first).sin()
        return (y * first.exp() * x).exp()

    check_all(body, switched)


def test_the_generator_is_seeded_where_the_output_is_saved() -> None:
    """Its state there is not the state that the op has left."""

    def body(block: Block, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        with torch.random.fork_rng(devices=[]):
            if block.flag:
                torch.manual_seed(7)
            y = x * noise
        return (y * torch.rand_like(x)).exp()

    check_all(body, switched)
    check_all(body, lambda model, number: setattr(model[0], "flag", number < 2))
    check_all(body, lambda model, number: setattr(model[0], "flag", True))


def test_a_weight_that_is_no_parameter_is_changed_before_the_backward() -> None:
    """Its only op is taken, so no op of the replay reads it; but autograd saves it."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__(lambda block, x: (F.gelu(x @ block.weight) * x).exp())
            self.weight = torch.eye(16).requires_grad_()

    model = nn.Sequential(Scaled(), nn.Linear(16, 16))
    for keep in (retains(model, "mm"), retains(model, "mm", "gelu")):
        with lowtide.apply(model, keep):
            for step in range(4):
                loss = model(data()).sum()
                if step >= 2:
                    with torch.no_grad():
                        model[0].weight.mul_(2)  # type: ignore[operator]
                    with pytest.raises(RuntimeError, match=r"in place|inplace"):
                        loss.backward()
                else:
                    loss.backward()


def test_a_parameter_is_changed_before_the_backward() -> None:
    model = stack(feed_forward)
    for keep in (retains(model, "addmm"), retains(model, "addmm", "gelu")):
        with lowtide.apply(model, keep):
            for step in range(4):
                loss = model(data()).sum()
                if step >= 2:
                    with torch.no_grad():
                        model[0].down.weight.mul_(2)
                        model[0].up.weight.mul_(2)
                    with pytest.raises(RuntimeError, match=r"in place|inplace"):
                        loss.backward()
                else:
                    loss.backward()


def test_casts_that_autocast_remembers() -> None:
    """What a replay takes must not become what later forwards use."""
    model = stack(feed_forward)
    x = data()
    ops = ops_of(model, precision=torch.bfloat16)
    casts = tuple(at for at, op in enumerate(ops) if op == "_to_copy")
    assert casts

    def steps(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(2):
                    y = model(x)
                    torch.clear_autocast_cache()
                    found += [y.detach(), *torch.autograd.grad(y.float().sum(), [x, *model.parameters()])]
                    again = [model(x), model(x)]
                    loss = sum(y.float().sum() for y in again)
                    found += torch.autograd.grad(loss, [x, *model.parameters()])
                    assert all(y._version < 100 for y in again)
        return found

    expected = steps(model)
    for kept in (casts, tuple(range(len(ops)))):
        with lowtide.apply(model, Plan((Recompute("0", keep_ops=kept),))):
            actual = steps(model)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_part_that_is_not_saved_depends_on_arguments() -> None:
    """The op's other output is a number or is empty, whatever the form of the one that is saved."""

    def body(block: Block, x: Tensor) -> Tensor:
        words = torch.arange(8) % 4
        offsets = torch.arange(0, 8, 2)
        mode = 2 if block.flag else 0
        made, bags, sizes, most = torch._embedding_bag(x, words, offsets, False, mode)
        scale = 1 + most.sum() + sizes.sum() + bags.sum()
        return (made * x).sin() * scale

    check_all(body, switched)
    check_all(body, lambda model, number: setattr(model[0], "flag", number < 2))


def test_attention_with_dropout() -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        heads = block.up(x)[None, None]
        y = F.scaled_dot_product_attention(heads, heads * 2, heads.exp(), dropout_p=0.3)
        return (y[0, 0, :, :16] * torch.rand_like(x)).sin()

    check_all(body)


def test_statistics_of_a_norm() -> None:
    class Normed(Block):
        def __init__(self, body: Body) -> None:
            super().__init__(body)
            self.norm = nn.BatchNorm1d(16)

    model = nn.Sequential(Normed(lambda block, x: (block.norm(x.sin()) * x.exp()).tanh()), nn.Linear(16, 16))  # type: ignore[operator]
    ops = ops_of(model)
    for kept in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
        check(model, Plan((Recompute("0", keep_ops=kept),)))


def test_hooks_return_other_tensors() -> None:
    model = stack(feed_forward)
    model[0].up.flag = False
    model[0].up.register_forward_hook(lambda module, args, output: output * 2 if module.flag else output.sin())
    model[0].down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    ops = ops_of(model)
    for kept in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
        check(
            model,
            Plan((Recompute("0", keep_ops=kept),)),
            [data() for _ in range(5)],
            lambda model, number: setattr(model[0].up, "flag", number >= 2),
        )


def test_double_backward() -> None:
    model = stack(feed_forward)
    x = data()

    def second() -> list[Tensor]:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()], allow_unused=True))

    expected = second()
    for kept in ("gelu", "addmm"):
        with lowtide.apply(model, retains(model, kept)):
            for _ in range(3):
                for a, b in zip(second(), expected, strict=True):
                    assert a is b is None or torch.equal(a, b)


def test_partial_gradients_of_one_forward() -> None:
    """Of the last weight, then of the first, then of all."""
    model = stack(lambda block, x: (block.down(F.gelu(block.up(x)).sin()) * x).exp())
    x, parameters = data(), list(model.parameters())
    ops = ops_of(model)

    def parts() -> list[Tensor]:
        loss = model(x).square().sum()
        found = list(torch.autograd.grad(loss, parameters[-1:], retain_graph=True))
        found += torch.autograd.grad(loss, [model[0].down.weight], retain_graph=True)
        found += torch.autograd.grad(loss, [x], retain_graph=True)
        return found + list(torch.autograd.grad(loss, [x, *parameters]))

    expected = parts()
    for kept in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
        with lowtide.apply(model, Plan((Recompute("0", keep_ops=kept),))):
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(parts(), expected, strict=True))


def test_a_first_backward_of_a_part_still_learns_all() -> None:
    class Two(Block):
        def forward(self, x: Tensor) -> Any:
            return x.sin().exp(), F.gelu(self.up(x)).sin()

    model = nn.Sequential(Two(feed_forward))
    plan = Plan((Recompute("0", keep_ops=(ops_of(model).index("gelu"),)),))
    x = data()
    with lowtide.apply(model, plan):
        model(x)[0].sum().backward()
        found = []
        for _ in range(3):
            first, second = model(x)
            with RunsOf(torch.ops.aten.gelu.default) as runs:
                (first.sum() + second.sum()).backward()
            found.append(runs.count)
    assert found == [0, 0, 0]


@pytest.mark.parametrize("to", ["host", "disk"])
def test_moved_outputs_that_are_saved_as_views_or_parts(to: str) -> None:
    def turned(block: Block, x: Tensor) -> Tensor:
        made = block.up(x)
        return (x * made.t().sin().t()[:, :16] * made[:, 16:].cos()).exp()

    def channels_last(block: Block, x: Tensor) -> Tensor:
        images = (x[:, :, None, None].expand(-1, -1, 3, 3) * 2).contiguous(memory_format=torch.channels_last)
        return ((images + 1).sin() * images).exp().mean((2, 3))

    for body in (turned, channels_last):
        model = stack(body)
        ops = ops_of(model)
        for kept in [(at,) for at in range(len(ops))] + [tuple(range(len(ops)))]:
            moves = tuple(Move("0", 0, 0, to=to, op=op) for op in kept)
            check(model, Plan((Recompute("0", keep_ops=kept),), moves), [data(64) for _ in range(3)])


@pytest.mark.usefixtures("quick_search")
def test_a_weight_that_is_trained_later_and_a_buffer_written_in_the_forward() -> None:
    """The scale of the weight is that of the forward, whatever is known from when the weight was frozen."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.randn(64, 64), requires_grad=False), nn.Linear(64, 64)
            self.register_buffer("average", torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight * self.average.clone())
            with torch.no_grad():
                self.average.lerp_(y.detach().mean(0), 0.5)
            return self.out(F.gelu(y).sin()).tanh()

    plain = nn.Sequential(*(Averaged() for _ in range(3)))
    x = torch.randn(128, 64)

    def steps(model: nn.Module) -> list[Tensor]:
        for each in model:
            each.weight.requires_grad_(True)
        found = []
        for _ in range(4):
            model.zero_grad()
            model(x).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            found += [buffer.clone() for buffer in model.buffers()]
        return found

    def check_steps(handle: Applied, model: nn.Module) -> None:
        expected = steps(copy.deepcopy(plain))
        with handle:
            assert all(torch.equal(a, b) for a, b in zip(steps(model), expected, strict=True))

    def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(x).square().mean()

    graph = lowtide.trace(plain, loss_of(plain), x, mode="real")
    frontier = lowtide.sweep(graph, [])
    for share in (0.2, 0.6):
        budget = int(frontier.floor_bytes + share * (frontier.plain_peak_bytes - frontier.floor_bytes))
        model = copy.deepcopy(plain)
        handle = lowtide.fit(model, loss_of(model), x, budget=budget, tune_s=0)
        assert handle.plan.regions
        check_steps(handle, model)
    call = graph.calls[graph.calls_by_path["1"][0]]
    for op in range(call.end - call.first):
        model = copy.deepcopy(plain)
        handle = lowtide.apply(model, Plan(tuple(Recompute(str(at), keep_ops=(op,)) for at in range(3))))
        for _ in range(2):  # frozen: this is what is learned
            loss_of(model)(x).backward()
        model.load_state_dict(plain.state_dict())
        check_steps(handle, model)


def test_a_region_inside_with_buffers() -> None:
    """Copies that the engine makes of them are no ops of the region outside."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__(lambda block, x: x * F.gelu(block.up(block.norm(x)))[:, :16].sin())  # type: ignore[operator]
            self.norm = nn.BatchNorm1d(16)

    model = nn.Sequential(Normed(), nn.Linear(16, 16))
    plan = Plan((*retains(model, "gelu").regions, Recompute("0.norm")))
    check(model, plan)
    with lowtide.apply(model, plan):
        assert num_runs(model, torch.ops.aten.gelu.default) == [1, 0, 0]


@pytest.mark.parametrize("to", [None, "host", "disk"])
def test_queries_keys_and_values_of_one_product(to: str | None) -> None:
    """Each is a third of its output; all of it is moved, and brought back once."""

    def body(block: Block, x: Tensor) -> Tensor:
        query, key, value = block.packed(x).chunk(3, dim=-1)  # type: ignore[operator]
        return query.exp() * key.sin() * value.tanh() * x

    model = stack(body)
    model[0].packed = nn.Linear(16, 48)
    plan = retains(model, "addmm")
    if to is not None:
        plan = Plan(plan.regions, tuple(Move("0", to=to, op=op) for op in plan.regions[0].keep_ops))
    check(model, plan, [data(64) for _ in range(4)])
    with lowtide.apply(model, plan) as handle:
        assert num_runs(model, torch.ops.aten.addmm.default, batch=64) == [1, 0, 0]
        loss = model(data(64)).sum()
        assert handle.stats().stored_bytes == (0 if to is None else 64 * 48 * 4)
        loss.backward()
        assert handle.stats().stored_bytes == 0
