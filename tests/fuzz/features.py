"""Building blocks of random models: small modules that do what models in the wild do.

A block is written as a JSON list, a **node**: its name, its options, then the nodes inside it, such as
`["residual", ["linear"], ["memory", "deque", "grad", "none"]]`. Every block maps (batch, length, width) to the same
shape, so that blocks compose in any order and a shrinker can drop any of them. `LEAVES` and `WRAPPERS` list the blocks
with the values of their options; wrappers have nodes inside.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide

Node = list[Any]
HOLDERS = ("attribute", "list", "tuple", "dict", "deque", "namespace")


class Scale(torch.autograd.Function):
    """`x * weight`, with a backward of its own; `kind` says how it keeps what the backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        if kind == "stash":  # not through save_for_backward: no saved-tensor hook sees it
            ctx.kept = (x.detach().clone(), weight.detach().clone())
        else:
            ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.kept if ctx.kind == "stash" else ctx.saved_tensors
        needed = ctx.needs_input_grad
        return grad * weight if needed[0] else None, (grad * x).sum((0, 1)) if needed[1] else None, None


class NegateInPlace(torch.autograd.Function):
    """`-x`, written into `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -grad


class Sequence(nn.Module):
    """Blocks one after the other."""

    def __init__(self, nodes: list[Node], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build(node, width) for node in nodes)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


# Leaves.


class Linear(nn.Module):
    """A Linear with an activation; some activations work in place."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.activation == "gelu":
            return F.gelu(y)
        if self.activation == "relu_":
            return F.relu_(y)
        return torch.tanh(y) if self.activation == "tanh" else y


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Norm(nn.Module):
    """Normalisations, with running statistics or without."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm: nn.Module = nn.LayerNorm(width)
        if kind == "batch":
            self.norm = nn.BatchNorm1d(width)
        elif kind == "cumulative batch":
            self.norm = nn.BatchNorm1d(width, momentum=None)
        elif kind == "group":
            self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.kind == "layer" else self.norm(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Random(nn.Module):
    """Random numbers from torch's global generator."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(width, width)
        self.layer: nn.Module = nn.Dropout(0.3)
        if kind == "rrelu":
            self.layer = nn.RReLU()
        elif kind == "rrelu_":
            self.layer = nn.RReLU(inplace=True)
        elif kind == "alpha":
            self.layer = nn.FeatureAlphaDropout(0.2)
        elif kind == "dropout_":
            self.layer = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "gumbel":
            return F.gumbel_softmax(y, hard=True) + y
        if self.kind == "noise":
            return y * (1 + 0.1 * torch.randn_like(y))
        if self.kind == "bernoulli":
            return y * torch.bernoulli(torch.full_like(y, 0.7))
        return self.layer(y)


