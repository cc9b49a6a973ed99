"""The judge: a program under an engine against the same program run plainly.

After each step loss, gradients, parameters, buffers, attributes (also inside of containers), generators and torch's
random state are compared by `torch.equal`; under the engine, and again after it was removed. For `fit` the peak of each
step is compared with the budget. The number of live tensors must not grow faster than in the plain run.
"""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import lowtide
from fuzz.engines import Facts, Running, start, start_plain
from fuzz.features import UserCheckpoint
from fuzz.meter import bytes_of, num_live_tensors, peak_of
from fuzz.programs import NUM_AFTER, NUM_PLANNED, Program, Spec, walk

State = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """How a program went: `outcome` is "equal", "refused", "skipped" or "failed".

    `kind` is what failed ("gradient", "buffer", "crash", ...) or the class of the error, `text` says where.
    """

    spec: Spec
    outcome: str
    kind: str = ""
    text: str = ""


class Mismatch(Exception):
    """The engine is not the plain run."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors, generators and plain values in a container, with their names."""
    if isinstance(value, Tensor):
        yield name, (value.detach().clone(), value.requires_grad)
    elif isinstance(value, torch.Generator):
        yield f"{name} (generator)", (value.get_state(), False)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _parts(f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple | deque):
        yield f"type of {name}", f"{type(value).__name__} of {len(value)}"
        for index, part in enumerate(value):
            yield from _parts(f"{name}[{index}]", part)
    elif isinstance(value, bool | int | float | str | None):
        yield name, value
    elif isinstance(value, SimpleNamespace):
        for key, part in vars(value).items():
            yield from _parts(f"{name}.{key}", part)


def state_of(program: Program, loss: Tensor | None = None, *, is_patched: bool = False) -> State:
    """Everything that a step may change, by name."""
    found: State = {"random state": (torch.get_rng_state(), False)}
    if loss is not None:
        found["loss"] = (loss.clone(), False)
    for name, parameter in program.model.named_parameters():
        found |= dict(_parts(f"parameter {name}", parameter))
        found |= dict(_parts(f"gradient of {name}", parameter.grad))
    for number, tensor in enumerate(program.inputs):
        found |= dict(_parts(f"gradient of input {number}", tensor.grad))
    for name, buffer in program.model.named_buffers():
        found |= dict(_parts(f"buffer {name}", buffer))
    for path, module in program.model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and not (is_patched and name == "forward"):  # torch's own begin with one
                found |= dict(_parts(f"attribute {path}.{name}", value))
                if name == "forward":
                    found[f"attribute {path}.forward"] = "a forward of its own"
    return found


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        (a, needs_a), (b, needs_b) = expected, actual
        if needs_a != needs_b or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) or torch.equal(torch.nan_to_num(a.float()), torch.nan_to_num(b.float()))
    return type(expected) is type(actual) and expected == actual


def _compare(expected: State, actual: State, when: str, kind: str = "") -> None:
    """Raise `Mismatch` for the first thing that differs; gradients before what follows from them."""
    names = sorted({*expected, *actual}, key=lambda name: name.startswith("parameter"))
    for name in names:
        if name in expected and name in actual and _same(expected[name], actual[name]):
            continue
        raise Mismatch(
            kind or name.split(" ")[0], f"{name} {when}: {_difference(expected.get(name), actual.get(name))}"
        )


def _difference(expected: Any, actual: Any) -> str:
    if isinstance(expected, tuple) and isinstance(actual, tuple) and expected[0].shape == actual[0].shape:
        (a, needs_a), (b, needs_b) = expected, actual
        if needs_a != needs_b:
            return f"requires_grad is {needs_b}, plainly {needs_a}"
        error = (a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30)
        return f"relative difference {error:.2g}"
    shown = [tuple(v[0].shape) if isinstance(v, tuple) else v for v in (expected, actual)]
    return f"{shown[1]!r}, plainly {shown[0]!r}"


@dataclass(frozen=True)
class Reference:
    """The plain run: what each step left, and by how many tensors the last planned step grew."""

    states: list[State]
    growth: int


_references: dict[str, Reference | str] = {}


def _program_of(spec: Spec) -> Spec:
    return replace(spec, engine={"kind": "compiled"} if spec.engine.get("kind") == "compiled" else {})


def reference_of(spec: Spec) -> Reference | str:
    """The plain run of a program, or why there is none. Remembered for the last program."""
    key = json.dumps(_program_of(spec).to_json())
    if key not in _references:
        _references.clear()
        _references[key] = _run_plainly(spec)
    return _references[key]


def _run_plainly(spec: Spec) -> Reference | str:
    """The plain run, with the program's own checkpoints bypassed: they must not change anything.

    Those by torch do where the block inside has state; such programs have no reference.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _run_once(spec, is_bypassed=True)
        if isinstance(found, str) or not any(node[:2] == ["checkpoint", "torch"] for node in walk(spec.net)):
            return found
        other = _run_once(spec, is_bypassed=False)
        if isinstance(other, str) or not all(map(_all_same, found.states, other.states)):
            return "torch's own checkpoint is not exact here"
        return found


def _run_once(spec: Spec, is_bypassed: bool) -> Reference | str:
    UserCheckpoint.is_bypassed = is_bypassed
    try:
        program = Program(spec)
        running = start_plain(program, spec.engine)
        states, live = [], []
        for step in range(NUM_PLANNED + NUM_AFTER):
            if step == NUM_PLANNED:
                running.remove()
            program.before_step(step)
            loss = program.forward_backward(step)
            states.append(state_of(program, loss))
            program.optimizer.step()
            live.append(num_live_tensors())
            if not torch.isfinite(loss):
                return "the loss is not finite"
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    finally:
        UserCheckpoint.is_bypassed = False
    return Reference(states, live[NUM_PLANNED - 1] - live[NUM_PLANNED - 2] - _tensors_in(states[NUM_PLANNED - 1]))


def _tensors_in(state: State) -> int:
    return sum(isinstance(value, tuple) for value in state.values())


def judge(spec: Spec, facts: Facts | None = None) -> Verdict:
    """Run a program under its engine, and plainly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        gc.freeze()  # what is there already is not looked through again and again
        gc.disable()  # cycles that hold tensors must show
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _judge(spec, facts or Facts(spec))
        finally:
            torch.set_num_threads(threads)
            gc.enable()


