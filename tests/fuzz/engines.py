"""A program under one engine of lowtide.

An engine is a JSON object with a `kind`:

- `none`: nothing but the checkpoints that the program itself has;
- `policy`: `lowtide.apply` with a policy on the modules at `regions`, inputs in a store with `store`;
- `plan`: `lowtide.apply` with a plan of `regions` `[path, nth, keep_ops, more]` and `moves` `[path, nth, save, op]`;
- `fit`: `lowtide.fit` at `budget` bytes, or `share` of the way from the floor to the plain peak;
- `offload`: the forward inside of `lowtide.offload`;
- `compiled`: `lowtide.compile` with a compiler that runs every op as it is.

With `toggle` the handle is switched off for the second step.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from typing import Any

import torch
from torch import nn

import lowtide
from fuzz.meter import bytes_of, peak_of
from fuzz.programs import Program, Spec
from lowtide.plans import Move, Recompute
from lowtide.policies import Policy, Segment, Segments
from lowtide.simulator import simulate

FIT_SHARES = (0.02, 0.2, 0.5, 0.8, 1.0)
_SOLVE_LIMIT_S = 1.0


@dataclass
class Running:
    """An engine that is on: `around` a step, `remove()` at the end."""

    handle: Any = None
    budget_bytes: int | None = None
    toggles: bool = False
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    offload: dict[str, Any] | None = None

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context of a step."""
        with contextlib.ExitStack() as stack:
            if self.toggles and step == 1 and hasattr(self.handle, "disabled"):
                stack.enter_context(self.handle.disabled())
            if self.offload is not None:
                stack.enter_context(lowtide.offload(min_bytes=0, **self.offload))
            yield

    def remove(self) -> None:
        """Take the engine off."""
        if hasattr(self.handle, "remove"):
            self.handle.remove()
        self.stack.close()


class Facts:
    """What engines need to know of a program: its module calls, its trace, its floor and plain peak. Found lazily."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cached_property
    def calls(self) -> list[tuple[str, int]]:
        """Path and number of each module call in a forward, by forward hooks."""
        program = Program(self.spec)
        names = {module: name for name, module in program.model.named_modules()}
        counts: dict[str, int] = {}

        def called(module: nn.Module, args: Any) -> None:
            counts[names[module]] = counts.get(names[module], 0) + 1

        hooks = [module.register_forward_pre_hook(called) for module in names]
        program.before_step(0)
        program.loss(program.batch(0))
        for hook in hooks:
            hook.remove()
        return [(name, nth) for name, number in counts.items() for nth in range(number)]

    @cached_property
    def graph(self) -> lowtide.StepGraph:
        """The trace of the first step."""
        program = Program(self.spec)
        program.before_step(0)
        return lowtide.trace(program.model, program.loss, program.batch(0), optimizer=program.optimizer, mode="real")

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget that `lowtide.solve` finds a plan for."""
        try:
            lowtide.solve(self.graph, 1)
        except lowtide.InfeasibleBudgetError as error:
            return error.floor_bytes
        raise AssertionError("a budget of one byte was met")

    @cached_property
    def measured_bytes(self) -> tuple[int, int]:
        """Bytes of parameters and buffers, and what the plain step allocates at most beside them."""
        program = Program(self.spec)
        program.before_step(0)
        static_bytes = bytes_of([*program.model.parameters(), *program.model.buffers()])
        return static_bytes, peak_of(lambda: program.forward_backward(0))[1]

    def with_budget(self, engine: dict[str, Any]) -> dict[str, Any]:
        """`engine` with the budget that its share stands for."""
        if "share" not in engine or "budget" in engine:
            return engine
        if engine["kind"] == "compiled":  # its floor is only known once it is compiled
            static_bytes, step_bytes = self.measured_bytes
            return {**engine, "budget": int(static_bytes + engine["share"] * step_bytes)}
        plain_bytes = simulate(self.graph).peak_bytes
        return {**engine, "budget": int(self.floor_bytes + engine["share"] * (plain_bytes - self.floor_bytes)) + 1}


