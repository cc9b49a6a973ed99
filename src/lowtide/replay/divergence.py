"""Errors of replays that do not repeat their forward, with the region, the likely cause and what to do.

`recomputing`, `region`, `layer_pass` and `index_choices` raise them. All are `ReplayError`, which is both
`lowtide.CheckpointError` and torch's `CheckpointError`, so that code written for torch's checkpoint catches it. The
functions below build the messages; they search all living modules for the name of a region, and are slow.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.autograd import TorchCheckpointError
from lowtide._compat.modules import WHOLE_MODULE_METHODS
from lowtide.errors import CheckpointError
from lowtide.replay.arguments import Path

_MAX_MISMATCHES = 3


class ReplayError(CheckpointError, TorchCheckpointError):
    """A `lowtide.CheckpointError` that code which catches torch's `CheckpointError` catches too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, self.args  # unpickled as the public class


class OverwrittenError(ReplayError):
    """A saved tensor was changed in place after it was saved."""


OverwrittenError.__name__ = OverwrittenError.__qualname__ = "CheckpointError"
OverwrittenError.__module__ = CheckpointError.__module__
ReplayError.__name__ = ReplayError.__qualname__ = "CheckpointError"
ReplayError.__module__ = CheckpointError.__module__


def describe(function: Callable[..., Any]) -> str:
    """Return a name for the region: the module's path and class, or the function's name, file and line."""
    target, suffix = function, ""
    while isinstance(target, functools.partial):  # of a layer's own method, or around one
        methods = (part for part in target.args if isinstance(getattr(part, "__self__", None), nn.Module))
        target = next(methods, target.func)
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        name = target.__name__
        target, suffix = owner, "" if name in WHOLE_MODULE_METHODS else f".{name}()"
    if isinstance(target, nn.Module):
        path = module_path(target)
        return f"{path}{suffix} ({type(target).__name__})" if path else f"{type(target).__name__}{suffix}"
    code = getattr(target, "__code__", None)
    name = getattr(target, "__qualname__", type(target).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def module_path(module: nn.Module) -> str:
    """Return the dotted path of `module` below its root, by a search of all living modules: slow, for errors only."""
    modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    names: list[str] = []
    visited = {id(module)}
    while True:
        holder = next(((m, name) for m in modules if (name := _compat.child_name(m, module))), None)
        if holder is None or id(holder[0]) in visited:
            return ".".join(reversed(names))
        module, name = holder
        visited.add(id(module))
        names.append(name)


def name_argument(function: Callable[..., Any], path: Path) -> str:
    """Return the name of an argument, such as `past_key_values['k']`, with the function's own parameter names."""
    root, *rest = path
    if isinstance(root, int):
        target = function.forward if isinstance(function, nn.Module) else function
        try:
            parameters = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
        if root < len(positional):
            name = positional[root]
        elif variadic:
            name = f"{variadic[0]}[{root - len(positional)}]"
        else:
            name = f"argument {root}"
    else:
        name = str(root)
    return name + "".join(f"[{key!r}]" for key in rest)


def mutated_argument(function: Callable[..., Any], path: Path, how: str) -> ReplayError:
    name = name_argument(function, path)
    hint = " For Hugging Face models: pass use_cache=False." if "past_key_value" in name else ""
    return ReplayError(
        f"argument {name!r} of {describe(function)} {how} between the forward and its replay, "
        "so replaying would give wrong gradients (plain autograd: 'modified by an inplace operation').\n"
        f"Pass a copy ({name}.clone(), copy.copy({name})), change {name} after the backward, "
        f"or return what the region adds to {name} and store it outside of the region.{hint}"
    )


def mutated_state(function: Callable[..., Any], what: str) -> ReplayError:
    return ReplayError(
        f"{what}, read by {describe(function)}, was modified by an inplace operation between the forward and its "
        "replay, so replaying would give wrong gradients.\n"
        "Run the backward before optimizer.step() or any other change of weights and buffers, "
        "or leave this region uncheckpointed."
    )


def overwritten_activation(function: Callable[..., Any], position: int, metadata: Sequence[Any]) -> OverwrittenError:
    return OverwrittenError(
        f"a tensor that {describe(function)} saves for its backward (number {position}, {_form(metadata)}) has been "
        "modified by an inplace operation since.\n"
        "Use the out-of-place form of the op that changes it. If it is the input of a checkpointed module that changes "
        "its input (Dropout or ReLU with inplace=True), leave that module uncheckpointed."
    )


def changes_its_input(function: Callable[..., Any]) -> ReplayError:
    return ReplayError(
        f"{describe(function)} changes one of its inputs in place, so a replay cannot start from what it was given.\n"
        "Use the out-of-place form (inplace=False), or leave this region uncheckpointed."
    )


Difference = tuple[int, str, str]


def diverged(
    function: Callable[..., Any],
    finding: str,
    difference: Difference | None,
    *,
    preserves_rng: bool,
    changed_state: Sequence[str],
    is_compiled: bool,
) -> ReplayError:
    """Return the error of a diverged replay: the finding, region, first op that differed, likely cause and cure."""
    lines = [finding, f"region: {describe(function)}"]
    if difference is not None:
        position, before, after = difference
        lines.append(f"first op that differed: number {position}, {before} in the forward, {after} in the replay")
    cause, cure = _cause(difference, preserves_rng, changed_state)
    lines += [f"likely cause: {cause}", f"what to do: {cure}"]
    if is_compiled:
        lines.append(
            "torch.compile: the replay may also have run another compiled graph than the forward, a dynamic instead "
            "of a static one. Mark sizes that vary with torch._dynamo.mark_dynamic() before the first call "
            "(https://github.com/pytorch/pytorch/issues/166926)"
        )
    return ReplayError("\n".join(lines))


def mismatch(saved: Sequence[Sequence[Any]], recomputed: Sequence[Sequence[Any]]) -> str:
    """Describe how the saves of a replay differ from the forward's, worded as in torch's own checkpoint."""
    if len(saved) != len(recomputed):
        return (
            "A different number of tensors was saved during the original forward and recomputation.\n"
            f"Number of tensors saved during forward: {len(saved)}\n"
            f"Number of tensors saved during recomputation: {len(recomputed)}"
        )
    pairs = enumerate(zip(saved, recomputed, strict=True))
    different = [
        f"tensor at position {position}:\nsaved metadata: {_form(before)}\nrecomputed metadata: {_form(after)}"
        for position, (before, after) in pairs
        if before != after
    ]
    shown = different[:_MAX_MISMATCHES]
    if len(different) > len(shown):
        shown.append(f"and {len(different) - len(shown)} more")
    return "\n".join(
        ["Recomputed values for the following tensors have different metadata than during the forward pass.", *shown]
    )


def _form(metadata: Sequence[Any]) -> str:
    if not metadata:  # determinism_check="none" records nothing
        return "unchecked"
    shape, dtype, device, *values = metadata
    checksum = f", checksum {int(values[0])}" if values else ""
    return f"shape {tuple(shape)}, {dtype}, {device}{checksum}"


def _cause(difference: Difference | None, preserves_rng: bool, changed_state: Sequence[str]) -> tuple[str, str]:
    if changed_state:
        names = ", ".join(changed_state[:_MAX_MISMATCHES])
        return (
            f"mutated state: {names} changed since the forward",
            "change it after the backward, or make it an argument of the region",
        )
    ops = () if difference is None else difference[1:]
    if not preserves_rng:
        return (
            "random numbers (RNG) drawn anew in the replay, as preserve_rng_state=False asks for",
            "leave preserve_rng_state=True",
        )
    if "nothing" in ops:
        return (
            "gradients recorded in only one of the two runs (grad mode or requires_grad changed), "
            "or a data-dependent branch",
            "set requires_grad and grad mode before the forward and leave them until the backward is done; "
            "make branches depend on arguments only",
        )
    return (
        "a data-dependent branch, mutated state (a global or an attribute that changed), or random numbers (RNG) "
        "from outside torch (Python's random, numpy)",
        "make the region depend on its arguments only, and draw from torch's generators; "
        "lowtide.is_recomputing() tells a replay apart",
    )


def graph_ops(outputs: Sequence[Tensor] | None, since: int) -> list[str]:
    """List the differentiable ops numbered `since` or later that lead to `outputs` (or to the running node)."""
    roots = None if outputs is None else [output.grad_fn for output in outputs]
    names = (re.sub(r"Backward\d*$", "", node.name()) for node in _compat.autograd_nodes_since(since, roots))
    return [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names if "AccumulateGrad" not in name]


def first_difference(forward: Sequence[str], replay: Sequence[str] | None) -> Difference | None:
    """Return the first difference of two op sequences. The forward's may lack ops after the running node."""
    if replay is None:
        return None
    pairs = enumerate(zip_longest(forward, replay[: len(forward)], fillvalue="nothing"))
    return next(((position, a, b) for position, (a, b) in pairs if a != b), None)