def _judge(spec: Spec, facts: Facts) -> Verdict:
    reference = reference_of(spec)
    if isinstance(reference, str):
        return Verdict(spec, "skipped", "plain", reference)
    running: Running | None = None
    try:
        engine = facts.with_budget(spec.engine)
        program = Program(spec)
        program.before_step(0)
        before = state_of(program)
        try:
            running = start(program, engine)
        finally:
            program.inputs = []
            is_patched = running is not None
            _compare(before, state_of(program, is_patched=is_patched), "after the engine was started", "not restored")
        return Verdict(spec, "equal", _run_under(running, program, reference))
    except (lowtide.LowtideError, RecursionError) as error:  # regions nested some twenty deep
        return Verdict(spec, "refused", type(error).__name__, _first_line(error))
    except Mismatch as found:
        if found.kind in ("leak", "cycle") and not _keeps_growing(spec, facts, collects=found.kind == "leak"):
            return Verdict(spec, "equal", "", "a region that runs for the first time keeps more than is allowed for")
        again = _run_plainly(spec)
        if isinstance(again, str) or not all(map(_all_same, reference.states, again.states)):
            return Verdict(spec, "skipped", "not deterministic", "two plain runs differ")
        return Verdict(spec, "failed", found.kind, found.text)
    except Exception as error:
        return Verdict(spec, "failed", f"crash: {type(error).__name__}", _first_line(error))
    finally:
        if running is not None:
            running.stack.close()


def _all_same(expected: State, actual: State) -> bool:
    return all(_same(value, actual.get(name)) for name, value in expected.items())


def _run_under(running: Running, program: Program, reference: Reference) -> str:
    """Run and compare all steps; a remark on the run, if there is one to make."""
    live, remark = 0, ""
    for step in range(NUM_PLANNED + NUM_AFTER):
        if step == NUM_PLANNED:
            running.remove()
        is_planned = step < NUM_PLANNED
        is_measured = is_planned and running.budget_bytes is not None and not (running.toggles and step == 1)
        program.before_step(step)
        loss, peak_bytes = _run_step(running if is_planned else Running(), program, step, is_measured)
        state = state_of(program, loss, is_patched=is_planned)
        program.optimizer.step()
        _compare(reference.states[step], state, f"in step {step}{'' if is_planned else ', after remove()'}")
        if running.budget_bytes is not None and peak_bytes > running.budget_bytes:
            over = f"{peak_bytes} bytes in step {step} against a budget of {running.budget_bytes}"
            if program.spec.is_steady:
                raise Mismatch("peak", over)
            remark = "over budget in a program whose steps differ"
        del loss, state
        if step == NUM_PLANNED - 2:
            live = num_live_tensors()
        elif step == NUM_PLANNED - 1:
            # A region keeps one copy of small tensors that its forward leaves alone, from when it knows that.
            frozen = [each for each in program.model.parameters() if not each.requires_grad]
            num_copies = len(frozen) + sum(1 for _ in program.model.buffers())
            _check_growth(live + max(0, reference.growth) + num_copies)
    return remark


def _run_step(running: Running, program: Program, step: int, is_measured: bool) -> tuple[Tensor, int]:
    """A forward and backward: the loss, and the peak of the whole step where it is measured."""
    with running.around(step):
        if not is_measured:
            return program.forward_backward(step), 0
        states = [t for values in program.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        static_bytes = bytes_of([*program.model.parameters(), *program.model.buffers(), *states])
        loss, peak_bytes = peak_of(lambda: program.forward_backward(step))
        return loss, static_bytes + peak_bytes


def _check_growth(allowed: int) -> None:
    found = num_live_tensors()
    if found > allowed:
        gc.collect()
        kind = "leak" if num_live_tensors() > allowed else "cycle"
        raise Mismatch(kind, f"{found - allowed} more tensors are alive after a step than plainly")


def _keeps_growing(spec: Spec, facts: Facts, *, collects: bool) -> bool:
    """Whether more and more tensors are alive, over many steps; with `collects`, not counting those in cycles."""
    program, live = Program(spec), []
    program.before_step(0)
    running = start(program, facts.with_budget(spec.engine))
    program.inputs = []
    for step in range(40):
        program.before_step(step)
        try:
            _run_step(running, program, step, False)
        except lowtide.InfeasibleBudgetError:  # of a later step: the budget fits the first ones
            break
        program.optimizer.step()
        if collects:
            gc.collect()
        live.append(num_live_tensors())
    running.remove()
    return len(live) == 40 and min(live[30:]) > max(live[5:15])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def generic(text: str) -> str:
    """A message without the numbers and module names that differ from program to program."""
    return re.sub(r"\b[\w]+(\.\w+)+\b|'[^']*'", "NAME", re.sub(r"\d+(\.\d+)?", "N", text))[:110]
