"""Ops that a replay leaves out, as only held ones read what they make: the same step, and never garbage in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.engines import _compat, replayedops, skippedops
from lowtide.engines.lessons import Lessons
from lowtide.plans import Move, Plan, Recompute
from stepping import RunsOf

pytestmark = pytest.mark.usefixtures("one_thread", "_worst_garbage", "_no_accelerator")

Extra = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def _worst_garbage() -> Iterator[None]:
    """Memory that was just let go of may hold the right numbers by luck."""
    make = skippedops.StandIn.make

    def poisoned(self: skippedops.StandIn) -> tuple[Any, list[Tensor]]:
        output, tensors = make(self)
        for tensor in tensors:
            tensor.untyped_storage().fill_(0xFF)  # not a number, in every precision
        return output, tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skippedops.StandIn, "make", poisoned)
        yield


@pytest.fixture
def _no_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, nothing in host memory is put off, and these tests compute there."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(_compat, "accelerator", lambda: None)


class Attention(nn.Module):
    """Rotary embeddings on its queries and keys. `extra` comes behind the attention, where it moves no op before it."""

    def __init__(self, *, dropout: float = 0.0, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16) if has_norm else nn.Identity()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        angles = torch.arange(8.0)[:, None] / torch.arange(1.0, 5.0).repeat(2)
        self.cos = nn.Parameter(angles.cos(), requires_grad=False)
        self.sin = nn.Parameter(angles.sin(), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.extra: Extra | None = None
        self.last: Tensor | None = None

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.attended(x))

    def attended(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        made = (linear(normed) for linear in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in made)
        turned = self.rotated(query)
        y = F.scaled_dot_product_attention(turned, self.rotated(key), value)
        if self.extra is not None:
            y = self.extra(self, query, turned, y)
        return self.out(y.transpose(1, 2).flatten(2))


def data(*, requires_grad: bool = True, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    made = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    return made.to(device, dtype).requires_grad_(requires_grad)


def loss_of(model: nn.Module, x: Tensor, precision: torch.dtype | None) -> Tensor:
    with torch.autocast("cpu", precision, enabled=precision is not None):
        return model(x).float().square().mean()


def ops_of(model: nn.Module, path: str = "0", *, precision: torch.dtype | None = None, **kwargs: Any) -> list[str]:
    """The ops of one call of a module, as a trace has them."""
    graph = lowtide.trace(model, lambda x: loss_of(model, x, precision), data(**kwargs), mode="real")
    call = next(call for call in graph.calls if call.path == path)
    return [op.name.removeprefix("aten.").split(".")[0] for op in graph.ops[call.first : call.end]]


def rotations(ops: list[str], *, skips_casts: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rotated query and key, to be held; and what leads to them alone."""
    products = [at for at, op in enumerate(ops) if op == "mm"]
    kept = [at for at, op in enumerate(ops) if op == "add" and at > products[2]][:2]
    casts = [at for at, op in enumerate(ops) if op == "_to_copy" and at < products[1]] if skips_casts else []
    between = [at for at in range(products[2] + 1, kept[1]) if ops[at] in ("mul", "neg", "cat")]
    assert len(between) == 8
    return tuple(kept), (*casts, *products[:2], *between)


def planned(*paths: str, ops: list[str] | None = None, skips: bool = True) -> Plan:
    kept, skipped = rotations(ops or ops_of(nn.Sequential(Attention())))
    return Plan(tuple(Recompute(path, keep_ops=kept, skip_ops=skipped if skips else ()) for path in paths))


