"""Ops of a recomputed region that its replay does not run, as only ops whose outputs are held read what they make.

In the replay such an op gives tensors of the right shape with nothing in them (stand-ins). Which ops those are is
planned from a trace, and a step may run otherwise: another branch is taken, a parameter needs a gradient again. So the
forward of every step proves on its own that nothing would read a stand-in, and where it does not, its replay skips
nothing. The proof follows storages. What an op to be skipped makes must not be read by an op that will run again, nor
be written to, nor be saved by autograd for this region, nor be alive when the region has returned: whoever has it then
would be given a stand-in by the replay. Views of it are free.

The dispatcher does not see all that reads. Python reads numbers from host memory (`tolist()`, numpy). Where there is an
accelerator, what is in host memory is never skipped; else a mode above autograd sees who asks for numbers or an
address. What no op reads was made for someone else and refutes. Kernels launched by hand need memory to write to, and
so memory without values, or with zeros only, that is there at the same time as a value to be skipped refutes too.

The replay looks once more: an op that reads a stand-in, or autograd saving one, is an error. That takes a program that
runs other ops in its replay than in its forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.engines import _compat
from lowtide.engines.heldops import Held, Hold, Op, Reuse
from lowtide.engines.moves import Keeping
from lowtide.graph.unneeded import ALIASES, ALWAYS_RUN, is_blank
from lowtide.memory.divergence import ReplayError
from lowtide.plans import Recompute
from lowtide.tracing.opfacts import facts_of
from lowtide.tracing.records import tensors_in

logger = logging.getLogger("lowtide")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Storages = dict[int, _compat.StorageReference]  # by id, which no other storage is given meanwhile


def holding(region: Recompute, elsewhere: dict[int, Keeping]) -> Contexts:
    """Contexts for one call of a region: the forward keeps the outputs of planned ops, the replay takes them."""
    held: dict[Op, Held] = {}
    kept = frozenset(region.keep_ops)
    if not region.skip_ops:
        return Hold(held, kept, elsewhere), Reuse(held)
    proof = Proof(region.path, frozenset(region.skip_ops))
    return HoldAndProve(held, kept, elsewhere, proof), ReuseAndSkip(held, proof)


class StandIn:
    """The form of an op's output, to make one like it with nothing in it."""

    __slots__ = ("_build", "_forms")

    def __init__(self, parts: list[Tensor | None], build: Callable[[list[Any]], Any] | None) -> None:
        self._forms = [None if part is None else (part.shape, part.stride(), part.dtype, part.device) for part in parts]
        self._build = build  # none for an output that is a single tensor

    def make(self) -> tuple[Any, list[Tensor]]:
        """The output, and its tensors."""
        with _compat.without_modes():
            parts = [
                None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=form[3])
                for form in self._forms
            ]
        output = parts[0] if self._build is None else self._build(parts)
        return output, [part for part in parts if part is not None]


