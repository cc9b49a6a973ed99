"""Stand-ins for the parts of Axolotl and torchtitan that the adapters use, for machines without these packages.

They have the names, signatures and behaviour of Axolotl 0.19 and torchtitan 0.3, and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from torch import nn


class BasePlugin:
    """The hooks of an Axolotl plugin that the adapter overrides."""

    def get_input_args(self) -> str | None: ...

    def pre_model_load(self, cfg: Any) -> None: ...

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


class ActivationCheckpointing:
    """torchtitan's base class of activation checkpointing, whose nested configs build their owner."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True
        debug: bool = False

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config, self.dump_folder = config, dump_folder

    def apply(self, model: nn.Module) -> None:
        raise NotImplementedError


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    """Fields that both have are copied, others are those given or the default ones; unknown ones are an error."""
    names = {field.name for field in fields(target_cls)}
    if unknown := deltas.keys() - names:
        raise ValueError(f"unknown fields {unknown}")
    shared = {field.name: getattr(source, field.name) for field in fields(source) if field.name in names}
    return target_cls(**{**shared, **deltas})


def override(*, target: type, fqns: Any = None, description: str = "", exact: bool = False) -> Any:
    """Registers a factory under the path by which `--override.imports` names it."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        OVERRIDES[f"{function.__module__}.{function.__name__}"] = target, function
        return function

    return decorator


OVERRIDES: dict[str, Any] = {}
POLICIES: dict[str, Any] = {}


def register_memory_policy(key: str) -> Any:
    return lambda function: POLICIES.setdefault(key, function)


_PARTS: dict[str, dict[str, Any]] = {
    "axolotl.integrations.base": {"BasePlugin": BasePlugin},
    "torchtitan.config": {"derive": derive, "override": override},
    "torchtitan.distributed.activation_checkpoint": {"ActivationCheckpointing": ActivationCheckpointing},
    "torchtitan.experiments.graph_trainer.registry": {"register_memory_policy": register_memory_policy},
}


@contextmanager
def adapter(name: str) -> Iterator[Any]:
    """The adapter `lowtide.hosts.<name>`, imported on top of the stand-ins. Both are gone afterwards."""
    before = dict(sys.modules)
    for path, contents in _PARTS.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:end])] = ModuleType(".".join(parts[:end]))
        vars(sys.modules[path]).update(contents)
    sys.modules.pop(f"lowtide.hosts.{name}", None)
    try:
        yield importlib.import_module(f"lowtide.hosts.{name}")
    finally:
        for path in [path for path in sys.modules if path.split(".")[0] in ("axolotl", "torchtitan")]:
            del sys.modules[path]
        sys.modules.pop(f"lowtide.hosts.{name}", None)
        sys.modules.update({path: before[path] for path in before if path.split(".")[0] in ("axolotl", "torchtitan")})
