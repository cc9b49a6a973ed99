"""Integrations with training frameworks: one module per framework, with one line for the user to add.

    trainer = transformers.Trainer(..., callbacks=[lowtide.hosts.transformers.Budget("20GiB")])

A module is imported when it is first used, so that `import lowtide` needs none of the frameworks and stays light. The
modules use public names of lowtide only. `planning` holds what they share: the base class of callbacks, example
batches from a data loader, gradients that accumulation keeps, and the files and metrics of a fitted plan. ("Host"
means the framework in this package, and the CPU everywhere else.)
"""

from __future__ import annotations

import importlib
from types import ModuleType

# Modules, each named as the package that it needs.
_PACKAGES = ("accelerate", "axolotl", "diffusers", "lightning", "torchtitan", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _PACKAGES:
        raise AttributeError(f"lowtide.hosts has {', '.join(_PACKAGES)}, not {name!r}")
    try:
        return importlib.import_module(f"lowtide.hosts.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in (*_PACKAGES, "pytorch_lightning"):
            raise ModuleNotFoundError(
                f"lowtide.hosts.{name} needs {error.name}, which is not installed: pip install {error.name}",
                name=error.name,
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(_PACKAGES)
