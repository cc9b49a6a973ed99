"""What the integrations share: the options and base class of callbacks, example batches, files and metrics.

`BudgetOptions.fit` calls `lowtide.fit` when a training begins; `BudgetCallback` is the base class of callbacks. The
plan is made from batches of the framework's own data loader. Reading them must not change the training that follows,
so random states are restored (`undisturbed`), and a data set that can be read only once is refused. `Examples` picks
the batches: the first one, the largest of several (`probe=`), or one that the user describes (`largest=`). Batches
that are larger still are planned for when they appear, as always under `lowtide.fit`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lowtide
from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.units import check_bytes, check_seconds, format_bytes

FOLDER = "lowtide"  # inside the host's output folder
REPORT_S = 2.0  # for the curve of the report, at the start of each training
_MOST_EXAMPLES = 4  # traced on fake tensors each: more of them seldom change which one has the highest peak
_MOST_NESTED = 8  # attributes of attributes of a data loader in which random generators are looked for
_MOST_PARTS = 4096  # objects that are looked at per level, so that a large object takes no time
_LONG = 64  # items of a list that is taken for data
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


@dataclass(frozen=True)
class Examples:
    """Which batches a plan is made for.

    `largest` is a length that batches reach, or a function that makes the largest batch as the data loader would.
    `probe` is a number of batches to read, of which the largest are planned for. With neither, it is the first batch.
    """

    largest: int | Callable[[], Any] | None = None
    probe: int = 0

    def __post_init__(self) -> None:
        is_length = type(self.largest) is int and self.largest > 0
        if not (is_length or self.largest is None or callable(self.largest)):
            raise TypeError(
                "largest is a length that batches reach, such as 4096, or a function that makes the largest batch, not "
                f"{self.largest!r:.80}"
            )
        if not isinstance(self.probe, int) or isinstance(self.probe, bool) or self.probe < 0:
            raise ValueError(f"probe is a number of batches to look at, such as 64, not {self.probe!r:.80}")
        if callable(self.largest) and self.probe:
            raise ValueError("largest= makes the batch to plan for, and probe= looks for it: leave one of them out")

    def of(self, loader: Iterable[Any]) -> list[Any]:
        """The batches of `loader` to plan for, the largest first. Random states are as before."""
        with undisturbed(loader):
            if callable(self.largest):
                made = self.largest()
                if not tensors_of(made):
                    raise LowtideError(
                        f"largest= made {made!r:.80}, which has no tensor: let it return the largest batch as the data "
                        "loader would"
                    )
                return [made]
            batches = list(islice(_readable(loader), max(1, self.probe)))
        if not batches:
            raise LowtideError("the data loader gave no batch to plan for: is the data set empty?")
        chosen = largest_of(batches)
        return [lengthened(chosen[0], self.largest)] if isinstance(self.largest, int) else chosen

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which an error of a step on the batch of `largest=` says where that batch comes from."""
        try:
            yield
        except (LowtideError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.largest is None:
                raise
            made = "that largest= made" if callable(self.largest) else f"lengthened to largest={self.largest}"
            raise LowtideError(
                f"the training step fails on a batch {made}: {type(error).__name__}: {error}\nlargest= is a length "
                "that the model takes, or a function that makes a batch as the data loader does."
            ) from error


class BudgetOptions:
    """The options of a plan that a host makes when training begins.

    `budget` is in bytes, for the whole step. `largest` is a length that batches will reach, or a function that makes
    the largest batch; `probe` is a number of batches to read at the start, of which the largest are planned for. With
    neither, the first batch is planned for, and larger ones when they appear. The others are those of `lowtide.fit`.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        largest: int | Callable[[], Any] | None = None,
        probe: int = 0,
        host: int | str = 0,
        lossy: Any = None,
        split: bool = False,
        tune_s: float = 10.0,
        time_limit_s: float = 10.0,
    ) -> None:
        check_bytes(budget)
        check_bytes(host)
        check_seconds(tune_s, "tune_s", may_be_0=True)
        check_seconds(time_limit_s, "time_limit_s")
        self.budget, self.examples = budget, Examples(largest, probe)
        self._options: dict[str, Any] = {"host": host, "lossy": lossy, "split": split}
        self._options |= {"tune_s": tune_s, "time_limit_s": time_limit_s}

    def fit(
        self,
        model: nn.Module,
        step: Callable[..., Tensor],
        batches: list[tuple[Any, ...]],
        optimizer: Any,
        folder: Path | None,
        num_processes: int,
        num_backwards: int,
    ) -> Any:
        """`lowtide.fit` for a training that begins, with `num_backwards` in each update of the parameters.

        The plan is remembered in `folder`, except with several processes, which have to run the same steps.
        """
        cache = None
        if folder is not None and num_processes == 1:
            folder.mkdir(parents=True, exist_ok=True)
            cache = folder / "fit.json"
        first, *others = batches
        with accumulating(model, num_backwards), self.examples.explained():
            options = {"budget": self.budget, "optimizer": optimizer, "cache": cache, **self._options}
            handle = lowtide.fit(model, step, *first, more_batches=others, **options)
        handle.see_inputs()
        return handle


class BudgetCallback(BudgetOptions):
    """A callback that plans when training begins; `handle` is the handle of its plan while training, and after it."""

    handle: Any = None

    def fit(self, *args: Any, **options: Any) -> Any:
        """As `BudgetOptions.fit`; the plan is removed when training ends, or when another one begins."""
        self.handle = super().fit(*args, **options)
        _OF_CALLBACKS.add(self.handle)
        return self.handle

    def _remove_plan(self) -> None:
        if self.handle is not None and not self.handle.is_removed:
            self.handle.remove()

    def _remove_all_plans(self, model: nn.Module) -> None:
        """Remove the plan of an earlier training, also one that another callback left when its training failed."""
        self._remove_plan()
        with contextlib.suppress(LowtideError):  # no plan, which is usual
            handle = lowtide.handle_of(model)
            if handle in _OF_CALLBACKS:
                handle.remove()


_OF_CALLBACKS: weakref.WeakSet[Any] = weakref.WeakSet()  # handles, which a host may leave on a model after an error


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of one object have these values, in place of its own or its class's."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a host's logging functions while a plan is made."""


def largest_of(batches: list[Any]) -> list[Any]:
    """The batches that no other one covers in every dimension, the one with the most elements first; at most four."""
    by_size = sorted(batches, key=lambda batch: -sum(tensor.numel() for tensor in tensors_of(batch)))
    chosen: list[Any] = []
    for batch in by_size:
        if not any(_covers(other, batch) for other in chosen):
            chosen.append(batch)
    return chosen[:_MOST_EXAMPLES]


def _covers(planned: Any, seen: Any) -> bool:
    ones, others = tensors_of(planned), tensors_of(seen)
    return len(ones) == len(others) and all(
        one.ndim == other.ndim and all(have >= size for have, size in zip(one.shape, other.shape, strict=True))
        for one, other in zip(ones, others, strict=True)
    )


def lengthened(batch: Any, length: int) -> Any:
    """A batch in which the second dimension, the one of a sequence, is `length` long: its values are repeated.

    >>> lengthened({"input_ids": torch.tensor([[5, 6, 7]])}, 5)
    {'input_ids': tensor([[5, 6, 7, 5, 6]])}
    """
    longest = max((tensor.shape[1] for tensor in tensors_of(batch) if tensor.ndim > 1), default=0)
    if not longest:
        raise LowtideError(
            "largest= is a length, and no tensor of the batch has a second dimension to lengthen: give a function that "
            "makes the largest batch"
        )

    def repeated(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != longest:
            return tensor
        return torch.cat([tensor] * -(-length // longest), dim=1)[:, :length].contiguous()

    return batch if length <= longest else mapped(repeated, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch of nested mappings and sequences, in order."""
    found: list[Tensor] = []
    mapped(found.append, batch)
    return found


def mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """A batch with `function` applied to its tensors; containers are new, other items the same."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: mapped(function, value) for key, value in batch.items()}
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(function, item) for item in batch)
    return batch


def held(batch: Any, num: int) -> list[Any]:
    """Batches that a host holds on the device beside `batch`: `num` copies of it. On the CPU it is one more.

    They are passed to the step that is planned for, which leaves them alone, as arguments count. accelerate's data
    loaders read one batch ahead, into host memory, which is the memory that is planned for if the device is the CPU.
    """
    return [mapped(torch.clone, batch) for _ in range(num + _is_on_host(batch))]


def _is_on_host(batch: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_of(batch))


def check_reading(handle: Any, batch: Any, num: int) -> None:
    """Raise `InfeasibleBudgetError` if `num` batches, which a host holds while it reads the next, are too many.

    No activations or gradients exist then, so no plan makes a difference. On the CPU it is one more, as in `held`.
    """
    plan, num = handle.plan, num + _is_on_host(batch)
    static = sum(size for kind, size in plan.graph.static_bytes.items() if kind not in ("gradients", "batch"))
    size = sum(tensor.nbytes for tensor in tensors_of(batch))
    if plan.budget_bytes and static + num * size > plan.budget_bytes:
        raise InfeasibleBudgetError(
            f"while the trainer reads the batches of the next update, it holds {num} batches of {format_bytes(size)}, "
            f"and {format_bytes(static)} of parameters and optimizer state: more than the budget of "
            f"{format_bytes(plan.budget_bytes)}\nRaise the budget, or make gradient_accumulation_steps or the batch "
            "smaller.",
            static + num * size,
        )


def _readable(loader: Iterable[Any]) -> Iterable[Any]:
    """The iterable to read example batches from. Raises if reading would take them away from the training."""
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's own iterator counts its batches
    data = getattr(loader, "dataset", loader)
    is_stream = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if is_stream and iter(data) is iter(data):
        raise LowtideError(
            f"{type(data).__name__} can be read only once, so that a batch to plan for would be missing from the "
            "training: give largest=, a function that makes the largest batch"
        )
    return fresh(loader)


def fresh(loader: Any) -> Any:
    """A data loader with workers of its own: persistent ones belong to one iterator, which the training uses."""
    copied = copy.copy(loader) if isinstance(loader, DataLoader) else loader
    if copied is not loader:
        vars(copied)["persistent_workers"] = False  # a DataLoader refuses to have it set, as it may have an iterator
    return copied


@contextlib.contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """A context after which random states, also of generators that the loader or its data set owns, are as before."""
    put_back = [_state_of(generator) for generator in (random, numpy.random, *_generators(loader))]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for put in put_back:
            put()


def _generators(loader: Any) -> list[Any]:
    """The random generators in the attributes of a data loader, of its samplers, data set and transforms."""
    seen: dict[int, Any] = {}
    level = [loader]
    for _ in range(_MOST_NESTED):
        level = [item for item in level if id(item) not in seen][:_MOST_PARTS]
        seen |= {id(item): item for item in level}
        level = [part for item in level for part in _parts(item)]
    return [item for item in seen.values() if isinstance(item, _GENERATORS)]


def _parts(item: Any) -> list[Any]:
    """The objects that an object, or a short list, tuple or dict, refers to."""
    if isinstance(item, dict | list | tuple):
        parts = [] if len(item) > _LONG else list(item.values() if isinstance(item, dict) else item)
    else:
        is_other = isinstance(item, Tensor | nn.Module | type | ModuleType)
        parts = [] if is_other else [*getattr(item, "__dict__", {}).values(), getattr(item, "__self__", None)]
    return [part for part in parts if isinstance(part, (*_GENERATORS, dict, list, tuple)) or hasattr(part, "__dict__")]


def _state_of(generator: Any) -> Callable[[], None]:
    """Call the result to give the generator the state back that it has now."""
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if hasattr(generator, "getstate"):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


@contextlib.contextmanager
def accumulating(model: nn.Module, num_steps: int) -> Iterator[None]:
    """A context in which trainable parameters have gradients, as in all but the first of `num_steps` backwards.

    With one step per update nothing is done. Gradients that exist already stay; others are gone afterwards.
    """
    without = [p for p in model.parameters() if p.requires_grad and p.grad is None] if num_steps > 1 else []
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in without:
            parameter.grad = None


def save(handle: Any, folder: Path | None, device: torch.device) -> None:
    """Write the plan and its report to `folder`, if there is one, and reset the allocator's peak.

    The steps that `fit` tried then do not count as those of the training.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(handle.plan.to_json(graph=False), encoding="utf-8")
        handle.report(folder / "report.html", time_limit_s=REPORT_S)
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def metrics(handle: Any, device: torch.device) -> dict[str, float]:
    """What to log: the peak so far on an accelerator, as fitted on the CPU; and how much slower than plain steps."""
    peak = handle.measured_peak_bytes or handle.plan.peak_bytes
    if device.type != "cpu":
        peak = torch.accelerator.max_memory_allocated(device)
    slowdown = handle.plan.slowdown if handle.measured_slowdown is None else handle.measured_slowdown
    return {"lowtide/peak_gib": peak / 2**30, "lowtide/slowdown": slowdown}