class Proof:
    """What one call of a region need not compute again, for as long as nothing that its forward does refutes it."""

    def __init__(self, path: str, positions: frozenset[int]) -> None:
        self.path = path
        self.positions = positions
        self.stand_ins: dict[Op, StandIn] = {}
        self.skipped: Storages = {}  # what ops to be skipped made, in the forward
        self.standing: Storages = {}  # what stands for it in a replay, which a backward inside the forward may begin
        self._unread: set[int] = set()  # of what they made, what no op has read so far, by id
        self._unwritten: list[_compat.StorageReference] = []
        self._resting_on: list[Op] = []
        self._num_held = 0
        self._sees_saves = False
        self._is_proven = False
        self._why = ""

    def refute(self, why: str) -> None:
        self._why = self._why or why
        self.positions = frozenset()
        self.stand_ins.clear()
        self.skipped.clear()
        self._unread.clear()
        self._unwritten.clear()

    # What the forward does.

    def begin_watch(self) -> Proof:
        """For who calls `saved` from here on."""
        self._sees_saves = True
        return self

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        if self.skipped and _are_among(self.skipped, (tensor,)):
            self.refute("autograd saves one of them")

    def made(self, op: Op, output: Any) -> bool:
        """An op ran that is to be skipped. Whether it can be."""
        parts: list[Any] = [output]
        build = None
        if not isinstance(output, Tensor):
            parts, build = _compat.taken_apart(output)
        tensors = [part for part in parts if part is not None]
        if not all(isinstance(part, Tensor) and _compat.is_own(part) for part in tensors):
            return False
        if any(_is_for_python(tensor) for tensor in tensors):
            return False
        for tensor in tensors:
            reference = _compat.StorageReference(tensor)
            self.skipped[reference.id] = reference
            if tensor.numel():
                self._unread.add(reference.id)
        self.stand_ins[op] = StandIn(parts, build)
        if self._unwritten:
            self._unwritten = [reference for reference in self._unwritten if reference.is_alive()]
            if self._unwritten:
                self.refute("memory without values was there to be written to")
        return True

    def let_go(self) -> None:
        """Forget what is gone: nobody can read it."""
        self.skipped = {at: reference for at, reference in self.skipped.items() if reference.is_alive()}

    def read(self, args: Any, kwargs: Any) -> None:
        """An op that does not run again reads something to be skipped."""
        if self._unread:
            tensors = tensors_in((args, kwargs))
            self._unread.difference_update(storage for each in tensors for storage in _compat.storages_of(each))

    def held(self, op: Op) -> None:
        """An output is held, of an op that read something to be skipped."""
        self._resting_on.append(op)

    def allocated(self, tensor: Tensor) -> None:
        """Memory was made for someone to write to."""
        if tensor.numel() == 0:
            return
        if not _compat.is_own(tensor) or any(reference.is_alive() for reference in self.skipped.values()):
            self.refute("memory without values is there to be written to")
        else:
            self._unwritten.append(_compat.StorageReference(tensor))

    def end_of_forward(self, held: dict[Op, Held]) -> None:
        """The forward has returned. Whatever of it is still there has been put somewhere by someone."""
        is_gone = not any(reference.is_alive() for reference in self.skipped.values())
        is_seen = self._sees_saves and not self._unread
        self._is_proven = is_gone and is_seen and all(op in held for op in self._resting_on)
        self._num_held = len(held)
        if not self._is_proven or self._why:
            why = self._why or (
                "what reads them is not held" if is_gone and is_seen else "someone else has or reads one"
            )
            logger.debug("the replay of %s leaves out no values: %s", self.path or "the model", why)
        self.skipped.clear()
        self._unwritten.clear()

    # What the replay does.

    def begin_replay(self, held: dict[Op, Held]) -> dict[Op, StandIn]:
        """What stands for outputs in this replay: nothing where an output is to be computed that would read it."""
        self.standing.clear()
        is_complete = len(held) == self._num_held and all(each.is_intact for each in held.values())
        return self.stand_ins if self._is_proven and is_complete else {}

    def stand_in(self, stand_in: StandIn) -> Any:
        output, tensors = stand_in.make()
        for tensor in tensors:
            reference = _compat.StorageReference(tensor)
            self.standing[reference.id] = reference
        return output

    def saved_again(self, tensors: Iterable[Tensor]) -> None:
        """Autograd saved these tensors in a replay."""
        if self.standing and _are_among(self.standing, tensors, is_sure=True):
            raise self.misread("saves")
        self.standing.clear()

    def misread(self, what: str) -> ReplayError:
        return ReplayError(
            f"the replay of {self.path or 'the model'} {what} a value that its plan leaves out of the replay, because "
            "its forward did not: it runs other ops than the forward. Let both run the same ops (what is_recomputing() "
            "leaves out should be no part of the result), or take skip_ops out of the plan."
        )


