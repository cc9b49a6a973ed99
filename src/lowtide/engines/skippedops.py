"""Ops of a recomputed region that its replay puts off, as only ops whose outputs are held read what they make.

In the replay such an op gives tensors of the right form with nothing in them (stand-ins), and is remembered with its
arguments. Nearly always the stand-ins are gone soon after, unread, and with them what was remembered. Which ops those
are is planned from a trace, and a step may run otherwise: another branch is taken, a number is logged, a hook keeps a
value. So the op is computed after all, into the memory of its stand-ins, before another op reads them or writes to its
arguments; and at the end of the replay if someone still has them: autograd, or whoever put them somewhere.

The dispatcher does not see all that reads. Python reads numbers from host memory (`tolist()`, numpy). Where there is an
accelerator, what is in host memory is never put off; else a mode above autograd sees who asks for numbers or an
address. Kernels launched by hand need memory to write to; so while there is memory without values, or with zeros only,
that was made in this replay, nothing is put off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.engines import _compat
from lowtide.engines.heldops import Build, asked_once, computes_nothing, writes
from lowtide.tracing.opfacts import facts_of
from lowtide.tracing.records import tensors_in

ALIASES = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default"})  # views but for their schemas
# What else they do than to make their outputs is not known, or has to happen.
ALWAYS_RUN = frozenset({"random", "collective", "custom", "opaque", "mutates", "index", "view"})


def is_blank(name: str) -> bool:
    """Whether an op makes memory without values, or with zeros only."""
    return any(word in name.split(".")[1] for word in ("empty", "zeros")) if name.count(".") else False


class StandIn:
    """The form of an op's output, to make one like it with nothing in it, for arguments of the same form."""

    __slots__ = ("_build", "_forms", "_of")

    def __init__(self, parts: list[Tensor | None], build: Build | None, args: Any, kwargs: Any) -> None:
        self._forms = [None if part is None else (part.shape, part.stride(), part.dtype, part.device) for part in parts]
        self._build = build  # none for an output that is a single tensor
        self._of = form_of(args), form_of(kwargs)

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, output: Any) -> StandIn | None:
        """One for what an op has just made; None where the op has to run again."""
        if _nature_of(func) is not COMPUTES or _compat.may_be_remembered(func, args):
            return None
        parts: list[Any] = [output]
        build: Build | None = None
        if not isinstance(output, Tensor):
            parts, build = _compat.taken_apart(output)
        tensors = [part for part in parts if part is not None]
        if not all(isinstance(part, Tensor) and _compat.is_own(part) for part in tensors):
            return None
        return None if any(map(_is_for_python, tensors)) else cls(parts, build, args, kwargs)

    def fits(self, args: Any, kwargs: Any) -> bool:
        return (form_of(args), form_of(kwargs)) == self._of

    def make(self) -> tuple[Any, list[Tensor | None]]:
        """The output, and its parts."""
        with _compat.without_modes():
            parts = [
                None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=form[3])
                for form in self._forms
            ]
        return parts[0] if self._build is None else self._build(parts), parts

    def fill(self, storages: list[_compat.StorageReference], parts: list[Tensor | None]) -> None:
        """Put the parts of an output where one was made, as far as that is still there."""
        full = [part for part in parts if part is not None]
        forms = [form for form in self._forms if form is not None]
        for storage, form, part in zip(storages, forms, full, strict=True):
            if storage.is_alive():
                storage.as_tensor(form[2], form[0], form[1]).copy_(part)


class _Postponed:
    """An op that was put off, with what it would read; `made` are the storages of its output's parts."""

    __slots__ = ("args", "func", "kwargs", "made", "stand_in")

    def __init__(self, stand_in: StandIn, func: Any, args: Any, kwargs: Any, parts: list[Tensor | None]) -> None:
        self.stand_in, self.func, self.args, self.kwargs = stand_in, func, args, kwargs or {}
        self.made = [_compat.StorageReference(part) for part in parts if part is not None]

    def is_wanted(self) -> bool:
        """Whether anyone could still ask for what it makes."""
        for reference in self.made:
            if reference.is_alive():
                return True
        return False

    def reads(self) -> set[int]:
        """The storages of its arguments."""
        return storages_in((self.args, self.kwargs))

    def compute(self) -> None:
        """Make it after all, where its stand-ins are."""
        with _compat.bare_kernels():
            output = self.func(*self.args, **self.kwargs)
            self.stand_in.fill(self.made, [output] if isinstance(output, Tensor) else _compat.taken_apart(output)[0])


class Later:
    """The ops that a replay has put off."""

    def __init__(self) -> None:
        self._postponed: list[_Postponed] = []
        self._by_storage: dict[int, _Postponed] = {}
        self._blank: list[_compat.StorageReference] = []  # memory for someone to write to

    def __bool__(self) -> bool:
        return bool(self._postponed)

    def clear(self) -> None:
        self._postponed.clear()
        self._by_storage.clear()
        self._blank.clear()

    def put_off(self, stand_in: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
        """What stands for the output of an op that is not run."""
        self._sweep()
        output, parts = stand_in.make()
        postponed = _Postponed(stand_in, func, args, kwargs, parts)
        self._postponed.append(postponed)
        for made in postponed.made:
            self._by_storage[made.id] = postponed
        return output

    def may_put_off(self) -> bool:
        if self._blank:
            self._blank = [reference for reference in self._blank if reference.is_alive()]
        return not self._blank

    def made_blank(self, output: Any) -> None:
        """Memory was made for someone to write to."""
        full = [tensor for tensor in tensors_in(output) if tensor.numel()]
        self._blank += [reference for tensor in full for reference in _compat.storage_references(tensor)]
        if full:
            self.compute_all()

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to run: whatever it reads has to be there, and whatever it changes must have been read."""
        if computes_nothing(func) or _nature_of(func) is VIEW:
            return
        self._sweep()
        if not self._postponed:
            return
        wanted: list[_Postponed] = []
        if not (self._add_read(args, wanted) and self._add_read((kwargs or {}).values(), wanted)):
            wanted = self._postponed  # a tensor of another class may be made of anything
        if wanted:
            self._compute(wanted)
        if self._postponed and writes(func):
            written = storages_in(facts_of(func).written_tensors(args, kwargs or {}))
            self._compute([each for each in self._postponed if not written.isdisjoint(each.reads())])

    def _add_read(self, values: Iterable[Any], wanted: list[_Postponed]) -> bool:
        """Add the ops whose stand-ins are among the values. Whether all values say what they are made of."""
        for value in values:
            kind = type(value)
            if kind in _compat.PLAIN_TYPES and value.layout is torch.strided:
                found = self._by_storage.get(_compat.storage_id(value))
                if found is not None:
                    wanted.append(found)
            elif kind in _NUMBERS:
                continue
            elif kind in (tuple, list):
                if not self._add_read(value, wanted):
                    return False
            elif isinstance(value, Tensor):
                return False
        return True

    def compute(self, values: Any) -> None:
        """Have what belongs into these tensors there."""
        self._compute([self._by_storage[at] for at in storages_in(values) if at in self._by_storage])

    def compute_all(self) -> None:
        """Have everything there that someone could still ask for."""
        self._sweep()
        self._compute(self._postponed)

    def _compute(self, wanted: list[_Postponed]) -> None:
        needed = set(map(id, wanted))
        for each in reversed(self._postponed):  # what one of them reads was put off before it
            if id(each) in needed:
                needed.update(id(self._by_storage[at]) for at in each.reads() if at in self._by_storage)
        for each in [each for each in self._postponed if id(each) in needed]:
            each.compute()
            self._forget(self._postponed.index(each))

    def _sweep(self) -> None:
        """Forget ops whose outputs are gone, the last first: what they would read goes with them."""
        for index in range(len(self._postponed) - 1, -1, -1):
            if not self._postponed[index].is_wanted():
                self._forget(index)

    def _forget(self, index: int) -> None:
        for made in self._postponed.pop(index).made:
            del self._by_storage[made.id]


class Unseen(TorchFunctionMode):
    """Sees who reads host memory other than by an op."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and self._later:
            self._later.compute(args)
        return func(*args, **(kwargs or {}))


_READERS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__})

# What an op does to storages: it looks at one in another way, may be left out, makes memory to write to, or none such.
VIEW, COMPUTES, ALLOCATES, RUNS = "view", "computes", "allocates", "runs"


def allocates(func: Any) -> bool:
    return _nature_of(func) is ALLOCATES


@asked_once
def _nature_of(func: Any) -> str:
    if not _compat.is_op_with_schema(func):
        return RUNS
    facts = facts_of(func)
    if "custom" in facts.flags or "collective" in facts.flags:
        return RUNS
    if facts.name in ALIASES or ("view" in facts.flags and "mutates" not in facts.flags):
        return VIEW
    if is_blank(facts.name) and "mutates" not in facts.flags:
        return ALLOCATES
    is_left_out = ALWAYS_RUN.isdisjoint(facts.flags) and not facts.written_in_training
    return COMPUTES if is_left_out and not facts.has_dynamic_shape else RUNS


def _is_for_python(tensor: Tensor) -> bool:
    """Whether a tensor is in host memory to be read by Python: any where an accelerator computes, else a count."""
    if tensor.device.type != "cpu":
        return False
    return _compat.accelerator() is not None or not (tensor.is_floating_point() or tensor.is_complex())


def storages_in(values: Any) -> set[int]:
    return {storage for tensor in tensors_in(values) for storage in _compat.storages_of(tensor)}


def form_of(value: Any) -> Any:
    """What of an argument decides on the form of an output: all but the numbers in tensors."""
    kind = type(value)
    if kind in _compat.PLAIN_TYPES and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device
    if kind in (tuple, list):
        return tuple(map(form_of, value))
    if kind is dict:
        return tuple((name, form_of(each)) for name, each in value.items())
    return value if kind in _NUMBERS else object()  # equal to no other: the op has to run


_NUMBERS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