def left_behind(
    model: nn.Module, *, precision: torch.dtype | None = None, steps: int = 2, **kwargs: Any
) -> list[Tensor]:
    """All that some steps leave: outputs, gradients, buffers and random state."""
    torch.manual_seed(2)
    x, found = data(**kwargs), []
    for _ in range(steps):
        with torch.autocast("cpu", precision, enabled=precision is not None):
            output = model(x)
            output.float().square().mean().backward()
        found.append(output.detach())
    gradients = [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    model.zero_grad()
    return [*found, *gradients, *buffers, state]


class Late:
    """Counts how often an op runs that was put off, which no mode sees."""

    def __init__(self, op: Any) -> None:
        self.count, self._op = 0, op

    def __enter__(self) -> Late:
        self._compute = compute = skippedops._Postponed.compute

        def counted(postponed: skippedops._Postponed) -> None:
            self.count += postponed.func is self._op
            compute(postponed)

        skippedops._Postponed.compute = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        skippedops._Postponed.compute = self._compute  # type: ignore[method-assign]


def products_of(model: nn.Module, plan: Plan, *, precision: torch.dtype | None = None, **kwargs: Any) -> int:
    """How many matrix products run in the backward, whether the forward is watched or not."""
    found = []
    with lowtide.apply(model, plan):
        for _ in range(2):
            loss = loss_of(model, data(**kwargs), precision)
            with RunsOf(torch.ops.aten.mm.default) as products, Late(torch.ops.aten.mm.default) as late:
                loss.backward()
            found.append(products.count + late.count)
    model.zero_grad()
    assert found[0] == found[1]
    return found[0]


def num_skipped(model: nn.Module, plan: Plan, **kwargs: Any) -> int:
    """How many products fewer run than would without `skip_ops`."""
    without = Plan(tuple(Recompute(region.path, keep_ops=region.keep_ops) for region in plan.regions), plan.moves)
    return products_of(model, without, **kwargs) - products_of(model, plan, **kwargs)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def check(model: nn.Module, plan: Plan, **kwargs: Any) -> None:
    """With the plan and without, the same is left behind."""
    state = copy.deepcopy(model.state_dict())
    plain = left_behind(model, **kwargs)
    model.load_state_dict(state)
    with lowtide.apply(model, plan):
        assert_same(left_behind(model, **kwargs), plain)


# What is left out.


def test_what_leads_to_held_outputs_only_is_not_computed_again() -> None:
    model = nn.Sequential(Attention(), Attention(dropout=0.2), Attention())
    plan = planned("0", "1", "2")
    check(model, plan)
    assert num_skipped(model, plan) == 6


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = nn.Sequential(Attention(), Attention(dropout=0.2)).cuda()
    plan = planned("0", "1", ops=ops_of(model, device="cuda"))
    check(model, plan, device="cuda")
    assert num_skipped(model, plan, device="cuda") == 4


def test_only_the_ops_named_are_left_out() -> None:
    """Of the query: its product, and one more op."""
    kept, skipped = rotations(ops_of(nn.Sequential(Attention())))
    model = nn.Sequential(Attention())
    for some in (skipped[:1], skipped[2:], (skipped[0], *skipped[2:6])):
        plan = Plan((Recompute("0", keep_ops=kept, skip_ops=some),))
        check(model, plan)
        needs_all = skipped[0] in some and len(some) == 1
        assert num_skipped(model, plan) == (0 if needs_all else int(skipped[0] in some))


def test_under_autocast() -> None:
    model = nn.Sequential(Attention(), Attention(dropout=0.2))
    plan = planned("0", "1", ops=ops_of(model, "1", precision=torch.bfloat16))
    check(model, plan, precision=torch.bfloat16)
    assert num_skipped(model, plan, precision=torch.bfloat16) == 4


def test_casts_that_autocast_remembers_are_made_again() -> None:
    """Nothing in the region reads them but products that are left out; what autocast has is for all of its block."""
    model = nn.Sequential(Attention(has_norm=False))
    how: dict[str, Any] = {"precision": torch.bfloat16, "requires_grad": False, "dtype": torch.bfloat16}
    kept, skipped = rotations(ops_of(model, **how), skips_casts=True)
    assert len(skipped) == 12
    plan = Plan((Recompute("0", keep_ops=kept, skip_ops=skipped),))
    check(model, plan, **how)
    with lowtide.apply(model, plan), torch.autocast("cpu", torch.bfloat16):
        x = data(requires_grad=False, dtype=torch.bfloat16)
        loss = model(x).square().mean()
        torch.clear_autocast_cache()  # as a backward in another block finds it
        loss.backward()
        with torch.no_grad():
            assert not model(x).isnan().any(), "a cast that the replay made is used"
    model.zero_grad()
    assert num_skipped(model, plan, **how) == 2


class WithLeaf(nn.Module):
    """A weight that is no parameter, and is cast before the region that casts other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.eye(16).roll(1, 0).requires_grad_()
        self.inside = InLeaf(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # over when the backward comes, and what it remembers gone
            return self.inside((x @ self.weight).float())


class InLeaf(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).float()
        return ((hidden.sigmoid() * self.scale).bfloat16() + 1).float().exp() * hidden.bfloat16()


def test_a_weight_that_is_no_parameter_was_cast_before() -> None:
    """Its replay casts it once more, and is not to take that for another cast."""
    model = WithLeaf()

    def gradients() -> list[Tensor]:
        x = data()
        output = model(x)
        return [output.detach(), *torch.autograd.grad(output.float().sum(), (x, model.weight, model.inside.scale))]

    plain = gradients()
    for op in range(len(ops_of(model, "inside"))):
        for skipped in ((), tuple(range(op))):
            with lowtide.apply(model, Plan((Recompute("inside", keep_ops=(op,), skip_ops=skipped),))):
                assert_same(gradients(), plain)


def test_held_outputs_may_be_elsewhere() -> None:
    model = nn.Sequential(Attention(), Attention(dropout=0.2))
    here = planned("0", "1")
    moves = tuple(Move(region.path, op=op) for region in here.regions for op in region.keep_ops)
    plan = Plan(here.regions, moves)
    check(model, plan)
    assert num_skipped(model, plan) == 4
    with lowtide.apply(model, plan) as handle:
        output = model(data())
        assert handle.stats().stored_bytes == 4 * 2 * 8 * 16 * 4
        output.sum().backward()
        assert handle.stats().stored_bytes == 0


def test_switched_off_and_on() -> None:
    model = nn.Sequential(Attention(), Attention(dropout=0.2))
    plain = left_behind(model)
    with lowtide.apply(model, planned("0", "1")) as handle:
        for enabled in (False, True, False, True):
            handle.enabled = enabled
            assert_same(left_behind(model), plain)
        output = model(data())
        handle.enabled = False
        output.square().mean().backward()


def test_a_second_backward_computes_everything() -> None:
    model = nn.Sequential(Attention(), Attention())
    plain = copy.deepcopy(model)
    with lowtide.apply(model, planned("0", "1")):
        for each in (model, plain):
            loss = each(data()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (actual.grad is None and expected.grad is None) or torch.equal(actual.grad, expected.grad)


def test_stand_ins_have_the_form_of_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = skippedops.StandIn.make

    def noting(self: skippedops.StandIn) -> Any:
        made = make(self)
        seen.append((made[0].shape, made[0].stride(), made[0].dtype))
        return made

    model = nn.Sequential(Attention())
    monkeypatch.setattr(skippedops.StandIn, "make", noting)
    with lowtide.apply(model, planned("0")):
        model(data()).sum().backward()
    query = torch.empty(2, 8, 2, 8).transpose(1, 2)  # heads before positions, in memory the other way around
    assert seen[0] == (torch.Size([16, 16]), (16, 1), torch.float32)
    assert seen[2] == (query.shape, query.stride(), torch.float32)


# What is computed after all. Each of these runs other ops than those that were traced.


def computed(extra: Extra, *, num_left_out: int = 1) -> Attention:
    """A model with something extra, on a query that was to be left out, gives the same step; its key is left out."""
    block = Attention()
    model = nn.Sequential(block)
    plan = planned("0")
    assert num_skipped(model, plan) == 2
    block.extra = extra
    check(model, plan)
    assert num_skipped(model, plan) == num_left_out
    return block


def test_an_op_that_is_computed_again_reads_it() -> None:
    computed(lambda block, query, turned, y: y * query.mean(dim=-1, keepdim=True).exp())


def test_an_op_reads_it_in_a_list() -> None:
    computed(lambda block, query, turned, y: torch.stack([y, query.detach()]).exp().sum(dim=0))


def test_an_op_reads_a_view_of_it() -> None:
    computed(lambda block, query, turned, y: y * query.transpose(0, 1)[:1].detach().mean().exp())


def test_a_number_is_read_from_it() -> None:
    computed(lambda block, query, turned, y: y * float(query.sum().item()))


def test_an_op_of_ones_own_reads_it() -> None:
    with torch.library._scoped_library("lowtide_tests", "DEF") as library:
        library.define("looks_like_a_view(Tensor(a) x) -> Tensor(a)")
        library.impl("looks_like_a_view", lambda x: x * 1.0, "CompositeExplicitAutograd")
        own = torch.ops.lowtide_tests.looks_like_a_view
        computed(lambda block, query, turned, y: y * own(query.detach()).exp())


def test_something_is_written_to_it() -> None:
    def doubled(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        query.detach().mul_(2)
        return y

    computed(doubled)


class Scaled(nn.Module):
    """Its scale is held, and what leads there is left out; `flag` has that looked at, or makes it of less."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            base = x * 2
            made = base.exp()
            scale = made.sum(dim=0) + 1
            base.add_(5)
            looked_at = made.mean() if self.flag else 1.0
        return (self.linear(x) * scale).sin() * looked_at


class Shortened(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            source = x[:1] if self.flag else x
            scale = source.exp().view(8 * len(source), 16).sum(dim=0) + 1
        return (self.linear(x) * scale).sin()


@pytest.mark.parametrize("kind", [Scaled, Shortened])
def test_what_it_is_made_of_may_change(kind: type[Scaled]) -> None:
    """The op comes late, to what was there before; and one of the same name may make something of another form."""
    model = nn.Sequential(nn.Linear(16, 16), kind())
    ops = ops_of(model, "1")
    kept, skipped = ops.index("add"), (ops.index("exp"), ops.index("sum"))
    plan = Plan((Recompute("1", keep_ops=(kept,), skip_ops=skipped),))
    check(model, plan)
    expected = {}
    for flag in (False, True):
        model[1].flag = flag
        expected[flag] = left_behind(model)
    with lowtide.apply(model, plan):
        for flag in (False, True, True, False, True):
            model[1].flag = flag
            assert_same(left_behind(model), expected[flag])


class Normed(Scaled):
    """A norm writes its statistics, of which the op's schema says nothing, when they are to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = (self.norm.running_mean * 2).exp()
        return (self.norm(self.linear(x)) * made[:, None]).sin()


def test_what_it_is_made_of_is_written_by_a_norm() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Normed())
    ops = ops_of(model, "1")
    made = ops.index("mul"), ops.index("exp")
    for kept in range(len(ops)):
        check(model, Plan((Recompute("1", keep_ops=(kept,), skip_ops=made),)))


class Opaque(Tensor):
    """Made of another tensor, and does not say so."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def test_a_tensor_of_another_class_may_be_made_of_it() -> None:
    computed(lambda block, query, turned, y: y * Opaque(query.detach()).mean().exp(), num_left_out=0)


def test_autograd_saves_it() -> None:
    """A parameter that was frozen in the trace is trained."""
    model = nn.Sequential(Attention())
    plan = planned("0")
    for parameter in (model[0].cos, model[0].sin):
        assert num_skipped(model, plan) == 2
        parameter.requires_grad_()
        check(model, plan)
        assert num_skipped(model, plan) == 0
        parameter.requires_grad_(False)


@pytest.mark.parametrize("run", [lowtide.checkpoint, torch.utils.checkpoint.checkpoint], ids=["lowtide", "torch"])
def test_a_region_inside_takes_it(run: Callable[..., Any]) -> None:
    def inside(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        return run(lambda q, y: y * q.exp().sigmoid(), query, y, use_reentrant=False)

    def inside_unnamed(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        return run(lambda y: y * query.exp().sigmoid(), y, use_reentrant=False)

    computed(inside)
    computed(inside_unnamed)


@pytest.mark.parametrize("allocate", [torch.empty, torch.zeros])
def test_a_kernel_that_nobody_sees_may_read_it(allocate: Callable[[torch.Size], Tensor]) -> None:
    def launched(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        output = allocate(query.shape)
        output.numpy()[...] = query.detach().numpy() * 3  # as kernels launched by hand: past the dispatcher
        return y * output

    computed(launched, num_left_out=0)


def test_memory_for_such_a_kernel_may_be_there_before() -> None:
    class First(Attention):
        def forward(self, x: Tensor) -> Tensor:
            self.output = torch.empty(2, 2, 8, 8)
            return super().forward(x)

    def launched(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        block.output.numpy()[...] = query.detach().numpy() * 3
        return y * block.output.exp()

    model = nn.Sequential(First())
    kept, skipped = rotations(ops_of(model))
    model[0].extra = launched
    plan = Plan((Recompute("0", keep_ops=kept, skip_ops=skipped),))
    check(model, plan)
    assert num_skipped(model, plan) == 0


def test_memory_made_when_it_is_gone_is_none_for_such_a_kernel() -> None:
    class Two(nn.Sequential):
        pass

    model = nn.Sequential(Two(Attention(), nn.Linear(16, 16), nn.Dropout(0.5)))  # which on the CPU begins with empty
    assert "empty_like" in ops_of(model)
    kept, skipped = rotations(ops_of(model))
    plan = Plan((Recompute("0", keep_ops=kept, skip_ops=skipped),))
    check(model, plan)
    assert num_skipped(model, plan) == 2


class Numbers(nn.Module):
    """Has Python read numbers, of which no op knows: from what `made` gives, past all ops or besides one."""

    def __init__(self, made: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any], *, by_an_op: bool) -> None:
        super().__init__()
        self.linear, self.made, self.read, self.by_an_op = nn.Linear(16, 16), made, read, by_an_op

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.made(x)
            scale = made * 0.5 if self.by_an_op else torch.ones(())
        return (self.linear(x) * scale * self.read(made)).sin()


def parts(x: Tensor) -> Tensor:
    return (x > 0).sum(dim=(0, 1)).float().mean().to(torch.int64)[None]


@pytest.mark.parametrize(
    ("made", "read", "by_an_op"),
    [
        (lambda x: x.abs().amax(), lambda made: made.tolist(), False),
        (lambda x: x.abs().amax(), lambda made: made.numpy().item(), False),
        (lambda x: x.abs().amax(), lambda made: made.tolist(), True),
        (lambda x: x.abs().amax(), lambda made: float(np.asarray(made.detach())), True),
        (parts, lambda made: made.tolist()[0], True),
        (parts, lambda made: torch.ones(99).tensor_split(made)[0].numel(), True),
    ],
    ids=["list", "numpy", "list and op", "numpy and op", "counts in a list", "counts to split at"],
)
def test_python_reads_numbers(made: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any], by_an_op: bool) -> None:
    """Whatever is held, with all that a plan may leave out then and with all that comes before."""
    model = nn.Sequential(nn.Linear(16, 16), Numbers(made, read, by_an_op=by_an_op))
    graph = lowtide.trace(model, lambda x: loss_of(model, x, None), data(), mode="real")
    call = graph.calls_by_path["1"][0]
    for op in range(graph.calls[call].end - graph.calls[call].first):
        for skipped in (graph.unneeded.of(call, (op,)), tuple(range(op))):
            check(model, Plan((Recompute("1", keep_ops=(op,), skip_ops=skipped),)))


def test_someone_has_it_when_the_region_has_returned() -> None:
    def stashed(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        block.last = query.detach()
        return y

    block = computed(stashed, num_left_out=2)  # what a replay puts into a module is taken out again
    assert block.last is not None and not block.last.isnan().any(), "a replay has put something else there"


def test_a_held_output_may_be_stashed() -> None:
    model = nn.Sequential(Attention())

    def stashed(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        block.last = turned.detach()
        return y

    model[0].extra = stashed
    check(model, planned("0"))
    assert num_skipped(model, planned("0")) == 2
    assert not model[0].last.isnan().any()


def test_a_held_output_is_written_to_in_the_region() -> None:
    def changed(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        turned.data.mul_(1.0)
        return y

    computed(changed)


def test_a_held_output_is_written_to_before_the_replay() -> None:
    model = nn.Sequential(Attention())

    def stashed(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        block.last = turned
        return y

    plain = left_behind(model, steps=1)[1:-1]
    model[0].extra = stashed
    with lowtide.apply(model, planned("0")):
        x = data()
        loss = model(x).square().mean()
        with torch.no_grad():
            model[0].last.add_(1)
        loss.backward()
    assert_same([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], plain)


def test_a_backward_inside_the_region() -> None:
    def inner(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        leaf = y.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf.exp() * 2).sum(), leaf)
        return y * gradient * query.mean().exp()

    computed(inner, num_left_out=0)  # the first gradient is made in memory without values


class Inner(nn.Module):
    """Goes back through a part of its own, which begins a replay in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 2 + 1
        leaf = (hidden + 1).detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.exp().sum(), leaf)
        return (slope * 0.01 + hidden + 1).exp().sin()


@pytest.mark.parametrize("skips", [False, True])
def test_a_backward_inside_the_region_comes_before_what_is_held(skips: bool) -> None:
    """The ops of a replay that begins in the forward are none of the forward's."""
    model = nn.Sequential(nn.Linear(16, 16), Inner())
    for op in range(len(ops_of(model, "1"))):
        skipped = tuple(range(op)) if skips else ()
        check(model, Plan((Recompute("1", keep_ops=(op,), skip_ops=skipped),)))


@pytest.mark.parametrize("run", [lowtide.checkpoint, torch.utils.checkpoint.checkpoint], ids=["lowtide", "torch"])
def test_nobody_tells_what_autograd_saves(run: Callable[..., Any]) -> None:
    def call(x: Tensor) -> Tensor:
        return (x.sin() * scale + 1.0).exp()

    scale, x = torch.ones(3, requires_grad=True), torch.randn(3)
    region = Recompute("", keep_ops=(2,), skip_ops=(0, 1))  # the sine is saved
    contexts = functools.partial(replayedops.holding, region, {}, Lessons(""), ())
    run(call, x, use_reentrant=False, context_fn=contexts, determinism_check="none").sum().backward()
    expected = scale.detach().clone().requires_grad_()
    (x.sin() * expected + 1.0).exp().sum().backward()
    assert scale.grad is not None and expected.grad is not None and torch.equal(scale.grad, expected.grad)


class Noisy(nn.Module):
    """Its first random numbers are read by a held op alone; those that follow have to be the same again."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + torch.rand_like(x)
        return shifted * torch.rand_like(x).exp()


def test_random_ops_run_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Noisy())
    assert ops_of(model, "1")[:2] == ["rand_like", "add"]
    check(model, Plan((Recompute("1", keep_ops=(1,), skip_ops=(0,)),)))


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            dense = F.relu(x).to_sparse().to_dense()
        return x * dense.exp()


def test_outputs_that_are_no_plain_memory_are_made_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Sparse())
    ops = ops_of(model, "1")
    kept, made = ops.index("_to_dense"), ops.index("_to_sparse")
    check(model, Plan((Recompute("1", keep_ops=(kept,), skip_ops=(made,)),)))
    check(model, Plan((Recompute("1", keep_ops=(kept,), skip_ops=(0, made)),)))


def test_several_outputs_of_one_op() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                values, indices = x.sort(dim=-1)
                weights = values * indices
            return x * weights

    model = nn.Sequential(nn.Linear(16, 16), Sorted())
    plan = Plan((Recompute("1", keep_ops=(1,), skip_ops=(0,)),))
    assert ops_of(model, "1")[:2] == ["sort", "mul"]
    check(model, plan)


class Mixed(nn.Module):
    """A product with a sparse matrix, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.eye(16).roll(1, 0).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mix, x.flatten(0, 1)).sigmoid()


def test_tensors_of_other_kinds_are_no_matter_when_it_is_gone() -> None:
    model = nn.Sequential(nn.Sequential(Attention(), Mixed()))
    kept, skipped = rotations(ops_of(model))
    plan = Plan((Recompute("0", keep_ops=kept, skip_ops=skipped),))
    check(model, plan)
    assert num_skipped(model, plan) == 2


# What no forward can tell of: another replay.


def test_a_replay_reads_what_its_forward_did_not() -> None:
    seen: dict[bool, list[Tensor]] = {False: [], True: []}

    def reads(block: Attention, query: Tensor, turned: Tensor, y: Tensor) -> Tensor:
        seen[lowtide.is_recomputing()].append(query.detach() + 1 if lowtide.is_recomputing() else query.detach())
        return y

    model = nn.Sequential(Attention())
    plan = planned("0")
    model[0].extra = reads
    with lowtide.apply(model, plan):
        left_behind(model)
    assert_same(seen[True], [query + 1 for query in seen[False]])


class Unlike(nn.Module):
    """Its replay has a hyperbolic tangent where its forward has another function, and autograd saves what that gives.

    The one that is left out has no gradient, and is added to something held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.is_unlike = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden = hidden.tanh() if lowtide.is_recomputing() and self.is_unlike else hidden.sigmoid()
        with torch.no_grad():
            bounded = x.tanh()
        return hidden * (bounded + 1.0)


def test_a_replay_saves_what_its_forward_did_not() -> None:
    """Its gradients are then those of a replay that leaves out nothing."""
    model = nn.Sequential(Unlike())
    model[0].is_unlike = False
    ops = ops_of(model)
    kept, skipped = ops.index("add"), ops.index("tanh")
    plan = Plan((Recompute("0", keep_ops=(kept,), skip_ops=(skipped,)),))
    check(model, plan)
    model[0].is_unlike = True
    for steps in (1, 2):
        with lowtide.apply(model, Plan((Recompute("0"),))):
            expected = left_behind(model, steps=steps)
        with lowtide.apply(model, plan):
            assert_same(left_behind(model, steps=steps), expected)


# Whatever is asked to be left out.


class Everything(nn.Module):
    """Random ops, statistics, writes, views, an inner region, a custom function's saves, a graph without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(dropout=0.1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.attention(x))
        gate, up = self.up(x).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        hidden = torch.utils.checkpoint.checkpoint(lambda h: (h * 2).tanh() * h.exp(), hidden, use_reentrant=False)
        with torch.no_grad():
            scale = hidden.abs().amax(dim=-1, keepdim=True).clamp_(min=1.0)
        largest, _ = hidden.sort(dim=-1)
        return x + self.down(F.dropout(hidden / scale, 0.3)) + largest.cumsum(-1).sin().add_(1)


@functools.cache
def num_ops_of_everything() -> int:
    return len(ops_of(nn.Sequential(Everything())))


subsets = st.sets(st.floats(0, 1, exclude_max=True, width=16), max_size=80)


@settings(max_examples=40, deadline=None)
@given(kept=subsets, skipped=subsets, skips_all=st.booleans())
def test_whatever_is_skipped_the_step_is_the_same(kept: set[float], skipped: set[float], skips_all: bool) -> None:
    torch.manual_seed(0)
    num_ops, model = num_ops_of_everything(), nn.Sequential(Everything())
    keeps = tuple(sorted({int(at * num_ops) for at in kept}))
    skips = tuple(range(num_ops)) if skips_all else tuple(sorted({int(at * num_ops) for at in skipped}))
    check(model, Plan((Recompute("0", keep_ops=keeps, skip_ops=skips),)))


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_each_op_with_all_that_leads_to_it(precision: torch.dtype | None) -> None:
    """One output held, all before it skipped: right for few, and the same step for all."""
    torch.manual_seed(0)
    model = nn.Sequential(Everything())
    for op in range(len(ops_of(model, precision=precision))):
        plan = Plan((Recompute("0", keep_ops=(op,), skip_ops=tuple(range(op))),))
        check(model, plan, precision=precision)


@settings(max_examples=30, deadline=None)
@given(kept=subsets, skipped=subsets, kept_inside=subsets, skips_all=st.booleans())
def test_regions_inside_each_other(
    kept: set[float], skipped: set[float], kept_inside: set[float], skips_all: bool
) -> None:
    torch.manual_seed(0)
    num_ops, model = num_ops_of_everything(), nn.Sequential(Everything())

    def chosen(ops: set[float], among: int) -> tuple[int, ...]:
        return tuple(sorted({int(at * among) for at in ops}))

    outer = Recompute("0", 0, chosen(kept, num_ops), tuple(range(num_ops)) if skips_all else chosen(skipped, num_ops))
    inner = Recompute("0.attention", 0, chosen(kept_inside, 39), tuple(range(39)))
    check(model, Plan((outer, inner)))


def test_regions_inside_each_other_leave_out_the_same() -> None:
    model = nn.Sequential(nn.Sequential(Attention(), Attention()))
    kept, skipped = rotations(ops_of(nn.Sequential(Attention())))
    inner = Recompute("0.1", keep_ops=kept, skip_ops=skipped)
    for plan in (Plan((Recompute("0"), inner)), Plan((Recompute("0", keep_ops=kept, skip_ops=skipped), inner))):
        check(model, plan)
        assert num_skipped(model, plan) == 2 * sum(bool(region.skip_ops) for region in plan.regions)
