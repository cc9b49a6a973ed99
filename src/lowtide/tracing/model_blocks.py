"""`find_regions`: choose the layers of a model that `apply(model, policy)` and the compiled engine work on.

By default these are the repeated blocks: members of a container (`nn.ModuleList`, ...), or several attributes of one
class, that have weights and are more than a single layer of torch. A model without such blocks has the single layers
of which a container holds several. `regions=` overrides this with name patterns, classes or predicates. Only names,
classes and parameter shapes are inspected; the model is not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lowtide import _compat

# Containers hold layers. A Sequential may also be one.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]


def find_regions(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> dict[str, nn.Module]:
    """Return a model's layers by name, in its order; a `ValueError` lists its modules if nothing matches."""
    if selectors is None:
        blocks = _repeated_blocks(model)
        if not blocks:
            raise ValueError(
                "this model has no repeated blocks. Name its layers with regions=: a pattern such as "
                f"'encoder.*', a class, or a predicate (name, module) -> bool. It has {_overview(model)}"
            )
        return blocks
    given = selectors
    if isinstance(selectors, str) or callable(selectors) or not isinstance(selectors, Iterable):
        selectors = [selectors]
    tests = [_test(selector) for selector in selectors]
    matching = {name: module for name, module in model.named_modules() if name and any(t(name, module) for t in tests)}
    if not matching:
        raise ValueError(f"regions={given!r} matches no module. The model has {_overview(model)}")
    return matching


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name matches component by component: `*` matches one component, `**` any number.

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


def is_block(module: nn.Module) -> bool:
    """Whether a module is a block: it has weights, and is more than one of torch's own layers or a subclass of one."""
    bases = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    is_torchs = any(base.__module__.startswith("torch.nn.") for base in bases)
    return _has_weights(module) and (_is_composite(module) or not is_torchs)


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks; without any, the single layers of which a container holds two or more."""
    blocks = _blocks(model) or _single_layers(model)
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    chosen = {id(block) for block in blocks} - inside
    return {name: module for name, module in model.named_modules() if id(module) in chosen}


def _blocks(module: nn.Module, *, beside_stack: bool = False) -> list[nn.Module]:
    """Return the outermost blocks inside a module.

    A block is a member of a container (even its only member), or one of several attributes of one class. In a module
    beside a stack, such as a pooler after the layers, attributes of one class are parts of it and not blocks.
    """
    groups = _by_class(module)
    is_container = isinstance(module, _CONTAINERS)
    blocks: list[nn.Module] = []
    others: list[nn.Module] = []
    for group in groups.values():
        is_stack = (is_container or not beside_stack) and _is_stack(module, group, groups)
        (blocks if is_stack else others).extend(group.values())
    for child in sorted(others, key=lambda child: not isinstance(child, _CONTAINERS)):
        inner = _blocks(child, beside_stack=beside_stack or bool(blocks))
        # A Sequential of single layers inside a container is a block.
        is_whole = not inner and is_container and isinstance(child, nn.Sequential)
        blocks += [child] if is_whole else inner
    return blocks


def _is_stack(parent: nn.Module, group: dict[str, nn.Module], groups: dict[type, dict[str, nn.Module]]) -> bool:
    """Whether children of one class are blocks, as opposed to stages or towers that contain blocks."""
    members = list(group.values())
    in_container = isinstance(parent, _CONTAINERS)
    if isinstance(members[0], _CONTAINERS) or not all(map(is_block, members)):
        return False
    if not in_container and (len(members) == 1 or not all(map(_is_composite, members))):
        return False
    inner = [_last_of_stack(member) for member in members]
    if any(last is None for last in inner):
        return True  # no repeated blocks inside
    if len(members) == 1:  # a layer beside layers of other classes, or a backbone: Sequential(Backbone(), Head())
        others = [child for group in groups.values() for child in group.values() if child is not members[0]]
        is_layer = any(is_block(child) and _last_of_stack(child) is None for child in others)
        return not others or (is_layer and not isinstance(parent, nn.Sequential))
    is_numbered = in_container or len({re.sub(r"\d+", "", name) for name in group}) == 1
    # Stages differ in width, so their last blocks have different shapes. Experts inside blocks have equal shapes, as do
    # the last convolutions in the blocks of one stage.
    return is_numbered and len({_shapes(last) for last in inner if last is not None}) < len(members)


def _last_of_stack(module: nn.Module) -> nn.Module | None:
    """Return the last block of the outermost container whose members are blocks of one class, or None."""
    for below in module.modules():
        members = [child for child in below.children() if _has_weights(child)]
        if isinstance(below, _CONTAINERS) and len({type(member) for member in members}) == 1 and is_block(members[-1]):
            return members[-1]
    return None


def _single_layers(model: nn.Module) -> list[nn.Module]:
    """Return layers of which a container holds several of one class, such as the nn.Linear of an MLP."""
    containers = (module for module in model.modules() if isinstance(module, _CONTAINERS))
    groups = (group for container in containers for group in _by_class(container).values())
    return [layer for group in groups if len(group) > 1 for layer in group.values()]


def _by_class(module: nn.Module) -> dict[type, dict[str, nn.Module]]:
    """Return the children that have weights, grouped by class."""
    groups: dict[type, dict[str, nn.Module]] = {}
    for name, child in module.named_children():
        if _has_weights(child):
            groups.setdefault(type(child), {})[name] = child
    return groups


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    return any(map(_has_weights, module.children()))


def _shapes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return names and shapes of all parameters; a lazy one has no shape yet."""
    named = module.named_parameters()
    return tuple((name, None if _compat.is_uninitialized(each) else each.shape) for name, each in named)


def _overview(model: nn.Module) -> str:
    """Describe a model's modules for an error message: each class with its count and an example name."""
    examples: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if name:
            examples.setdefault(type(module).__name__, []).append(name)
    classes = [f"{len(names)} x {kind} ({names[0]})" for kind, names in examples.items()][:12]
    return "; ".join(classes) or "no submodules"