class HoldAndProve(Hold):
    """Holds outputs, and finds out whether what only those read can be left out of the replay."""

    def __init__(
        self, held: dict[Op, Held], positions: frozenset[int], elsewhere: dict[int, Keeping], proof: Proof
    ) -> None:
        super().__init__(held, positions, elsewhere)
        self._proof = proof
        self._last = max(proof.positions)  # from here on there will be ever less to look for
        self.begin_watch = proof.begin_watch
        self._unseen = _Unseen(proof) if _compat.accelerator() is None else None

    def __enter__(self) -> Any:
        if self._unseen is not None:
            self._unseen.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self._unseen is not None:
            self._unseen.__exit__(kind, error, trace)
        if error is None:
            self._proof.end_of_forward(self._held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self._counted(func, args), self._num_seen - 1
        if op is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        proof, nature, reads = self._proof, RUNS, False
        if proof.positions:
            nature = _nature_of(func)
            if proof.skipped and nature is not VIEW:
                if position > self._last:
                    proof.let_go()
                reads = _reads(proof.skipped, args, kwargs)
        output = func(*args, **kwargs) if kwargs else func(*args)
        if nature is ALLOCATES:
            proof.allocated(output)
        if _compat.writes(func):
            self._forget(func, args, kwargs)
        elif position in self._positions and not _compat.gives_views(func):
            self._hold(op, position, func, output, kwargs)
            if reads:
                proof.read(args, kwargs)
                proof.held(op)
            return output
        elif position in proof.positions and nature is COMPUTES and not _compat.may_be_remembered(func, args):
            if proof.made(op, output) and reads:
                proof.read(args, kwargs)
                reads = False
        if reads:
            proof.refute(f"{func} reads or writes one of them")
        return output


class _Unseen(TorchFunctionMode):
    """Sees who reads host memory other than by an op."""

    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self._proof = proof

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and self._proof.skipped and _are_among(self._proof.skipped, args):
            self._proof.refute(f"{func.__name__} reads one of them")
        return func(*args, **(kwargs or {}))


_READERS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__})


class ReuseAndSkip(Reuse):
    """Takes outputs that are held, and gives stand-ins for those that only lead to them."""

    def __init__(self, held: dict[Op, Held], proof: Proof) -> None:
        super().__init__(held)
        self._proof = proof
        self._stand_ins: dict[Op, StandIn] = {}

    def __enter__(self) -> Any:
        self._stand_ins = self._proof.begin_replay(self._held)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stand_ins:
            return super().__torch_dispatch__(func, types, args, kwargs)
        op = self._counted(func, args)
        if op is not None:
            held = self._held.pop(op, None)
            if held is not None and held.is_intact:
                return held.take()
            stand_in = self._stand_ins.get(op)
            if stand_in is not None:
                return self._proof.stand_in(stand_in)
            standing = self._proof.standing
            if standing and _nature_of(func) is not VIEW and _reads(standing, args, kwargs, is_sure=True):
                raise self._proof.misread(f"runs {func} on")
        return func(*args, **kwargs) if kwargs else func(*args)


# What an op does to storages: it looks at one in another way, may be left out, makes memory to write to, or none such.
VIEW, COMPUTES, ALLOCATES, RUNS = "view", "computes", "allocates", "runs"
_NATURES: dict[int, str] = {}  # by the id of the op, which lives as long as torch does


def _nature_of(func: Any) -> str:
    nature = _NATURES.get(id(func))
    if nature is None:
        _NATURES[id(func)] = nature = _find_nature(func)
    return nature


def _find_nature(func: Any) -> str:
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


def _reads(storages: Storages, args: Any, kwargs: Any, is_sure: bool = False) -> bool:
    """Whether any argument is in one of the storages, or may be."""
    return _are_among(storages, args, is_sure) or (bool(kwargs) and _are_among(storages, kwargs.values(), is_sure))


def _are_among(storages: Storages, values: Iterable[Any], is_sure: bool = False) -> bool:
    """The same of values, lists of such among them. Those that are not plain tensors may be anywhere, unless surely."""
    for value in values:
        kind = type(value)
        if kind in _compat.PLAIN_TYPES and value.layout is torch.strided:
            if _compat.storage_id(value) in storages:
                return True
        elif kind in _NUMBERS:
            continue
        elif kind in (tuple, list):
            if _are_among(storages, value, is_sure):
                return True
        elif isinstance(value, Tensor):
            if not is_sure or not storages.keys().isdisjoint(_compat.storages_of(value)):
                return True
    return False


_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
