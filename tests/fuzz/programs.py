"""Random training programs: a spec drawn from a seed, and the model, data and training loop that it describes.

A spec is a short JSON object, and all that a run depends on. Entries that have their default are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.features import LEAVES, WRAPPERS, Frozen, Memory, Node, build, inner_nodes

LOOPS = ("plain", "accumulate", "two forwards", "retain", "grad", "double", "partial", "evaluate", "reversed")
NUM_PLANNED, NUM_AFTER = 4, 1  # steps under the engine, and after it was removed
_CHANGING = {"memory", "branch", "experts", "frozen", "unused"}  # what makes one step's memory differ from another's


@dataclass(frozen=True)
class Spec:
    """One program. `net` is a list of nodes (see `features`), `engine` what it runs under (see `engines`)."""

    net: list[Node] = field(default_factory=list)
    seed: int = 0
    width: int = 8
    batch: int = 2
    length: int = 4
    loop: str = "plain"
    optimizer: str = "sgd"
    inputs: str = "tensor"  # or "dict": how the batch comes
    output: str = "tensor"  # or "tuple", "dict": what the model gives
    vary: bool = False  # whether later batches are shorter
    input_grad: bool = False
    regulariser: bool = False  # whether the loss reads parameters itself
    engine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The entries that differ from their defaults."""
        plain = asdict(Spec())
        return {name: value for name, value in asdict(self).items() if value != plain[name] or name == "net"}

    @property
    def names(self) -> set[str]:
        """The names of all blocks in the net."""
        return {node[0] for node in walk(self.net)}

    @property
    def is_steady(self) -> bool:
        """Whether every step of the program needs the same memory."""
        return self.loop == "plain" and not self.vary and not self.names & _CHANGING


def walk(nodes: list[Node]) -> Iterator[Node]:
    """All nodes, outer ones first."""
    for node in nodes:
        yield node
        yield from walk(inner_nodes(node))


def random_spec(seed: int, without: frozenset[str] = frozenset()) -> Spec:
    """The program of a seed, without an engine and without the blocks that are named."""
    rng = random.Random(seed)
    names = {name for name in (*LEAVES, *WRAPPERS) if rng.random() < 0.6} - without | {"linear"}
    net = [_random_node(rng, names, 0) for _ in range(rng.randint(2, 5))]
    return Spec(
        net=net,
        seed=seed,
        width=rng.choice((8, 16, 32)),
        batch=rng.choice((2, 3, 8)),
        length=rng.choice((4, 6)),
        loop=rng.choice(LOOPS) if rng.random() < 0.5 else "plain",
        optimizer=rng.choice(("sgd", "momentum", "adam")),
        inputs=rng.choice(("tensor", "dict")),
        output=rng.choice(("tensor", "tuple", "dict")),
        vary=rng.random() < 0.15,
        input_grad=rng.random() < 0.3,
        regulariser=rng.random() < 0.2,
    )


def _random_node(rng: random.Random, names: set[str], depth: int) -> Node:
    wrappers = sorted(names & WRAPPERS.keys())
    if wrappers and rng.random() < (0.5, 0.3, 0.15, 0.0)[depth]:
        name = rng.choice(wrappers)
        inside = [_random_node(rng, names, depth + 1) for _ in range(rng.randint(1, 2))]
        return [name, *(rng.choice(values) for values in WRAPPERS[name][1]), *inside]
    name = rng.choice(sorted(names & LEAVES.keys()))
    return [name, *(rng.choice(values) for values in LEAVES[name][1])]


class Model(nn.Module):
    """The blocks of a net one after the other, and a head."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build(node, spec.width) for node in spec.net)
        self.head, self.output = nn.Linear(spec.width, 4), spec.output

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        for module in self.modules():
            if isinstance(module, Memory):
                module.begin_step()
        if scale is not None:
            x = x * scale
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        if self.output == "tuple":
            return y, [x]
        return {"logits": y, "states": (x,)} if self.output == "dict" else y


class Program:
    """A model, its optimizer, its data and its loop. Two programs of one spec run alike to the last bit."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        self.model = Model(spec).train()
        parameters = list(self.model.parameters())
        if spec.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9 * (spec.optimizer == "momentum"))
        self.inputs: list[Tensor] = []

    def batch(self, step: int, part: int = 0) -> Any:
        """The batch of a step: the same for each program of a spec."""
        generator = torch.Generator().manual_seed(1000 * self.spec.seed + 10 * step + part)
        length = self.spec.length - (self.spec.vary and step % 2 == 1)
        x = torch.randn(self.spec.batch, length, self.spec.width, generator=generator)
        x.requires_grad_(self.spec.input_grad)
        self.inputs.append(x)
        if self.spec.inputs == "tensor":
            return x
        return {"x": x, "scale": torch.rand(self.spec.width, generator=generator)}

    def loss(self, batch: Any) -> Tensor:
        """What `lowtide.trace` and `lowtide.fit` get as `loss_fn`."""
        found = self.model(**batch) if isinstance(batch, dict) else self.model(batch)
        y = found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
        loss = y.float().square().mean()
        if self.spec.output != "tensor":
            states = found["states"][0] if isinstance(found, dict) else found[1][0]
            loss = loss + 0.1 * states.float().sin().mean()
        if self.spec.regulariser:
            loss = loss + 1e-2 * sum(p.square().sum() for p in self.model.layers.parameters())
        return loss

    def before_step(self, step: int) -> None:
        """What the loop does before the forward of a step."""
        self.inputs = []
        self.optimizer.zero_grad()
        for module in self.model.modules():
            if isinstance(module, Frozen):
                module.before_step(step)

    def forward_backward(self, step: int) -> Tensor:
        """One step but for the optimizer's; the detached loss."""
        loop, batch = self.spec.loop, self.batch(step)
        if loop in ("two forwards", "reversed", "accumulate"):
            losses = []
            for part in range(2):
                losses.append(self.loss(batch if part == 0 else self.batch(step, part)))
                if loop == "accumulate":
                    losses[-1].backward()
                    losses[-1] = losses[-1].detach()
            if loop == "two forwards":
                (losses[0] + losses[1]).backward()
            elif loop == "reversed":
                losses[0].backward()
                losses[1].backward()
            return (losses[0] + losses[1]).detach()
        loss = self.loss(batch)
        trained = [p for p in (*self.model.parameters(), *self.inputs) if p.requires_grad]
        if loop == "grad":
            _assign(trained, torch.autograd.grad(loss, trained, allow_unused=True))
        elif loop == "double":
            gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
            penalty = sum(g.square().sum() for g in gradients if g is not None)
            (loss + 0.1 * penalty).backward()
        elif loop == "partial":
            torch.autograd.grad(loss, trained[-1:], retain_graph=True, allow_unused=True)
            loss.backward()
        else:
            loss.backward(retain_graph=loop == "retain")
            if loop == "retain":
                loss.backward()
        if loop == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.loss(batch)
            self.model.train()
        return loss.detach()


def _assign(tensors: list[Tensor], gradients: Any) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient
