"""DistributedDataParallel (DDP): its wrappers around a model, its warm-up steps, and the memory of its buckets.

A plan belongs to the module inside a DDP wrapper, so that its names are the same with and without DDP. The step that is
traced and measured is the whole one, through the wrapper.

- In its first two forwards DDP arranges its buckets, with ops of its own that later steps do not have. A trace
  therefore runs `num_warm_up_steps` first. This state is in DDP's C++ reducer and cannot be restored; it does not
  change results.
- Fake tensors cannot pass through the reducer, which holds the real parameters. In fake traces the wrapper calls its
  module directly (`bypassed`), and the bytes of its buckets are added (`bucket_bytes`).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.distributed.ranks import is_in_job

_seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_NUM_WARM_UP_STEPS = 2  # the first records the order of gradients, the second rebuilds the buckets by it


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The DDP wrappers around a model, around parts of it, and around a model that it is a part of.

    They are looked up among all objects of the process: a wrapper is not reachable from the module inside it, and
    `loss_fn` may hold it anywhere. Wrappers that `gc.freeze()` hides are found if a call before it has found them.
    """
    if not is_in_job():
        return []
    _seen.update(item for item in gc.get_objects() if type(item) is DistributedDataParallel)
    parts = set(model.modules())
    return [wrapper for wrapper in _seen if not parts.isdisjoint(wrapper.module.modules())]


def remember(model: nn.Module) -> None:
    """Let `wrappers_of` find a model that was given to lowtide, if it is a wrapper that the user has frozen."""
    if type(model) is DistributedDataParallel:
        _seen.add(model)


def num_warm_up_steps(wrappers: list[DistributedDataParallel]) -> int:
    """Return the number of steps to run before DDP runs the same ops in every step."""
    return _NUM_WARM_UP_STEPS if wrappers else 0


def gradients_in_buckets(wrappers: list[DistributedDataParallel]) -> list[nn.Parameter]:
    """The parameters whose gradients are views of buckets: that memory exists before the backward."""
    return _trainable([wrapper for wrapper in wrappers if wrapper.gradient_as_bucket_view])


def bucket_bytes(wrappers: list[DistributedDataParallel]) -> int:
    """Bytes of buckets that exist beside gradients: as many as the gradients have, unless these are views of them."""
    copying = [wrapper for wrapper in wrappers if not wrapper.gradient_as_bucket_view]
    return sum(parameter.nbytes for parameter in _trainable(copying))


def _trainable(wrappers: list[DistributedDataParallel]) -> list[nn.Parameter]:
    parameters = (parameter for wrapper in wrappers for parameter in wrapper.module.parameters())
    return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))


@contextlib.contextmanager
def bypassed(wrappers: list[DistributedDataParallel]) -> Iterator[None]:
    """A context in which the wrappers only call their modules, without collectives."""
    for wrapper in wrappers:
        vars(wrapper)["forward"] = wrapper.module
    try:
        yield
    finally:
        for wrapper in wrappers:
            vars(wrapper).pop("forward", None)
