"""`nn.Module` and `torch.optim`: parameters, children and hooks, in the private attributes that hold them.

Replays, snapshots and fake traces read and replace a module's tensors; a trace for larger inputs runs a copy of the
model (`module_replica`). Hooks are looked up where they decide whether a module can be split, or which state a trace
must restore.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lowtide._compat.internals import optional, required

# Hooks of all modules, which torch changes in place.
_backward_hooks = optional("torch.nn.modules.module._global_backward_hooks", {})
_backward_pre_hooks = optional("torch.nn.modules.module._global_backward_pre_hooks", {})
_forward_hooks_with_kwargs = optional("torch.nn.modules.module._global_forward_hooks_with_kwargs", {})


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts in which a module holds its own parameters and buffers. Obsolete with public access to them."""
    return module._parameters, module._buffers


def submodules(module: nn.Module) -> list[nn.Module]:
    """List `module` and all below it, each once. Obsolete when `module.modules()`, which builds names, is as fast."""
    seen, modules = {id(module)}, [module]
    for parent in modules:  # grows
        for child in parent._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def child_modules(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module holds its children. Obsolete with public access to it."""
    return module._modules  # type: ignore[return-value]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run around the module's forward. Obsolete with a public function that lists them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether hooks wait for the gradient of the module's output. Obsolete like `has_forward_hooks`."""
    return bool(module._backward_pre_hooks or module._backward_hooks or _backward_pre_hooks or _backward_hooks)


def child_name(parent: nn.Module, child: nn.Module) -> str | None:
    """Return the name under which `parent` holds `child`, or None. Obsolete like `child_modules`."""
    return next((name for name, module in parent._modules.items() if module is child), None)


def module_replica(module: nn.Module, replicas: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """Return a copy of a module with the same attributes and with dicts of parameters, buffers and children of its own.

    `tensors` maps the id of a tensor of the original to its replacement; `replicas` holds the copies made so far.
    DataParallel makes replicas in the same way; obsolete with a public function for it.
    """
    if module not in replicas:
        replicas[module] = replica = object.__new__(type(module))
        vars(replica).update(vars(module))
        for slots in ("_parameters", "_buffers"):
            own = {name: tensors.get(id(tensor), tensor) for name, tensor in vars(module)[slots].items()}
            vars(replica)[slots] = own
        children = vars(module)["_modules"].items()
        vars(replica)["_modules"] = {
            name: None if child is None else module_replica(child, replicas, tensors) for name, child in children
        }
    return replicas[module]


_MOST_NESTED = 8  # decorators around one forward; references further in are left as they are


def rebound(item: Any, replicas: Mapping[nn.Module, nn.Module], depth: int = _MOST_NESTED) -> Any:
    """Return a callable in which references to modules are replaced by references to their replicas.

    Follows bound methods, `functools.partial`, closures and attributes of callable objects, which is how a host's
    decorators hold the forward that they wrap. Returns the same object if it refers to none of the modules. Obsolete
    when hosts no longer set `forward` on instances.
    """
    if isinstance(item, nn.Module):
        return replicas.get(item, item)
    if depth == 0 or isinstance(item, type) or not callable(item):
        return item
    again = functools.partial(rebound, replicas=replicas, depth=depth - 1)
    if isinstance(item, types.MethodType):
        function, owner = again(item.__func__), again(item.__self__)
        return item if function is item.__func__ and owner is item.__self__ else types.MethodType(function, owner)
    if isinstance(item, functools.partial):
        parts = (item.func, *item.args, *item.keywords.values())
        others = [again(part) for part in parts]
        if all(one is other for one, other in zip(parts, others, strict=True)):
            return item
        end = 1 + len(item.args)
        return functools.partial(others[0], *others[1:end], **dict(zip(item.keywords, others[end:], strict=True)))
    if isinstance(item, types.FunctionType):
        return _rebound_function(item, again)
    attributes = getattr(item, "__dict__", {})
    others_by_name = {name: again(value) for name, value in attributes.items()}
    if all(others_by_name[name] is value for name, value in attributes.items()):
        return item
    copied = object.__new__(type(item))  # not copy.copy: accelerate's wrapper refuses to be pickled
    vars(copied).update(others_by_name)
    return copied


def _rebound_function(function: types.FunctionType, again: Callable[[Any], Any]) -> Any:
    closure = tuple(_rebound_cell(cell, again) for cell in function.__closure__ or ())
    if all(one is other for one, other in zip(function.__closure__ or (), closure, strict=True)):
        return function
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update(vars(function))
    return copied


def _rebound_cell(cell: types.CellType, again: Callable[[Any], Any]) -> types.CellType:
    try:
        contents = cell.cell_contents
    except ValueError:  # an empty cell
        return cell
    other = again(contents)
    return cell if other is contents else types.CellType(other)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile's wrapper. Obsolete with a public name for what that wraps."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := vars(model).get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def module_hooks(model: nn.Module) -> list[Any]:
    """List the hooks on a model's modules. Obsolete with a public function for it."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]


# Names of the methods that run a whole module. Obsolete when `nn.Module` has no private ones among them.
WHOLE_MODULE_METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


def companion_of(module: nn.Module) -> Any:
    """Return the object that `set_companion` attached to a module, or None. Obsolete likewise."""
    return getattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, None)


def set_companion(module: nn.Module, companion: Any) -> None:
    """Attach an object to a module for as long as the module lives, as an attribute of one of its hook dicts.

    It is not an attribute of the module, as users see, copy and compare those. Obsolete with ephemerons in Python.
    """
    with contextlib.suppress(AttributeError):  # a ScriptModule: callers then compute the object for each call
        setattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, companion)


_COMPANION = "lowtide_companion"


def remove_global_hook(handle: Any) -> None:
    """Remove a hook that was registered for all modules.

    `handle.remove()` of torch 2.13 leaves an entry in one of its dicts, and `torch.compile` then warns of hooks.
    Obsolete when that is fixed.
    """
    handle.remove()
    _forward_hooks_with_kwargs.pop(handle.id, None)


def uses_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    """Return whether an optimizer updates all `parameters` of a group at once. Obsolete with a documented default."""
    if group.get("fused") or group.get("foreach") is not None:
        return not group.get("fused") and bool(group["foreach"])
    default_rule = required(
        "torch.optim.optimizer._default_to_fused_or_foreach", "the memory of optimizer steps cannot be predicted"
    )
    return default_rule(parameters, group.get("differentiable", False), use_fused=False)[1]
