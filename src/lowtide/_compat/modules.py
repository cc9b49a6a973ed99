"""What `nn.Module` and `torch.optim` keep in private attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, as the dicts it reads them from. Obsolete with a public slot API."""
    return module._parameters, module._buffers


def submodules(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, each once; several times faster than `module.modules()`, which builds names."""
    found, index = {id(module): module}, [module]
    for parent in index:
        for child in parent._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                index.append(child)
    return index


def child_modules(module: nn.Module) -> dict[str, Any]:
    """The module's children, as the dict it reads them from. Obsolete with a public slot API."""
    return module._modules  # type: ignore[return-value]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the module's forward. Obsolete with a public way to list them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def child_name(parent: nn.Module, child: nn.Module) -> str | None:
    """The name under which `parent` holds `child`, if it does."""
    return next((name for name, module in parent._modules.items() if module is child), None)


def module_replica(module: nn.Module, twins: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """A module with the same attributes whose slots for parameters, buffers and modules are its own.

    `tensors` are the tensors that go into the slots, by the id of those in the original. This is how DataParallel makes
    replicas; obsolete with a public way to.
    """
    if module not in twins:
        twins[module] = twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        for slots in ("_parameters", "_buffers"):
            own = {name: tensors.get(id(tensor), tensor) for name, tensor in vars(module)[slots].items()}
            vars(twin)[slots] = own
        children = vars(module)["_modules"].items()
        vars(twin)["_modules"] = {
            name: None if child is None else module_replica(child, twins, tensors) for name, child in children
        }
    return twins[module]


def module_hooks(model: nn.Module) -> list[Any]:
    """The hooks on a model's modules. Obsolete with a public way to list them."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]


# A bound method of a module with one of these names runs the whole module. Obsolete with a public way to ask.
WHOLE_MODULE_METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


def companion_of(module: nn.Module) -> Any:
    """What `set_companion` has given to a module, else None."""
    return getattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, None)


def set_companion(module: nn.Module, companion: Any) -> None:
    """Let an object belong to a module and live as long, out of sight: it is an attribute of one of its hook dicts.

    The module's own attributes are its user's. Obsolete with ephemerons in Python, or a public slot on modules.
    """
    with contextlib.suppress(AttributeError):  # a ScriptModule: what it holds is found anew for each call
        setattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, companion)


_COMPANION = "lowtide_companion"


def remove_global_hook(handle: Any) -> None:
    """Take off a hook of all modules. torch 2.13 forgets one of its books, and `torch.compile` then warns of hooks."""
    handle.remove()
    nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def holds_hooks(name: str) -> bool:
    """Whether the attribute of that name of an optimizer holds its hooks. Obsolete with a public way to list them."""
    return name.endswith("_hooks")


def foreach_rule() -> Callable[[dict[str, Any], list[Tensor]], bool]:
    """Whether an optimizer updates all parameters of a group at once. Obsolete when torch.optim says so publicly."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    def uses_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
        if group.get("fused"):
            return False
        if group.get("foreach") is not None:
            return bool(group["foreach"])
        return _default_to_fused_or_foreach(parameters, group.get("differentiable", False), use_fused=False)[1]

    return uses_foreach