class OwnDropout(nn.Module):
    """Dropout from a generator that the module owns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(width, width), torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.training:
            return y
        return y * (torch.rand(y.shape, generator=self.generator) < 0.8)


class Ema(nn.Module):
    """A moving average that scales the weight, and moves after it was used."""

    ema: Tensor

    def __init__(self, width: int, write: str) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(width, width), write
        self.register_buffer("ema", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.linear.weight * self.ema.clone())
        if self.training:
            level = y.detach().abs().mean((0, 1)).float()
            if self.write == "in place":
                self.ema.lerp_(level, 0.3)
            else:
                self.ema = torch.lerp(self.ema, level, 0.3)
        return y


class Spectral(nn.Module):
    """A parametrization with buffers that move in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Memory(nn.Module):
    """Keeps its last output in plain Python state and mixes it into the next call.

    With `flow` "grad" the gradient flows through it from call to call; each step begins by detaching it.
    """

    def __init__(self, width: int, holder: str, flow: str, start: str) -> None:
        super().__init__()
        self.holder, self.flow = holder, flow
        self.linear, self.mix = nn.Linear(width, width), nn.Linear(width, width)
        self.memory: Any = {
            "attribute": None,
            "list": [None],
            "tuple": (None, 0),
            "dict": {"last": None},
            "deque": deque([None], maxlen=2),
            "namespace": SimpleNamespace(last=None),
        }[holder]
        if start == "zeros":
            self._write(torch.zeros(1, 1, width))

    def _read(self) -> Tensor | None:
        if self.holder == "attribute":
            return self.memory
        if self.holder == "dict":
            return self.memory["last"]
        if self.holder == "namespace":
            return self.memory.last
        return self.memory[0]

    def _write(self, value: Tensor) -> None:
        if self.holder == "attribute":
            self.memory = value
        elif self.holder == "tuple":
            self.memory = (value, self.memory[1] + 1)
        elif self.holder == "dict":
            self.memory["last"] = value
        elif self.holder == "namespace":
            self.memory.last = value
        elif self.holder == "deque":
            self.memory.appendleft(value)
        else:
            self.memory[0] = value

    def begin_step(self) -> None:
        """Truncate backpropagation through time."""
        last = self._read()
        if last is not None and last.requires_grad:
            if self.holder == "deque":
                self.memory.clear()
            self._write(last.detach())

    def forward(self, x: Tensor) -> Tensor:
        last, y = self._read(), self.linear(x)
        if last is not None and (last.shape == y.shape or last.shape[:2] == (1, 1)):
            y = y * torch.sigmoid(self.mix(last))
        self._write(y if self.flow == "grad" else y.detach())
        return y


class Counter(nn.Module):
    """Counts its calls; with `use` "scales" the count enters the result."""

    total: Tensor

    def __init__(self, width: int, holder: str, use: str) -> None:
        super().__init__()
        self.holder, self.use, self.linear = holder, use, nn.Linear(width, width)
        self.count: Any = {"attribute": 0, "list": [0], "dict": {"n": 0}, "namespace": SimpleNamespace(n=0)}.get(holder)
        if holder == "buffer":
            self.register_buffer("total", torch.zeros(()))

    def _next(self) -> Any:
        if self.holder == "buffer":
            self.total += 1
            return self.total.clone()
        if self.holder == "attribute":
            self.count += 1
            return self.count
        if self.holder == "list":
            self.count[0] += 1
            return self.count[0]
        if self.holder == "dict":
            self.count["n"] += 1
            return self.count["n"]
        self.count.n += 1
        return self.count.n

    def forward(self, x: Tensor) -> Tensor:
        count, y = self._next(), self.linear(x)
        return torch.sin(y * (1 + 0.5 * count)) if self.use == "scales" else torch.sin(y)


class InPlaceView(nn.Module):
    """Writes through views of its own result, or into its argument."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.gain = kind, nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "argument":
            x.mul_(0.5)
            return self.linear(x)
        y = self.linear(x)
        if self.kind == "slice":
            y[:, :1].mul_(0.5)
        elif self.kind == "strided":
            y.view(-1)[::2].add_(1.0)
        elif self.kind == "transposed":
            y.transpose(0, 1).mul_(self.gain)
        elif self.kind == "after save":
            z = torch.relu(y)
            y[..., 0].zero_()
            return z + y
        return y.mul_(self.gain.sigmoid()) if self.kind == "whole" else y


class ReluInPlace(nn.Module):
    """Writes into its argument, as nn.ReLU(inplace=True) does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x)


class Custom(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.gain = kind, nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return NegateInPlace.apply(y) if self.kind == "dirty" else torch.tanh(Scale.apply(y, self.gain, self.kind))


class Outside(nn.Module):
    """Parameters of a child that the parent uses too, or that two children share."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.decode = kind, nn.Linear(width, width), nn.Linear(width, width)
        if kind == "tied":
            self.decode.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "tied":
            return self.decode(y)
        if self.kind == "functional":
            weights = {"weight": self.decode.weight * 0.5, "bias": self.decode.bias}
            return torch.func.functional_call(self.decode, weights, (y,))
        return F.linear(self.decode(y), self.linear.weight) + self.linear.bias.exp()


class InnerGradient(nn.Module):
    """Takes a gradient inside of the forward, as energy models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(point)).square().sum()
            (gradient,) = torch.autograd.grad(energy, point, create_graph=self.training)
        return x - 0.1 * gradient


