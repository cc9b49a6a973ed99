"""Which modules of a model are its layers: the repeated blocks, or what a pattern, class or predicate names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import nn

# Containers hold layers; they are none themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]


def find_regions(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> dict[str, nn.Module]:
    """The layers of a model by name, in the model's order; a `ValueError` that lists what there is if none matches."""
    if selectors is None:
        found = _repeated_blocks(model)
        if not found:
            raise ValueError(
                "this model has no repeated blocks to go by. Name its layers with regions=: a pattern such as "
                f"'encoder.*', a class, or a predicate (name, module) -> bool. It has {_overview(model)}"
            )
        return found
    given = selectors
    if isinstance(selectors, str | type) or callable(selectors):
        selectors = [selectors]
    tests = [_test(selector) for selector in selectors]
    found = {name: module for name, module in model.named_modules() if name and any(t(name, module) for t in tests)}
    if not found:
        raise ValueError(f"regions={given!r} matches no module. The model has {_overview(model)}")
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name matches component by component: `*` stands for one, `**` for any number.

    >>> matches("encoder.layers.*", "encoder.layers.3"), matches("layers.*", "encoder.layers.3")
    (True, False)
    """
    return _matches(pattern.split("."), name.split("."))


def _matches(patterns: list[str], parts: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(patterns[1:], parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(patterns[1:], parts[1:])


def _test(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, str):
        return lambda name, module: matches(selector, name)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if callable(selector) and not isinstance(selector, type):
        return lambda name, module: bool(selector(name, module))
    raise TypeError(f"regions takes patterns, module classes and predicates (name, module) -> bool, not {selector!r}")


def _runs(model: nn.Module, prefix: str = "") -> list[dict[str, nn.Module]]:
    """Runs of two or more neighbours of one class, from the outside in; nothing inside a member of a run."""
    runs: list[dict[str, nn.Module]] = []
    for kind, group in groupby(model.named_children(), key=lambda child: type(child[1])):
        members = {f"{prefix}{name}": child for name, child in group}
        has_weights = any(True for child in members.values() for _ in child.parameters())
        inner = [run for name, child in members.items() for run in _runs(child, f"{name}.")]
        is_run = len(members) > 1 and has_weights and kind is not nn.Module and not issubclass(kind, _CONTAINERS)
        # Two stacks side by side (an encoder and a decoder of one class) are no layers; their layers are.
        if is_run and not (len(members) == 2 and any(len(run) > 2 for run in inner)):
            runs.append(members)
        else:
            runs += inner
    return runs


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The longest run, and the other runs that are stacks too: of the same class, or at least half as long."""
    runs = _runs(model)
    if not runs:
        return {}
    longest = max(runs, key=len)
    kind = type(next(iter(longest.values())))
    found: dict[str, nn.Module] = {}
    for run in runs:
        same_class = type(next(iter(run.values()))) is kind
        if same_class or (2 * len(run) >= len(longest) and all(any(m.children()) for m in run.values())):
            found |= run
    return found


def _overview(model: nn.Module) -> str:
    """What a person could name: classes with an example of each, the largest first."""
    examples: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if name:
            examples.setdefault(type(module).__name__, []).append(name)
    shown = [f"{len(names)} x {kind} ({names[0]})" for kind, names in examples.items()][:12]
    return "; ".join(shown) or "no submodules"
