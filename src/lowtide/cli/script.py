"""`load("train.py:make")`: import a user's script, call its function, and check the model, loss and batch it returns.

The script is imported with its own folder on `sys.path` and an `argv` without arguments, as `python train.py` would
have them. Whatever is wrong (no such file or function, wrong return value) raises `UsageError` with a suggestion.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.cli.output import UsageError, did_you_mean

_FUNCTION = "make"
GIVES = "(model, loss_fn, batch), with an optimizer after them if there is one, or a dict with these names"
_NAMES = ("model", "loss_fn", "batch", "optimizer")


@dataclass(frozen=True)
class Job:
    """One training step: `loss_fn(*args)` is the loss of `model`."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    optimizer: torch.optim.Optimizer | None

    def trace(self, *, fake: bool = False, device: str | None = None) -> lowtide.StepGraph:
        return lowtide.trace(
            self.model,
            self.loss_fn,
            *self.args,
            optimizer=self.optimizer,
            mode="fake" if fake else "auto",
            device=device,
        )


def load(target: str) -> Job:
    """Return the job of `path/to/train.py:function` or `package.module:function`; the default function is `make`."""
    path, name = _split(target)
    function, where = load_function(target, most=0), f"{name}() in {path}"
    with _argv(path), _no_exit(where):
        found = function()
    return _job(found, where)


def load_function(target: str, *, most: int = 1) -> Callable[..., Any]:
    """Return the function of a target. It may need `most` arguments: one, the mesh, if its job is made for a mesh."""
    path, name = _split(target)
    with _argv(path):
        module = _import_file(Path(path)) if path.endswith(".py") else _import_module(path)
    return _function(module, name, path, most)


def _split(target: str) -> tuple[str, str]:
    path, colon, function = target.rpartition(":")
    if not colon or "/" in function or "\\" in function:  # no function given; the colon may belong to a drive (C:\\)
        return target, _FUNCTION
    return path, function or _FUNCTION


@contextmanager
def _argv(path: str) -> Iterator[None]:
    """A context in which `sys.argv` is that of a script started without arguments."""
    before, sys.argv = sys.argv, [path]
    try:
        yield
    finally:
        sys.argv = before


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        scripts = sorted(found.name for found in folder.glob("*.py") if found.is_file())
        near = did_you_mean(path.name, scripts)
        listed = f" {folder.resolve()} has {', '.join(scripts[:8])}." if scripts and not near else ""
        raise UsageError(f"there is no file {path}.{near}{listed}")
    if (own := str(path.resolve().parent)) != sys.path[0]:
        sys.path.insert(0, own)
    # Imported under its own name, so that its classes can be pickled; unless another module has that name.
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"lowtide_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _no_exit(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if not all(name.split(".")):  # nothing, or a folder such as `.`
        raise UsageError(f"{name!r} names no script. Name it and a function in it like train.py:make.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _no_exit(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and one that it imports does not
        hint = f"Did you mean '{name}.py'?" if Path(f"{name}.py").is_file() else "Name it like train.py:make."
        raise UsageError(f"there is no file or module {name}. {hint}") from None


@contextmanager
def _no_exit(where: str) -> Iterator[None]:
    """A context that turns `SystemExit` into an error, so that a script cannot end the command silently."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"{where} called sys.exit({error.code}) while it was loaded: "
            'put code that only a run needs under `if __name__ == "__main__":`'
        ) from error


def _function(module: ModuleType, name: str, path: str, most: int) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        own = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        own = [key for key in own if getattr(vars(module)[key], "__module__", None) == module.__name__]
        listed = f" It has {', '.join(own[:8])}." if own else ""
        raise UsageError(
            f"{path} has no function {name!r}.{did_you_mean(name, own)}{listed} "
            f"It should take no arguments and return {GIVES}."
        )
    if not callable(found):
        raise UsageError(f"{name} in {path} is a {type(found).__name__}, not a function that returns {GIVES}")
    needed = [
        p.name for p in _parameters(found) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > most:
        given = "with the mesh" if most else "without arguments"
        raise UsageError(f"{name}() in {path} needs {', '.join(needed)}: lowtide calls it {given}")
    return found


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
        return ()


def _job(found: Any, where: str) -> Job:
    if isinstance(found, dict):
        unknown = [key for key in found if key not in _NAMES]
        missing = [key for key in _NAMES[:3] if key not in found]
        if unknown or missing:
            near = did_you_mean(str(unknown[0]), _NAMES) if unknown else ""
            wrong = [f"has the unknown {key!r}" for key in unknown[:1]] + [f"lacks {key!r}" for key in missing[:1]]
            raise UsageError(
                f"the dict from {where} {' and '.join(wrong)}.{near} Its keys should be {', '.join(_NAMES[:3])} and, "
                f"if there is one, {_NAMES[3]}."
            )
        model, loss_fn, batch, optimizer = (found.get(key) for key in _NAMES)
    elif isinstance(found, (tuple, list)) and len(found) in (3, 4):
        model, loss_fn, batch, optimizer = (*found, None)[:4]
    else:
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        raise UsageError(f"{where} returned a {type(found).__name__}{size}; it should return {GIVES}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model from {where} is a {type(model).__name__}, not an nn.Module; it should return {GIVES}"
        )
    if not callable(loss_fn):
        raise UsageError(f"the loss_fn from {where} is a {type(loss_fn).__name__}, not a function of the batch")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer from {where} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return Job(model, loss_fn, batch if isinstance(batch, tuple) else (batch,), optimizer)
