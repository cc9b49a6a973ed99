"""Programs with retained op outputs, each op alone and all of them: every step leaves what the plain one leaves."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
from lowtide.plans import Move, Plan, Recompute
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_thread")


def data() -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def ops_of(model: nn.Module, path: str, precision: torch.dtype | None = None) -> list[str]:
    """The ops of one call of a module, as a trace has them."""

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            return model(x).float().square().mean()

    graph = lowtide.trace(model, loss_fn, data(), mode="real")
    call = graph.calls[graph.calls_by_path[path][0]]
    return [op.name.removeprefix("aten.").split(".")[0] for op in graph.ops[call.first : call.end]]


def steps(model: nn.Module, precision: torch.dtype | None = None, num: int = 4) -> list[Tensor | None]:
    """All that some steps leave: outputs, gradients, buffers and random states. From the third on, `flag` is on."""
    torch.manual_seed(2)
    found: list[Tensor | None] = []
    for step in range(num):
        for module in model.modules():
            if hasattr(module, "flag"):
                module.flag = step >= 2
        model.zero_grad()
        x = data()
        with torch.autocast("cpu", precision, enabled=precision is not None):
            output = model(x)
        output.float().square().mean().backward()
        gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found += [output.detach(), *gradients, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
    return found


def check(model: nn.Module, plan: Plan, precision: torch.dtype | None = None, num: int = 4) -> None:
    expected = steps(copy.deepcopy(model), precision, num)
    planned = copy.deepcopy(model)
    with lowtide.apply(planned, plan):
        actual = steps(planned, precision, num)
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or torch.equal(a, b), plan  # type: ignore[arg-type]


def check_each_op(model: nn.Module, path: str, precision: torch.dtype | None = None) -> None:
    """Each op of the call retained alone, and all of them."""
    num_ops = len(ops_of(copy.deepcopy(model), path, precision))
    for kept in [(op,) for op in range(num_ops)] + [tuple(range(num_ops))]:
        check(model, Plan((Recompute(path, keep_ops=kept),)), precision)


class Program(nn.Module):
    """A region of its own: `body` of a layer's output. `flag` is off in the first steps."""

    def __init__(self, body: Callable[[Program, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.flag = body, False
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(8)
        self.mix = torch.eye(16).roll(1, 0).to_sparse()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def looked_at(block: Program, x: Tensor) -> Tensor:
    """What a scale was made of is written to afterwards, and then looked at."""
    with torch.no_grad():
        base = x * 2
        made = base.exp()
        scale = made.sum(dim=0) + 1
        base.add_(5)
        factor = made.mean() if block.flag else 1.0
    return (block.linear(x) * scale).sin() * factor


def shortened(block: Program, x: Tensor) -> Tensor:
    with torch.no_grad():
        source = x[:1] if block.flag else x
        scale = source.exp().view(8 * len(source), 16).sum(dim=0) + 1
    return (block.linear(x) * scale).sin()


def statistics(block: Program, x: Tensor) -> Tensor:
    """A norm writes its statistics, of which the op's schema says nothing, after they were read."""
    with torch.no_grad():
        made = (block.norm.running_mean * 2).exp()  # type: ignore[operator]
    return (block.norm(block.linear(x)) * made[:, None]).sin()


def gradient_inside(block: Program, x: Tensor) -> Tensor:
    """Goes back through a part of its own, which begins a replay in the middle of its forward."""
    hidden = block.linear(x) * 2 + 1
    leaf = (hidden + 1).detach().requires_grad_()
    (slope,) = torch.autograd.grad(leaf.exp().sum(), leaf)
    return (slope * 0.01 + hidden + 1).exp().sin()


def noisy(block: Program, x: Tensor) -> Tensor:
    shifted = x + torch.rand_like(x)
    return shifted * torch.rand_like(x).exp()


def sparse(block: Program, x: Tensor) -> Tensor:
    with torch.no_grad():
        dense = F.relu(x).to_sparse().to_dense()
    return x * dense.exp() * torch.sparse.mm(block.mix, x.flatten(0, 1)).sigmoid().view(2, 8, 16)


def ordered(block: Program, x: Tensor) -> Tensor:
    """One op gives values and indices, both of which autograd saves."""
    values, indices = x.sort(dim=-1)
    return values.sin() * (indices * x).exp()


def routed(block: Program, x: Tensor) -> Tensor:
    """As many tokens as there happen to be go through the layer."""
    tokens = x.flatten(0, 1)
    chosen = (tokens[:, 0] > (1.0 if block.flag else 0.0)).nonzero().flatten()
    return tokens.index_add(0, chosen, F.gelu(block.linear(tokens[chosen])).sin()).view_as(x).exp()


def written_by_data(block: Program, x: Tensor) -> Tensor:
    hidden = block.linear(x)
    if block.flag:
        hidden.data.mul_(2)
    return hidden.sin() * hidden.exp()


def stashed(block: Program, x: Tensor) -> Tensor:
    hidden = block.linear(x)
    block.last = hidden.detach()
    return F.gelu(hidden).exp()


def remembered(block: Program, x: Tensor) -> Tensor:
    """Memory from the last step: what it was when the forward read it."""
    hidden = block.linear(x)
    previous = torch.zeros_like(hidden) if block.last is None else block.last
    block.last = hidden.detach()
    return (F.gelu(hidden) * previous.exp() + hidden).sin()


def other_class(block: Program, x: Tensor) -> Tensor:
    return block.linear(x).sin() * Opaque(block.linear(x).detach()).mean().exp()


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


def unlike(block: Program, x: Tensor) -> Tensor:
    """Runs another branch of the same shapes; which ops are saved, and where, is the same."""
    hidden = block.linear(x)
    hidden = hidden.tanh() if block.flag else hidden.sigmoid()
    with torch.no_grad():
        bounded = x.tanh()
    return (hidden * (bounded + 1.0)).exp()


class Doubled(torch.autograd.Function):
    """Saves its input and its output, and says that it wrote nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * (2 * x + 0 * y)


def own_function(block: Program, x: Tensor) -> Tensor:
    return Doubled.apply(block.linear(Doubled.apply(x))).sin()  # type: ignore[no-any-return, no-untyped-call]


def inside(run: Callable[..., Any], block: Program, x: Tensor) -> Tensor:
    query = block.linear(x)
    y = run(lambda q, y: y * q.exp().sigmoid(), query, x, use_reentrant=False)
    return y * run(lambda y: y * query.exp().sigmoid(), y, use_reentrant=False) * query.sin()  # type: ignore[no-any-return]


def numbers(made: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any], block: Program, x: Tensor) -> Tensor:
    """Has Python read numbers, of which no op knows."""
    with torch.no_grad():
        value = made(x)
        scale = value * 0.5
    return (block.linear(x) * scale * read(value)).sin()


def largest(x: Tensor) -> Tensor:
    return x.abs().amax()


def count(x: Tensor) -> Tensor:
    return (x > 0).sum(dim=(0, 1)).float().mean().to(torch.int64)[None]


PROGRAMS: dict[str, Callable[[Program, Tensor], Tensor]] = {
    body.__name__: body
    for body in (
        *(looked_at, shortened, statistics, gradient_inside, noisy, sparse, ordered, routed, written_by_data, stashed),
        *(remembered, other_class, unlike, own_function),
    )
} | {
    "in torch's checkpoint": functools.partial(inside, torch.utils.checkpoint.checkpoint),
    "in lowtide's checkpoint": functools.partial(inside, lowtide.checkpoint),
    "list": functools.partial(numbers, largest, lambda made: made.tolist()),
    "numpy": functools.partial(numbers, largest, lambda made: float(np.asarray(made.detach()))),
    "counts in a list": functools.partial(numbers, count, lambda made: made.tolist()[0]),
    "counts to split at": functools.partial(numbers, count, lambda made: torch.ones(99).tensor_split(made)[0].numel()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_op_of_a_program(name: str) -> None:
    check_each_op(nn.Sequential(nn.Linear(16, 16), Program(PROGRAMS[name])), "1")


class Attention(nn.Module):
    """Rotary embeddings on its queries and keys, with frozen tables."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        angles = torch.arange(8.0)[:, None] / torch.arange(1.0, 5.0).repeat(2)
        self.cos = nn.Parameter(angles.cos(), requires_grad=False)
        self.sin = nn.Parameter(angles.sin(), requires_grad=False)
        self.dropout = nn.Dropout(dropout)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        made = (linear(normed) for linear in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in made)
        y = F.scaled_dot_product_attention(self.rotated(query), self.rotated(key), value)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))


def test_tables_that_are_trained_later() -> None:
    """Other tensors are saved from then on."""
    plain = nn.Sequential(nn.Linear(16, 16), Attention(dropout=0.2))

    def both(model: nn.Module) -> list[Tensor | None]:
        tables = [model[1].cos, model[1].sin]  # type: ignore[index]
        found = []
        for trained in (0, 1, 2, 0):
            for at, table in enumerate(tables):
                table.requires_grad_(at < trained)
            found += steps(model, num=3)
        return found

    expected = both(copy.deepcopy(plain))
    num_ops = len(ops_of(plain, "1"))
    for kept in [(op,) for op in range(num_ops)] + [tuple(range(num_ops))]:
        model = copy.deepcopy(plain)
        with lowtide.apply(model, Plan((Recompute("1", keep_ops=kept),))):
            for a, b in zip(both(model), expected, strict=True):
                assert a is b is None or torch.equal(a, b), kept  # type: ignore[arg-type]


class WithLeaf(nn.Module):
    """A weight that is no parameter, and is cast before the region that casts other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.eye(16).roll(1, 0).requires_grad_()
        self.inside = InLeaf(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # over when the backward comes, and what it remembers gone
            return self.inside((x @ self.weight).float())  # type: ignore[no-any-return]


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
    num_ops = len(ops_of(model, "inside"))
    for kept in [(op,) for op in range(num_ops)] + [tuple(range(num_ops))]:
        with lowtide.apply(model, Plan((Recompute("inside", keep_ops=kept),))):
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


# Whatever is asked to be retained.


class Everything(nn.Module):
    """Random ops, statistics, writes, views, an inner region, a graph without gradients."""

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
def num_ops_of(path: str) -> int:
    return len(ops_of(nn.Sequential(Everything()), path))


@pytest.mark.slow  # each program has its own test, and regions inside each other draw from this one
@pytest.mark.parametrize("precision", sweep([None, torch.bfloat16], keep=1))
def test_each_op_of_everything(precision: torch.dtype | None) -> None:
    check_each_op(nn.Sequential(Everything()), "0", precision)


positions = st.sets(st.floats(0, 1, exclude_max=True, width=16), max_size=80)


@settings(max_examples=12, deadline=None)
@given(kept=positions, kept_inside=positions, moved=positions)
def test_regions_inside_each_other(kept: set[float], kept_inside: set[float], moved: set[float]) -> None:
    torch.manual_seed(0)

    def chosen(ops: set[float], path: str) -> tuple[int, ...]:
        return tuple(sorted({int(at * num_ops_of(path)) for at in ops}))

    outer = Recompute("0", keep_ops=chosen(kept, "0"))
    inner = Recompute("0.attention", keep_ops=chosen(kept_inside, "0.attention"))
    moves = tuple(Move("0", to="host", op=op) for op in chosen(moved, "0") if op in outer.keep_ops)
    check(nn.Sequential(Everything()), Plan((outer, inner), moves))
