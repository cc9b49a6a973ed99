"""Retained outputs: op outputs that a region keeps, so that its replay need not compute them.

A plan names the ops by their position in the region. The forward runs without a dispatch mode and sees only what
autograd saves. So the first replay (for each combination of input shapes) computes everything under a mode that records
at which save each of these outputs appears: a `CaptureProfile`. From then on the forward keeps those saved tensors, and
the replay runs under a mode that returns them in place of running their ops. Autograd builds its nodes as usual.

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

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay import region
from lowtide.replay.environment import RandomStates
from lowtide.replay.recomputing import NO_STOP, Collector, Options, StopAt
from lowtide.replay.retaining_modes import (
    CaptureProfile,
    CaptureProfileMode,
    Op,
    RetainedOutputMode,
    RetainedPart,
    RetryReplay,
    as_geometry,
)
from lowtide.replay.segment_replay import SegmentFrame
from lowtide.store.offload import KeptHere, KeptInStore

logger = logging.getLogger("lowtide")

_MAX_PROFILES = 16  # for inputs of different shapes
_MAX_MISTAKES = 3  # after which a region retains no outputs

Keep = Callable[[Tensor], KeptHere | KeptInStore]


class RetainedOps:
    """The ops of one region whose outputs are retained, and their profiles by the shapes of its inputs.

    `positions` are the positions of ops, counted from the region's first.
    """

    hidden_from_replay = True

    def __init__(self, name: str, positions: Iterable[int]) -> None:
        self.positions = frozenset(positions)
        self._name = name
        self._profiles: dict[Any, CaptureProfile] = {}
        self._num_mistakes = 0
        self.written_unseen: set[Op] | None = None  # None before the first replay has searched

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: dict[int, Keep]) -> RetainedCall | None:
        """Return an object that retains the outputs of one call; None if none are retained.

        `keeps` maps the positions of ops whose outputs are offloaded or compressed to the function that does it.
        """
        if self._num_mistakes >= _MAX_MISTAKES:
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        shapes = tuple(
            [(value.shape, value.dtype, value.requires_grad) for value in values if isinstance(value, Tensor)]
        )
        return RetainedCall(self, shapes, self._profiles.get(shapes), keeps)

    def add_profile(self, shapes: Any, profile: CaptureProfile) -> None:
        if len(self._profiles) >= _MAX_PROFILES:
            self._profiles.clear()
        self._profiles[shapes] = profile

    def forget(self, shapes: Any) -> None:
        """Discard a profile that a forward or replay did not follow."""
        logger.debug("%s runs other ops than before: its replay computes everything", self._name or "the model")
        self._num_mistakes += 1
        self._profiles.pop(shapes, None)


class RetainedCall:
    """The retained outputs of one call of a region, or of one run of a segment."""

    __slots__ = (
        "_asked",
        "_keeps",
        "_mode",
        "_of_parameters",
        "_ops",
        "_profile",
        "_random",
        "_replayed",
        "_shapes",
        "_values",
        "_whole",
    )

    def __init__(self, ops: RetainedOps, shapes: Any, profile: CaptureProfile | None, keeps: dict[int, Keep]) -> None:
        self._ops, self._shapes, self._profile, self._keeps = ops, shapes, profile, keeps
        self._of_parameters = frozenset() if profile is None else profile.of_parameters
        self._values: dict[int, KeptHere | KeptInStore] = {}  # by save
        self._whole: dict[int, RetainedPart] = {}  # saves that are kept as their op made them
        self._random: dict[Op, RandomStates] = {}  # after ops that draw random numbers
        self._asked: set[int] = set()  # saves that autograd unpacked before the first replay
        self._replayed = False
        self._mode: CaptureProfileMode | RetainedOutputMode | None = None

    def frame(self, *args: Any) -> RetainingFrame:
        """Return the frame of this call."""
        return RetainingFrame(self, *args)

    def segment_frame(self, new_scope: Callable[[], Any]) -> RetainingSegment:
        """Return the frame of a segment that begins with this call."""
        return RetainingSegment(self, new_scope)

    # The forward.

    def saved(self, index: int, tensor: Tensor) -> None:
        """Called when autograd saves a tensor in the forward: keep it if the profile says so."""
        if self._profile is None:
            return
        if index in self._profile.of_parameters:
            self._values[index] = KeptHere(tensor)
            return
        part = self._profile.by_save.get(index)
        if part is None:
            return
        is_it = part.is_like(tensor) and tensor.untyped_storage().nbytes() == part.storage_bytes
        if not is_it or _compat.version_of(tensor) != part.version:
            self._forget()  # the forward differs from the profile; saves kept so far are still valid
            return
        op = self._profile.ops[part.op]
        if op.is_random and part.op not in self._random:
            self._random[part.op] = RandomStates([tensor.device])
        keep = self._keeps.get(op.position) if part.number == min(op.saves) else None
        if keep is None:
            self._values[index] = KeptHere(tensor)
        else:  # the whole output: a view would drop the rest (queries of a product that also makes keys and values)
            self._values[index] = keep(as_geometry(tensor, part.saved, part.made))
            self._whole[index] = part

    def forward_done(self, num_saves: int) -> None:
        if self._profile is not None and any(index >= num_saves for index in self._profile.by_save):
            self._forget()

    def _forget(self) -> None:
        self._ops.forget(self._shapes)
        self._profile = None

    # The backward.

    def take(self, index: int) -> Tensor | None:
        """Return a kept save; None for one that is not kept."""
        kept = self._values.get(index)
        if kept is None:
            return None
        if not kept.is_intact and index not in self._of_parameters:
            del self._values[index]  # recomputed, unless it is a parameter
            self._asked.discard(index)
            return None
        if self._replayed:
            del self._values[index]
        else:
            self._asked.add(index)  # a replay needs it once more
        part = self._whole.get(index)
        return kept.restore() if part is None else as_geometry(kept.restore(), part.made, part.saved)

    def begin_replay(self, needed: list[bool]) -> bool:
        """Clear `needed` for saves that are kept, and return whether the replay has to run to its end."""
        is_whole = all(needed)
        for index in list(self._values):
            needed[index] = False
        if self._profile is not None and not self._values.keys() >= self._profile.by_save.keys():
            # An earlier replay has consumed them, or they were written to.
            self._profile, self._replayed = None, True
        return self._is_profiling and not (is_whole and not self._values)

    @property
    def _is_profiling(self) -> bool:
        return self._profile is None and not self._replayed

    def replay_mode(self, collector: Collector, modules: Iterable[nn.Module]) -> Any:
        """Return the dispatch mode of a replay: one that records a profile, one that returns kept outputs, or None."""
        if self._profile is not None:
            self._mode = RetainedOutputMode(self, self._profile, collector)
        elif self._is_profiling:
            self._mode = CaptureProfileMode(self._ops, [each for module in modules for each in module.parameters()])
        return self._mode

    def saved_again(self, index: int, tensor: Tensor) -> None:
        """Called when the replay saves a tensor."""
        if self._mode is not None:
            self._mode.saved(index, tensor)

    def value(self, index: int) -> KeptHere | KeptInStore:
        return self._values[index]

    def fetch(self, index: int, part: RetainedPart) -> Tensor:
        """Return a kept output as its op made it. One from a store stays on the device until autograd unpacks it."""
        kept = self._values[index]
        tensor = kept.restore()
        if isinstance(kept, KeptInStore):
            self._values[index] = KeptHere(tensor)
        return tensor if index in self._whole else as_geometry(tensor, part.saved, part.made)

    def random_states(self, op: Op) -> RandomStates | None:
        return self._random.get(op)

    def replay_done(self, *, saves_agree: bool) -> bool:
        """Return whether all retained outputs were used as profiled.

        `saves_agree`: whether the replay saved the same tensors as the forward.
        """
        mode, self._mode = self._mode, None
        if isinstance(mode, CaptureProfileMode):
            if saves_agree:
                self._ops.add_profile(self._shapes, mode.profile())
        elif mode is not None and not (mode.was_right() and (saves_agree or not mode.taken)):
            return False
        self._end()
        return True

    def may_have_caused(self, error: Exception) -> bool:
        """Return whether a replay may have failed because of retained outputs."""
        if isinstance(error, RetryReplay):
            return True
        taking = isinstance(self._mode, RetainedOutputMode) and bool(self._mode.taken)
        return taking and not isinstance(error, torch.OutOfMemoryError)

    def retry_without(self) -> None:
        """Compute everything in further replays of this call."""
        self._forget()
        self._mode = None
        self._end()

    def _end(self) -> None:
        self._replayed = True
        for index in self._asked:
            del self._values[index]
        self._asked.clear()
        self._random.clear()


class _Retaining(region.Frame):
    """A frame that keeps the saved tensors that are retained outputs."""

    __slots__ = ()

    _retained: RetainedCall

    @_compat.never_compiled
    def __call__(self, saved: Any) -> Any:
        packed = super().__call__(saved)
        if type(saved) is not int:
            self._retained.saved(packed - region.FIRST_TOKEN, saved)
        return packed

    def unpack(self, index: int) -> Tensor:
        kept = self._retained.take(index)
        return super().unpack(index) if kept is None else kept

    def replay(self) -> None:
        if not self._is_done:  # the region itself computes a gradient
            return super().replay()
        self._check_arguments()
        tensors, needed, retained = self._input_tensors(), self._needed(), self._retained
        stop = NO_STOP if retained.begin_replay(needed) else self._stop(needed)
        collector: Collector = RetainingCollector(self._options, needed, stop, retained)
        try:
            self._run_again(tensors, collector, retained.replay_mode(collector, self._own_modules()))
            found, expected = self._compared(collector)
            is_right = retained.replay_done(saves_agree=found == expected)
        except Exception as error:
            if not retained.may_have_caused(error):
                raise
            is_right = False
        if not is_right:
            # A retained output was not what its op makes in this replay. Computing everything is always right.
            retained.retry_without()
            collector = self._options.collector(needed, self._stop(needed))
            self._run_again(tensors, collector)
        self._finish(collector, tensors)

    @abstractmethod
    def _own_modules(self) -> list[nn.Module]:
        """The modules whose calls this frame replays."""


class RetainingFrame(_Retaining):
    """The frame of a call that retains outputs."""

    __slots__ = ("_retained",)

    def __init__(self, retained: RetainedCall, *args: Any) -> None:
        super().__init__(*args)
        self._retained = retained

    def forward_done(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        super().forward_done(args, kwargs, tensors)
        self._retained.forward_done(len(self._tokens))

    def _own_modules(self) -> list[nn.Module]:
        assert self._module is not None
        return [self._module]


class RetainingSegment(_Retaining, SegmentFrame):
    """The frame of a segment that retains outputs. Ops and saves are numbered in one sequence over its calls."""

    __slots__ = ("_retained",)

    def __init__(self, retained: RetainedCall, new_scope: Callable[[], Any]) -> None:
        super().__init__(new_scope)
        self._retained = retained

    def replay(self) -> None:
        if self._is_done:  # the segment is complete at its first replay
            self._retained.forward_done(self.num_saves)
        super().replay()

    def _own_modules(self) -> list[nn.Module]:
        return [call.module for call in self.calls]


class RetainingCollector(Collector):
    """A collector that reports each save to the retained outputs of the call."""

    __slots__ = ("_retained",)

    def __init__(self, options: Options, needed: list[bool], stop: StopAt, retained: RetainedCall) -> None:
        # Retained outputs are those up to the last save: what follows would run without them.
        super().__init__(options, needed, stop._replace(at_end=False))
        self._retained = retained

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.tensors)
        try:
            return super().pack(tensor)
        finally:
            self._retained.saved_again(index, tensor)
