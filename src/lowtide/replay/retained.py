"""Retained outputs: op outputs that a region keeps, so that its replay need not compute them.

A plan names the ops by their position in the region. The forward runs without a dispatch mode and sees only what
autograd saves. So the first replay (for each combination of input shapes) computes everything and records at which save
each of these outputs appears (`capture_profile`). From then on the forward keeps those saved tensors, and the replay
runs under a mode that returns them in place of running their ops. Autograd builds its nodes as usual.

A step may differ from the one that was profiled, so every replay is checked:

- Ops are counted. After the first op that differs from the profile, the replay computes everything.
- A kept tensor must have the recorded shape, strides and dtype, and after it was returned the replay must save that
  very tensor at the same position. Returned tensors carry a version number that autograd never reaches, by which they
  and their views are recognised.
- Between the two, no op may reveal a value to Python (`item`, `nonzero`, a copy to the host): a branch on a wrong value
  could save just that value, and the check would pass. (Reads of host memory without an op, as by `tolist`, are not
  seen.)
- No random number may be drawn and no generator seeded between the op and its save, as the generator continues from
  the state after the op.
- No op may write to a returned tensor.

If a check fails, or if the replay saves other tensors than the forward did, its results are discarded, the region is
replayed again computing everything, and the profile is recorded anew. The same happens if the forward saves a tensor of
another form than recorded. After a few failures the region retains nothing. A kept tensor itself is always right, as it
is the one that autograd saved; if it was written to since, it is recomputed.

Custom kernels may write to an output without an op or a version that shows it, and would do so again to a returned one.
The profiling replay detects this by checksums; such outputs are never retained.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.replay import environment, index_choices
from lowtide.replay.capture_profile import (
    CaptureProfile,
    CaptureProfileMode,
    Op,
    OpCountingMode,
    RetainedOp,
    RetainedPart,
    as_geometry,
    form_of,
    storages_in,
)
from lowtide.replay.environment import Environment
from lowtide.replay.op_facts import facts_of
from lowtide.replay.recomputing import NO_STOP, Collector, Options, ReplayableCall, StopAt
from lowtide.replay.region import FIRST_TOKEN, Frame, MakeFrame
from lowtide.store.offload import KeptHere, KeptInStore

logger = logging.getLogger("lowtide")

_MAX_PROFILES = 16  # for inputs of different shapes
_MAX_MISTAKES = 3  # after which a region retains no outputs

Keep = Callable[[Tensor], KeptHere | KeptInStore]


class RetainedOps:
    """The ops of a region whose outputs are retained, by position in it, and profiles by the shapes of its inputs."""

    def __init__(self, name: str, positions: Iterable[int]) -> None:
        self.positions = frozenset(positions)
        self._name = name
        self._profiles: dict[Any, CaptureProfile] = {}
        self._num_mistakes = 0
        self.written_unseen: set[Op] | None = None  # None before the first replay has searched

    def frame(self, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: dict[int, Keep]) -> MakeFrame:
        """Return what makes the frame of a region that begins with these arguments; `keeps` are by op position."""
        if self._num_mistakes >= _MAX_MISTAKES:
            return Frame
        values = (*args, *kwargs.values()) if kwargs else args
        shapes = tuple(
            [(value.shape, value.dtype, value.requires_grad) for value in values if isinstance(value, Tensor)]
        )
        return functools.partial(RetainingFrame, self, shapes, self._profiles.get(shapes), keeps)

    def add_profile(self, shapes: Any, profile: CaptureProfile) -> None:
        if len(self._profiles) >= _MAX_PROFILES:
            self._profiles.clear()
        self._profiles[shapes] = profile

    def forget(self, shapes: Any) -> None:
        """Discard a profile that a forward or replay did not follow."""
        logger.debug("%s runs other ops than before: its replay computes everything", self._name or "the model")
        self._num_mistakes += 1
        self._profiles.pop(shapes, None)


class RetainingFrame(Frame):
    """The frame of a region or segment that retains outputs. Ops and saves are numbered in one sequence over its calls.

    It keeps saved tensors if the profile says so, and replays under one of the two dispatch modes.
    """

    # fmt: off
    __slots__ = (
        "_asked", "_has_replayed", "_keeps", "_of_parameters", "_ops", "_profile", "_shapes", "_whole", "random",
        "values",
    )
    # fmt: on

    def __init__(
        self,
        ops: RetainedOps,
        shapes: Any,
        profile: CaptureProfile | None,
        keeps: dict[int, Keep],
        options: Options,
        context: AbstractContextManager[Any] | None,
        new_scope: Callable[[], Any] | None,
    ) -> None:
        super().__init__(options, context, new_scope)
        self._ops, self._shapes, self._profile, self._keeps = ops, shapes, profile, keeps
        self._of_parameters = frozenset() if profile is None else profile.of_parameters
        self.values: dict[int, KeptHere | KeptInStore] = {}  # by save
        self._whole: dict[int, RetainedPart] = {}  # saves that are kept as their op made them
        self.random: dict[Op, Environment] = {}  # after ops that draw random numbers
        self._asked: set[int] = set()  # saves that autograd unpacked before the first replay
        self._has_replayed = False

    # The forward.

    @_compat.never_compiled
    def __call__(self, saved: Any) -> Any:
        packed = super().__call__(saved)
        if self._profile is not None and type(saved) is not int:
            self._keep(self._profile, packed - FIRST_TOKEN, saved)
        return packed

    def _keep(self, profile: CaptureProfile, index: int, tensor: Tensor) -> None:
        """Keep a tensor that autograd saves if the profile says so."""
        if index in profile.of_parameters:
            self.values[index] = KeptHere(tensor)
            return
        part = profile.by_save.get(index)
        if part is None:
            return
        is_it = part.is_like(tensor) and tensor.untyped_storage().nbytes() == part.storage_bytes
        if not is_it or _compat.version_of(tensor) != part.version:
            self._forget()  # the forward differs from the profile; saves kept so far are still valid
            return
        op = profile.ops[part.op]
        if op.is_random and part.op not in self.random:
            self.random[part.op] = environment.capture([tensor.device])
        keep = self._keeps.get(op.position) if part.number == min(op.saves) else None
        if keep is None:
            self.values[index] = KeptHere(tensor)
        else:  # the whole output: a view would drop the rest (queries of a product that also makes keys and values)
            self.values[index] = keep(as_geometry(tensor, part.saved, part.made))
            self._whole[index] = part

    def call_done(
        self, call: ReplayableCall, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        super().call_done(call, args, kwargs, tensors)
        if self._new_scope is None:
            self._check_num_saves()

    def _check_num_saves(self) -> None:
        """Forget a profile that expects more saves than the whole forward made."""
        if self._profile is not None and any(index >= len(self.tokens) for index in self._profile.by_save):
            self._forget()

    def _forget(self) -> None:
        self._ops.forget(self._shapes)
        self._profile = None

    # The backward.

    def unpack(self, index: int) -> Tensor:
        kept = self._take_kept(index)
        return super().unpack(index) if kept is None else kept

    def _take_kept(self, index: int) -> Tensor | None:
        """Return a kept save; None for one that is not kept."""
        kept = self.values.get(index)
        if kept is None:
            return None
        if not kept.is_intact and index not in self._of_parameters:
            del self.values[index]  # recomputed, unless it is a parameter
            self._asked.discard(index)
            return None
        if self._has_replayed:
            del self.values[index]
        else:
            self._asked.add(index)  # a replay needs it once more
        part = self._whole.get(index)
        return kept.restore() if part is None else as_geometry(kept.restore(), part.made, part.saved)

    def replay(self) -> None:
        if not self.is_done:  # the region itself computes a gradient
            return super().replay()
        self._check_num_saves()  # of a segment: it is complete at its first replay
        tensors, needed = self._first_inputs(), self._needed()
        is_whole = all(needed)
        for index in list(self.values):  # backwards of other devices, in threads of their own, take values meanwhile
            needed[index] = False
        if self._profile is not None and not self.values.keys() >= self._profile.by_save.keys():
            # An earlier replay has consumed them, or they were written to.
            self._profile, self._has_replayed = None, True
        collector: Collector | None = None
        if self._profile is not None or not self._has_replayed:
            # A profile lists every save. Where all are needed, the replay reaches the last one without running on.
            runs_on = self._profile is None and not (is_whole and not self.values)
            collector = self._replayed_in_mode(tensors, needed, NO_STOP if runs_on else self._stop(needed))
        self._has_replayed = True
        for index in self._asked:
            del self.values[index]
        self._asked.clear()
        self.random.clear()
        if collector is None:
            collector = Collector(self._options, needed, self._stop(needed))
            self._run_again(tensors, collector)
        self._finish(collector, tensors)

    def _replayed_in_mode(self, tensors: list[Tensor], needed: list[bool], stop: StopAt) -> Collector | None:
        """Replay with retained outputs, or record a profile; None if the replay has to compute everything instead."""
        collector = RetainingCollector(self._options, needed, stop)
        mode: CaptureProfileMode | RetainedOutputMode
        if self._profile is None:
            modules = [call.module for call in self.calls if call.module is not None]
            mode = CaptureProfileMode(self._ops, [each for module in modules for each in module.parameters()])
        else:
            mode = RetainedOutputMode(self, self._profile, collector)
        collector.mode = mode
        try:
            with index_choices.counted_by(mode.count):
                self._run_again(tensors, collector, mode)
            found, expected = self._compared(collector)
            if isinstance(mode, CaptureProfileMode):
                if found == expected:
                    self._ops.add_profile(self._shapes, mode.profile())
                return collector
            if mode.was_right() and (found == expected or not mode.taken):
                return collector
        except Exception as error:
            taking = isinstance(mode, RetainedOutputMode) and bool(mode.taken)
            is_ours = taking and not isinstance(error, torch.OutOfMemoryError)
            if not is_ours and not isinstance(error, RetryReplay):
                raise
        finally:
            del collector.mode  # it refers to the collector
        # A retained output was not what its op makes in this replay. Computing everything is always right.
        self._forget()
        return None

    def fetch(self, index: int, part: RetainedPart) -> Tensor:
        """Return a kept output as its op made it. One from a store stays on the device until autograd unpacks it."""
        kept = self.values[index]
        tensor = kept.restore()
        if isinstance(kept, KeptInStore):
            self.values[index] = KeptHere(tensor)
        return tensor if index in self._whole else as_geometry(tensor, part.saved, part.made)


class RetainingCollector(Collector):
    """A collector that reports each save to the dispatch mode of the replay."""

    __slots__ = ("mode",)
    mode: CaptureProfileMode | RetainedOutputMode

    def __init__(self, options: Options, needed: list[bool], stop: StopAt) -> None:
        # Retained outputs are those up to the last save: what follows would run without them.
        super().__init__(options, needed, stop._replace(at_end=False))

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.tensors)
        try:
            return super().pack(tensor)
        finally:
            self.mode.saved(index, tensor)


class RetryReplay(Exception):
    """Raised to end a replay that will be run again without retained outputs."""


class RetainedOutputMode(OpCountingMode):
    """Returns kept outputs instead of running the ops that made them, each once."""

    def __init__(self, frame: RetainingFrame, profile: CaptureProfile, collector: Collector) -> None:
        super().__init__()
        self._frame, self._profile, self._collector = frame, profile, collector
        self._kinds = iter(profile.kinds)
        self._is_astray = self._is_wrong = False
        self._unconfirmed: set[int] = set()  # saves of returned outputs that the replay has not reached
        self.taken: dict[Op, dict[int, _compat.StorageReference]] = {}  # parts by number
        self._last_state = -1  # the last save whose captured random state was set

    def count(self, func: Any, args: Any) -> Op | None:
        op = super().count(func, args)
        if op is not None and not self._is_astray and type(op[0]) is not tuple:
            self._is_astray = next(self._kinds, None) != op[0]
        return op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self.count(func, args)
        if op is not None:
            retained = None if self._is_astray else self._profile.ops.get(op)
            if retained is not None and self._may_take(op, retained, args, kwargs):
                return self._take(op, retained)
            if facts_of(func).may_draw and len(self._collector.tensors) <= self._last_state:
                self._give_up()  # the forward drew these before the state was captured
        if self.taken and facts_of(func).may_write:
            storages = storages_in(facts_of(func).written_tensors(args, kwargs or {}))
            if any(each.id in storages for parts in self.taken.values() for each in parts.values()):
                self._give_up()  # the kept tensor was written to in the forward, or is another one
        output = func(*args, **kwargs) if kwargs else func(*args)
        if self._unconfirmed and _compat.reveals_values(func, args, output):
            self._give_up()
        if self.taken:
            _compat.propagate_version_mark(func, args, output)
        return output

    def _may_take(self, op: Op, retained: RetainedOp, args: Any, kwargs: Any) -> bool:
        # A save after the end of the replay would not be checked.
        stop = self._collector.stop
        if op in self.taken or (stop >= 0 and max(retained.saves.values()) > stop):
            return False
        if min(retained.saves.values()) < len(self._collector.tensors):
            self._give_up()  # the kept tensor was saved before this op ran
        if retained.form is not None and retained.form != (form_of(args), form_of(kwargs)):
            return False
        return all(self._frame.values[index].is_intact for index in retained.saves.values())

    def _take(self, op: Op, retained: RetainedOp) -> Any:
        parts = list(retained.others)
        with _compat.without_modes():
            random = self._frame.random.get(op)
            if random is not None:
                if not random.set_random_states():
                    self._give_up()  # the forward seeded a generator before the state was captured
                self._last_state = max(self._last_state, min(retained.saves.values()))
            for number, index in retained.saves.items():
                parts[number] = _compat.with_marked_version(self._frame.fetch(index, self._profile.by_save[index]))
        self.taken[op] = {number: _compat.StorageReference(parts[number]) for number in retained.saves}
        self._unconfirmed.update(retained.saves.values())
        return retained.build(parts)

    def _give_up(self) -> None:
        self._is_wrong = True
        raise RetryReplay

    def saved(self, index: int, tensor: Tensor) -> None:
        part = self._profile.by_save.get(index)
        if part is not None and part.op in self.taken and not self._is_wrong:
            # The mark distinguishes it from tensors that existed before, such as inputs of the region.
            is_it = part.is_like(tensor) and _compat.storage_id(tensor) == self.taken[part.op][part.number].id
            self._is_wrong = not (is_it and _compat.has_marked_version(tensor))
            self._unconfirmed.discard(index)

    def was_right(self) -> bool:
        for index, tensor in enumerate(self._collector.tensors):
            if tensor is not None and _compat.has_marked_version(tensor):
                _compat.set_version(tensor, 0)
                self._collector.versions[index] = 0
        return not (self._is_wrong or self._unconfirmed)
