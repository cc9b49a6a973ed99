"""`compile`: a model compiled within a budget."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.compiled.backend import SESSIONS, check_options, inductor_compiler, planned_graph
from lowtide.compiled.other_memory import FirstForward
from lowtide.compiled.session import NOTHING_YET, Session
from lowtide.compiled.variant_choice import VariantChooser
from lowtide.errors import LowtideError
from lowtide.tracing import step_checks as checks
from lowtide.tracing.model_blocks import find_regions, is_block
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import check_bytes, parse_bytes

_by_model: weakref.WeakKeyDictionary[nn.Module, CompiledModel] = weakref.WeakKeyDictionary()


def compile(
    model: nn.Module,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    regional: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Compile a model in place, by inductor, so that a training step's peak stays within `budget` bytes.

    With `regional=True`, the default where blocks repeat, each repeated block is a graph of its own: compiled once for
    all of them, as fast as the whole and far sooner. The rest of the model then runs as it is, and up to `host` bytes
    of what blocks save may wait in host memory, copied out and in beside the compute. `mode`, `dynamic`,
    `fullgraph` and `options` are those of `torch.compile`.

    The first forward plans; a step later the measured peak is looked at (on an accelerator, where torch's peak
    statistics are reset for it), and where it is over the budget, or well under it, other variants are compiled.
    A model that was compiled so before is compiled anew.
    """
    checks.module(model)
    check_bytes(budget)  # what cannot be read is an error now, not in the first forward
    check_options({} if options is None else options, own=())
    optimizer = plain_optimizer(optimizer, model)
    blocks = _blocks(model, regional)
    host_bytes = _host_bytes(host, blocks)
    chooser = VariantChooser(optimizer, host_bytes, model_bytes=_tensor_bytes(model))
    session = Session(budget, chooser=chooser, num_blocks=max(1, len(blocks)))
    run = functools.partial(planned_graph, session, inductor_compiler(options or {}, mode, dynamic))
    if model in _by_model:
        _by_model.pop(model).take_off()
    for module in blocks or [model]:
        _compat.compile_module(module, backend=run, dynamic=dynamic, fullgraph=fullgraph)
    first = FirstForward(chooser, blocks, session.watch).attach(model) if blocks else None
    _by_model[model] = CompiledModel(session, blocks or [model], first)
    SESSIONS.add(session)
    return model


def explain_compiled(model: nn.Module | None = None) -> str:
    """In words, what the compiled graphs of a model save and what that costs; of all models without one."""
    found = sorted(SESSIONS, key=lambda session: session.number)
    if model is not None and model in _by_model:
        found = [_by_model[model].session]
    elif model is not None:
        parameters = list(model.parameters())
        found = [each for each in found if any(graph.has_run_with(parameters) for graph in each.graphs)]
    return "\n\n".join(session.describe() for session in found) or NOTHING_YET


class CompiledModel:
    """What `compile` put on a model, without holding on to it."""

    def __init__(self, session: Session, modules: list[nn.Module], first: FirstForward | None) -> None:
        self.session = session
        self._compiled = [weakref.ref(module) for module in modules]
        self._first = first

    def take_off(self) -> None:
        for module in filter(None, (reference() for reference in self._compiled)):
            _compat.uncompile(module)
        if self._first is not None:
            self._first.remove()
        SESSIONS.discard(self.session)


def _blocks(model: nn.Module, regional: bool | None) -> list[nn.Module]:
    if regional is False:
        return []
    try:
        found = [module for module in find_regions(model, None).values() if is_block(module)]
    except ValueError:
        found = []
    if regional and not found:
        raise ValueError(
            f"regional=True compiles repeated blocks, and {type(model).__name__} has none. Leave it out, or compile "
            "the whole model with regional=False"
        )
    return found if regional or len(found) > 1 else []  # a single block is compiled with the rest of the model


def _host_bytes(host: int | str, blocks: list[nn.Module]) -> int:
    found = parse_bytes(host)
    if found and not torch.cuda.is_available():
        raise LowtideError(f"host={host!r} was given, and there is no accelerator here to move values from")
    if found and not blocks:
        raise LowtideError(
            "host= needs blocks that are compiled one by one (regional=True): what one whole graph saves is only "
            "handed out when its forward has ended, too late to be away at the peak"
        )
    return found


def _tensor_bytes(model: nn.Module) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum(tensor.nbytes for tensor in {id(each): each for each in tensors}.values())