def random_engines(spec: Spec, facts: Facts) -> list[dict[str, Any]]:
    """Engines for a program, drawn from its seed.

    A trace takes as long as ten runs of a tiny model: every third program has one, and then more plans.
    """
    rng = random.Random(f"engines of {spec.seed}")
    found: list[dict[str, Any]] = []
    if rng.random() < 0.3 and _is_traced(facts):
        found += [_traced_plan(rng, facts) for _ in range(10)]
    found += [_counted_plan(rng, facts) for _ in range(4)]
    found += [_segmented_plan(rng, facts) for _ in range(3)]
    found += [_random_policy(rng, facts) for _ in range(2)]
    for engine in found:
        if rng.random() < 0.2:
            engine["toggle"] = True
    if "checkpoint" in spec.names:
        found.append({"kind": "none"})
    if rng.random() < 0.5:
        found.append({"kind": "offload", "options": rng.choice(({}, {"host": "1GiB", "device": 4096}))})
    return found


def fit_engines() -> list[dict[str, Any]]:
    """Budgets from just above the floor to the plain peak."""
    return [{"kind": "fit", "share": share} for share in FIT_SHARES]


def compiled_engines() -> list[dict[str, Any]]:
    """Two budgets: one that makes the compiled backend recompute, and one that needs nothing of it."""
    return [{"kind": "compiled", "share": share} for share in (0.6, 2.0)]


def _is_traced(facts: Facts) -> bool:
    try:
        return facts.graph is not None
    except lowtide.LowtideError:
        return False


def _counted_plan(rng: random.Random, facts: Facts) -> dict[str, Any]:
    share = rng.choice((0.1, 0.3, 0.6, 1.0))
    chosen = [call for call in facts.calls if rng.random() < share] or [rng.choice(facts.calls)]
    return {"kind": "plan", "regions": [[path, nth, []] for path, nth in chosen]}


def _segmented_plan(rng: random.Random, facts: Facts) -> dict[str, Any]:
    """Segments of the model's layers, some inside others, and single calls around and inside them."""
    paths = {path for path, _ in facts.calls}
    layers = list(takewhile(paths.__contains__, (f"layers.{number}" for number in count())))
    runs: list[list[Any]] = []

    def add(first: int, last: int) -> None:
        if first < last and rng.random() < 0.8:
            runs.append([layers[first], 0, [], [[path, 0] for path in layers[first + 1 : last + 1]]])
        if first < last and rng.random() < 0.7:
            cut = rng.randrange(first, last)
            add(first, cut)
            add(cut + 1, last)

    first = rng.randrange(max(len(layers) - 1, 1))
    add(first, len(layers) - 1)
    singles = _counted_plan(rng, facts)["regions"] if not runs or rng.random() < 0.5 else []
    return {"kind": "plan", "regions": [*runs, *singles]}


def _traced_plan(rng: random.Random, facts: Facts) -> dict[str, Any]:
    """Any calls of the trace, some outputs that autograd saves kept inside of them, some values moved to the host."""
    graph, share, kept_share = facts.graph, rng.choice((0.1, 0.3, 0.6, 1.0)), rng.choice((0.0, 0.3, 0.8))
    move_share = rng.choice((0.0, 0.0, 0.3))
    regions, moves = [], []
    recomputed = set()
    for path, calls in graph.calls_by_path.items():
        for nth, index in enumerate(calls):
            call = graph.calls[index]
            if rng.random() < share:
                recomputed.add(index)
                made = {graph.values[save.value].born for save in graph.saves}
                kept = [op - call.first for op in sorted(made) if call.first <= op < call.end]
                kept = [op for op in kept if rng.random() < kept_share]
                regions.append([path, nth, kept])
                moves += [[path, nth, 0, op] for op in kept if rng.random() < move_share]
                moves += [[path, nth, number, None] for number in range(len(call.inputs)) if rng.random() < move_share]
    for index, number in graph.saves_by_number:
        if index >= 0 and index not in recomputed and rng.random() < move_share:
            path = graph.calls[index].path
            moves.append([path, graph.calls_by_path[path].index(index), number, None])
    return {"kind": "plan", "regions": regions, "moves": moves}


