"""Canaries for `_compat/modules.py`: parameters, children and hooks are in the attributes that are read there."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn

from lowtide._compat import modules


def test_slots_of_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters, buffers = modules.module_tensors(model[1])
    assert list(parameters) == ["weight", "bias"] and "running_mean" in buffers, "nn.Module._parameters changed"
    assert modules.submodules(model) == list(model.modules()), "nn.Module._modules changed"
    assert modules.child_modules(model)["0"] is model[0] and modules.child_name(model, model[1]) == "1"
    other = torch.zeros(2, 2)
    replica = modules.module_replica(model, {}, {id(model[0].weight): other})
    assert replica[0].weight is other and model[0].weight is not other, "replicas share the slots of their originals"


def test_hooks_are_listed() -> None:
    model = nn.Linear(2, 2)
    assert not modules.has_forward_hooks(model) and modules.module_hooks(model) == []
    model.register_forward_hook(lambda *_: None)
    assert modules.has_forward_hooks(model) and len(modules.module_hooks(model)) == 1, "_forward_hooks changed"
    for register in (
        model.register_full_backward_hook,
        model.register_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        assert not modules.has_backward_hooks(model)
        handle = register(lambda *_: None)
        assert modules.has_backward_hooks(model), f"{register.__name__} registers elsewhere"
        handle.remove()
    for name in modules.WHOLE_MODULE_METHODS:
        assert callable(getattr(model, name)), f"nn.Module.{name} is gone: calls of it are not taken for the module's"


def test_companions_live_with_their_module() -> None:
    model = nn.Linear(2, 2)
    assert modules.companion_of(model) is None
    modules.set_companion(model, companion := object())
    assert modules.companion_of(model) is companion, "_state_dict_pre_hooks takes no attributes any more"
    assert list(vars(model)) == list(vars(copy.deepcopy(model)))


def test_global_hooks_leave_nothing_behind() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_, **__: None, with_kwargs=True)
    modules.remove_global_hook(handle)
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_hooks_with_kwargs


def test_hooks_and_rules_of_optimizers() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert any(name.endswith("_hooks") for name in vars(optimizer)), "optimizers hold their hooks elsewhere"
    rule = modules.uses_foreach
    assert rule({"foreach": True}, [parameter]) and not rule({"fused": True}, [parameter])
    assert rule({"foreach": None}, [parameter]) is False, "optimizers use foreach on the CPU now"


def test_wrappers_are_seen_through() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert modules.unwrapped(compiled) is model, "torch.compile keeps the module under another name"
    assert modules.unwrapped(model) is model


def test_a_forward_on_the_instance_is_bound_to_the_replica() -> None:
    """As hosts nest them: a callable object around an autocast decorator around a function that holds the old one."""
    model = nn.Linear(2, 2)
    original = model.forward

    def forward(self: nn.Module, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return original(x) * scale + 0 * self.weight.sum()

    class Wrapper:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        def __getstate__(self) -> Any:
            raise TypeError("not pickled")

    wrapper = Wrapper(torch.autocast("cpu", enabled=False)(forward))
    model.forward = types.MethodType(functools.partial(wrapper), model)
    replicas: dict[nn.Module, nn.Module] = {}
    replica = modules.module_replica(model, replicas, {id(model.weight): nn.Parameter(torch.ones(2, 2))})
    rebound = modules.rebound(model.forward, replicas)
    replica.bias = nn.Parameter(torch.zeros(2))
    assert torch.equal(rebound(torch.ones(1, 2), scale=2.0), torch.full((1, 2), 4.0))
    assert modules.rebound(len, replicas) is len and wrapper.function is not rebound.__func__
