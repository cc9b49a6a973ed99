"""`lowtide.handle_of`: the handle on a model, for code that was not given it.

`lowtide.apply` and `lowtide.fit` return a handle and `lowtide.compile` returns the model. A trainer or a callback that
only gets the model, often wrapped by `DistributedDataParallel` or `torch.compile`, uses `handle_of` to switch the plan
off, to print it or to write a report.
"""

from __future__ import annotations

from torch import nn

from lowtide.api.compile import backend_handles, handle_on
from lowtide.compiled.compiled_handle import CompiledHandle
from lowtide.eager.handle import Applied, handle_at
from lowtide.errors import LowtideError
from lowtide.tracing import step_checks


def handle_of(model: nn.Module) -> Applied | CompiledHandle:
    """The handle that `lowtide.apply`, `lowtide.fit` or `lowtide.compile` put on a model, or on a model inside `model`.

    A model compiled by `torch.compile(backend="lowtide")` has one too, once it has run a training forward.
    `model` may be a wrapper, such as `DistributedDataParallel` or the result of `torch.compile`. Raises `LowtideError`
    if there is no handle, or more than one.

    >>> import torch, lowtide
    >>> from lowtide import handle_of
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> handle = lowtide.apply(model, lowtide.EveryN(2))
    >>> handle_of(torch.nn.ModuleList([model])) is handle
    True
    """
    step_checks.module(model)
    handles: dict[int, Applied | CompiledHandle] = {}
    paths: list[str] = []
    for path, module in model.named_modules():
        for handle in (handle_at(module), handle_on(module)):
            if handle is not None and id(handle) not in handles:
                handles[id(handle)] = handle
                paths.append(path or "the model itself")
    if not handles:
        for each in backend_handles(model):
            handles[id(each)] = each
            paths.append(f"torch.compile(backend='lowtide'), budget {each.session.budget}")
    if not handles:
        raise LowtideError(
            f"there is no handle on this {type(model).__name__}: call lowtide.fit, lowtide.apply or lowtide.compile on "
            "it first. A model compiled by torch.compile(backend='lowtide') has one after its first training forward"
        )
    if len(handles) > 1:
        raise LowtideError(
            f"there are {len(handles)} handles on this {type(model).__name__}, the first ones found at "
            f"{', '.join(paths)}: call handle_of with the part of the model that is meant"
        )
    (handle,) = handles.values()
    return handle
