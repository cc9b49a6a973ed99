"""Before a model's first forward that trains: what surrounds the blocks that are compiled."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.engines.choosing import Chooser
from lowtide.engines.compilewatch import CompileWatch
from lowtide.engines.standins import stand_ins
from lowtide.engines.surrounding import surroundings_of
from lowtide.solvers.sharing import Surroundings
from lowtide.tracing.building import output_sum_loss
from lowtide.tracing.eager import trace_once

logger = logging.getLogger("lowtide")


class FirstForward:
    """A hook that looks once and then takes itself off. Copies of it, made with a model, do nothing."""

    def __init__(self, chooser: Chooser, blocks: list[nn.Module], watch: CompileWatch) -> None:
        self._chooser, self._blocks, self._watch = chooser, blocks, watch
        self._handle: Any = None

    def watch(self, model: nn.Module) -> FirstForward:
        # Before hooks that change the arguments: those run again in the trace.
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        return self

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._blocks:
            return
        self.remove()
        with self._watch.planning():
            self._chooser.surroundings = _traced(model, self._blocks, args, kwargs, self._chooser.optimizer)
        self._blocks = []

    def __deepcopy__(self, memo: Any) -> Any:
        return _look_at_nothing

    def __reduce__(self) -> Any:
        return getattr, (_look_at_nothing, "__call__")


def _look_at_nothing(model: nn.Module, args: Any, kwargs: Any) -> None:
    """What a copied or unpickled model has in place of the hook: its blocks are not compiled."""


def _traced(model: nn.Module, blocks: list[nn.Module], args: Any, kwargs: Any, optimizer: Any) -> Surroundings | None:
    """What else is on the device while blocks run, from a trace on fake tensors; None where there is none to be had."""

    hooks = _compat.hooks_of(model)

    # Named here, so that a trace knows of what hooks count or collect, and puts it back.
    def loss_fn(args: Any, kwargs: Any, hooks: Any = hooks) -> Tensor:
        return output_sum_loss(model(*args, **kwargs))

    def around(blocks_as_they_are: bool) -> Surroundings | None:
        shortened = nullcontext() if blocks_as_they_are else stand_ins(blocks)
        with torch.compiler.set_stance("force_eager"), shortened:
            graph = trace_once(model, loss_fn, args, kwargs, optimizer=optimizer)
        return surroundings_of(graph, [names[block] for block in blocks])

    names = {module: name for name, module in model.named_modules()}
    try:
        with suppress(Exception):  # blocks that differ in what only they know
            return around(blocks_as_they_are=False)
        return around(blocks_as_they_are=True)
    except Exception as error:  # whatever a model does with tensors that have no numbers: plans do without
        what = (str(error).splitlines() or [type(error).__name__])[0]
        logger.info("the model could not be traced (%s): the first peaks are guesses", what)
        return None
