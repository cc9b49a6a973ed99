"""Hugging Face's key/value cache, off while a model is traced or trained under a plan.

With `config.use_cache` at its default, every forward makes a cache, and each layer appends to it. No layer could be
recomputed, as it would append once more. A training step has no use for the cache, so Hugging Face's own gradient
checkpointing and its Trainer switch it off; so does lowtide, by the same switch. `use_cache=True` given to the model
itself overrides the switch, as always; layers are then left out of plans (`StepGraph.unreplayable`). `generate()` gives
it by itself.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

logger = logging.getLogger("lowtide")

NOTE = "use_cache is off in this step, as in training under a plan: layers that append to a cache cannot be recomputed"

_said: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CacheOff:
    """Switches `use_cache` off in the configurations of a model and of its parts, until `restore()`."""

    hidden_from_replay = True

    def __init__(self, model: nn.Module) -> None:
        configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
        self._configs: list[Any] = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
        self.was_on = bool(self._configs)
        for config in self._configs:
            config.use_cache = False

    def say_once(self, model: nn.Module) -> None:
        """Log that the cache is off; once for each model."""
        if self.was_on and model not in _said:
            _said.add(model)
            logger.warning(
                "%s: use_cache is switched off until handle.remove(), as by Hugging Face's gradient checkpointing: "
                "layers that append to a cache cannot be recomputed. Pass use_cache=True to the model to keep it on.",
                type(model).__name__,
            )

    def restore(self) -> None:
        """Switch it on again where it was."""
        for config in self._configs:
            config.use_cache = True
        self._configs = []

    def __enter__(self) -> CacheOff:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