class Choose(nn.Module):
    """Ops that give indices: topk, sort, max."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "sort":
            return y.sort(-1).values
        if self.kind == "max":
            return y + y.max(1, keepdim=True).values
        values, where = y.topk(2, -1)
        return torch.zeros_like(y).scatter(-1, where, values.softmax(-1)) + x


class Unused(nn.Module):
    """A parameter that no forward reads, and one that only some forwards read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never, self.sometimes, self.calls = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.sometimes if self.calls % 2 else torch.tanh(x)


# Wrappers: blocks with blocks inside.


class Wrapper(nn.Module):
    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__()
        self.inner = Sequence(nodes, width)


class Residual(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = inner

    def forward(self, *, states: Tensor, options: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        y = self.body(states * options["factors"][0]) * scale
        return {"states": y, "more": (options["more"], [y.mean()])}


class Keywords(nn.Module):
    """Containers and keywords in, containers out."""

    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__()
        self.named, self.factor = _Named(Sequence(nodes, width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        found = self.named(states=x, options={"factors": [self.factor], "more": {"x": x}}, scale=0.5)
        return found["states"] + 0.1 * found["more"][0]["x"] + found["more"][1][0]


class _Collecting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = inner

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = self.body(x)
        losses.append(y.square().mean())
        return y


class Collects(nn.Module):
    """A list that the callee appends to, as auxiliary losses and caches are collected."""

    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__()
        self.collecting = _Collecting(Sequence(nodes, width))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        y = self.collecting(x, losses)
        return y * (1 + losses[0])


class Repeat(Wrapper):
    def __init__(self, width: int, nodes: list[Node], times: int) -> None:
        super().__init__(width, nodes)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


class Sandwich(Wrapper):
    """The same module before and after another one."""

    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__(width, nodes)
        self.between = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.between(self.inner(x))))


class UserCheckpoint(Wrapper):
    """The user's own checkpoint, by torch or by lowtide. While `is_bypassed` is set, the inside is simply called."""

    is_bypassed = False

    def __init__(self, width: int, nodes: list[Node], kind: str) -> None:
        super().__init__(width, nodes)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if UserCheckpoint.is_bypassed:
            return self.inner(x)
        if self.kind == "torch":
            return torch_checkpoint(self.inner, x, use_reentrant=False)
        return lowtide.checkpoint(self.inner, x)


class Autocast(Wrapper):
    def __init__(self, width: int, nodes: list[Node], kind: str) -> None:
        super().__init__(width, nodes)
        self.kind, self.linear = kind, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            if self.kind == "partly off":
                with torch.autocast("cpu", enabled=False):
                    y = self.inner(y.float())
            else:
                y = self.inner(y)
        return y.float()


class NoGrad(Wrapper):
    """A target that no gradient flows into."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.inner(x)
        return x * torch.sigmoid(target)


class Branch(nn.Module):
    """One of two paths, by what the data says."""

    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__()
        self.one, self.other = Sequence(nodes, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.detach().float().mean().item() > 0 else torch.sin(self.other(x))


class Experts(nn.Module):
    """Top-1 routing: the router, then each expert on its own tokens. Experts without tokens are not called."""

    def __init__(self, width: int, nodes: list[Node]) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList([Sequence(nodes, width), nn.Linear(width, width), Wide(width)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().flatten()
            if len(where):
                mine = expert(tokens[where].unsqueeze(0)).squeeze(0)
                result = result.index_add(0, where, (mine * weight[where, None]).to(result.dtype))
        return result.view_as(x)


class Hooked(Wrapper):
    """Hooks on a module, or on the tensor that it gives."""

    def __init__(self, width: int, nodes: list[Node], kind: str) -> None:
        super().__init__(width, nodes)
        self.kind, self.num_calls = kind, 0
        if kind == "forward":
            self.inner.register_forward_hook(_halve_output)
        elif kind == "forward pre":
            self.inner.register_forward_pre_hook(_halve_input)
        elif kind == "backward":
            self.inner.register_full_backward_hook(_halve_gradients)
        elif kind == "backward pre":
            self.inner.register_full_backward_pre_hook(_halve_gradients_before)
        elif kind == "counting":
            self.inner.register_forward_hook(self._count)
        elif kind == "parameter":
            for parameter in self.inner.parameters():
                parameter.register_hook(_clamp)

    def _count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.num_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "tensor" and y.grad_fn is not None:  # asked first: torch 2.13 crashes otherwise, after a view
            y.register_hook(_clamp)  # of it was changed in place
        return y.clone() if self.kind.startswith("backward") else y


def _halve_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


def _halve_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5, *args[1:])


def _halve_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)


def _halve_gradients_before(module: nn.Module, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in outputs)


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


class Frozen(Wrapper):
    """Parameters that train from step `until` on only."""

    def __init__(self, width: int, nodes: list[Node], until: int) -> None:
        super().__init__(width, nodes)
        self.until = until
        self.inner.requires_grad_(False)

    def before_step(self, step: int) -> None:
        """What a training loop does between steps."""
        if step == self.until:
            self.inner.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Evaluated(Wrapper):
    """A part in eval mode inside of a model in training."""

    def train(self, mode: bool = True) -> Evaluated:
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.inner.eval()
        return self.inner(x)


LEAVES: dict[str, tuple[type[nn.Module], tuple[tuple[Any, ...], ...]]] = {
    "linear": (Linear, (("", "gelu", "relu_", "tanh"),)),
    "wide": (Wide, ()),
    "norm": (Norm, (("layer", "batch", "cumulative batch", "group"),)),
    "attention": (Attention, ((0.0, 0.2),)),
    "gru": (Recurrent, ()),
    "conv": (Conv, ()),
    "random": (
        Random,
        (("dropout", "dropout_", "rrelu", "rrelu_", "alpha", "gumbel", "noise", "bernoulli"),),
    ),
    "own dropout": (OwnDropout, ()),
    "ema": (Ema, (("in place", "rebound"),)),
    "spectral": (Spectral, ()),
    "memory": (Memory, (HOLDERS, ("grad", "detached"), ("none", "zeros"))),
    "counter": (Counter, (("attribute", "list", "dict", "namespace", "buffer"), ("scales", "only counts"))),
    "view": (InPlaceView, (("slice", "strided", "transposed", "after save", "whole", "argument"),)),
    "relu_": (ReluInPlace, ()),
    "custom": (Custom, (("save", "stash", "dirty"),)),
    "outside": (Outside, (("tied", "functional", "parent"),)),
    "inner gradient": (InnerGradient, ()),
    "choose": (Choose, (("topk", "sort", "max"),)),
    "unused": (Unused, ()),
}
WRAPPERS: dict[str, tuple[type[nn.Module], tuple[tuple[Any, ...], ...]]] = {
    "residual": (Residual, ()),
    "keywords": (Keywords, ()),
    "collects": (Collects, ()),
    "repeat": (Repeat, ((2, 3),)),
    "sandwich": (Sandwich, ()),
    "checkpoint": (UserCheckpoint, (("torch", "lowtide"),)),
    "autocast": (Autocast, (("on", "partly off"),)),
    "no grad": (NoGrad, ()),
    "branch": (Branch, ()),
    "experts": (Experts, ()),
    "hooked": (Hooked, (("forward", "forward pre", "backward", "backward pre", "counting", "parameter", "tensor"),)),
    "frozen": (Frozen, ((1, 2),)),
    "evaluated": (Evaluated, ()),
}


def inner_nodes(node: Node) -> list[Node]:
    """The nodes inside a node."""
    return [part for part in node[1:] if isinstance(part, list)]


def build(node: Node, width: int) -> nn.Module:
    """The module that a node describes."""
    name, options = node[0], [part for part in node[1:] if not isinstance(part, list)]
    if name in WRAPPERS:
        return WRAPPERS[name][0](width, inner_nodes(node), *options)
    return LEAVES[name][0](width, *options)