def _random_policy(rng: random.Random, facts: Facts) -> dict[str, Any]:
    names = sorted({path for path, _ in facts.calls if path})
    share = rng.choice((0.2, 0.5, 1.0))
    paths = [path for path in names if rng.random() < share] or ["layers.0"]
    if rng.random() < 0.4:
        paths = ["layers.*"]
    policy = rng.choice(
        (
            ["RecomputeAll"],
            ["KeepAll"],
            ["EveryN", 2],
            ["Uniform", 2],
            ["SqrtN"],
            ["Revolve", 2],
            ["Segments", [[0, 0]]],
            ["MaxBytes", 4096],
            ["Selective", 1.5],
        )
    )
    engine: dict[str, Any] = {"kind": "policy", "policy": policy, "regions": paths}
    return {**engine, "store": True} if rng.random() < 0.2 else engine


def policy_of(description: list[Any]) -> Policy:
    """The policy that an engine names."""
    name, *options = description
    if name == "Segments":
        return Segments(tuple(Segment(*pair) for pair in options[0]))
    return getattr(lowtide, name)(*options)


def plan_of(engine: dict[str, Any]) -> lowtide.Plan:
    """The plan that an engine describes."""
    regions = tuple(
        Recompute(path, nth, tuple(kept), tuple((path, nth) for path, nth in more[0]) if more else ())
        for path, nth, kept, *more in engine["regions"]
    )
    moves = tuple(Move(path, nth, save, op=op) for path, nth, save, op in engine.get("moves", ()))
    return lowtide.Plan(regions=regions, moves=moves)


def start(program: Program, engine: dict[str, Any]) -> Running:
    """Put a program under an engine."""
    kind, model, toggles = engine["kind"], program.model, engine.get("toggle", False)
    if kind == "none":
        return Running()
    if kind == "plan":
        return Running(lowtide.apply(model, plan_of(engine)), toggles=toggles)
    if kind == "policy":
        policy = policy_of(engine["policy"])
        weights: dict[str, Any] = {}
        if isinstance(policy, lowtide.Selective | lowtide.MaxBytes):
            numbers = range(len(model.layers) if engine["regions"] == ["layers.*"] else len(engine["regions"]))
            weights = {"costs": [float(1 + i % 2) for i in numbers], "bytes": [1024 * (1 + i) for i in numbers]}
        store = lowtide.ActivationStore(host="1GiB") if engine.get("store") else None
        return Running(lowtide.apply(model, policy, regions=engine["regions"], store=store, **weights), toggles=toggles)
    if kind == "offload":
        return Running(offload=engine.get("options", {}))
    if kind == "fit":
        budget = engine["budget"]
        handle = lowtide.fit(
            model,
            program.loss,
            program.batch(0),
            budget=budget,
            optimizer=program.optimizer,
            time_limit_s=_SOLVE_LIMIT_S,
        )
        return Running(handle, budget, toggles)
    if kind == "compiled":
        return _compiled(program, engine)
    raise ValueError(f"no engine is called {kind!r}")


def start_plain(program: Program, engine: dict[str, Any]) -> Running:
    """What an engine is compared with: nothing, or for the compiled one torch's own compile until it is removed."""
    running = Running()
    if engine.get("kind") == "compiled":
        from kernelless import compiled_plainly
        from lowtide import _compat

        torch.compiler.reset()
        compiled_plainly(program.model, regional=False)
        running.stack.callback(_compat.uncompile, program.model)
    return running


def _compiled(program: Program, engine: dict[str, Any]) -> Running:
    from kernelless import Compiler
    from lowtide import _compat
    from lowtide.compiled import session

    torch.compiler.reset()
    running, before = Running(), _compat.compile_with_inductor
    running.stack.callback(setattr, _compat, "compile_with_inductor", before)
    running.stack.callback(setattr, session, "MEASURES_CPU", session.MEASURES_CPU)
    _compat.compile_with_inductor, session.MEASURES_CPU = Compiler(), False
    lowtide.compile(program.model, budget=engine["budget"], regional=False)
    running.handle = lowtide.handle_of(program.model)
    return running
