"""Segments: a run of sibling module calls (`layers.3`, `layers.4`, ...) that is recomputed as one region.

With one region per layer, the input of every layer is kept. A segment keeps the input of its first call only, and other
tensors that come from outside (masks, positions): memory for inputs shrinks by the number of calls. A tensor that a
call gets from an earlier call of the segment is a **link**: it must be the very tensor which that call returned, and
the replay computes it again. The saved tensors of all calls are numbered in one sequence. The first one that the
backward unpacks replays the calls in order, up to the last call with a tensor that is still needed.

Calls are joined while they run. A call begins a new segment if none of its inputs is an output of the segment, if such
an output was changed in place, or if other saved-tensor hooks are in force, as inside another library's checkpoint.

Calls and shorter segments inside a segment may be regions themselves. The replay of the segment then recomputes their
inputs, and each is replayed when the backward reaches it.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay import divergence
from lowtide.replay.arguments import Arguments, is_held_itself, tensors_in
from lowtide.replay.object_state import nothing
from lowtide.replay.recomputing import DEFAULT_OPTIONS, Collector, Replaying, StopAt
from lowtide.replay.region import Frame, Hooks, ReplayableCall

if TYPE_CHECKING:
    from lowtide.replay.retained import RetainedCall


# An input that is an output of an earlier call of the segment: the number of that call, and of the output. (A tuple, as
# one is made per call.)
Link = tuple[int, int]


class OpenSegment:
    """The segment that calls join during one forward, or during one replay of an outer region.

    `new_scope` makes an object that the calls of one replay share; it is passed to their `replay`. `first` is the name
    of the call that the segment began with.
    """

    __slots__ = ("_frame", "_hooks", "_outputs", "first", "new_scope")

    def __init__(self, new_scope: Callable[[], Any]) -> None:
        self.new_scope, self.first = new_scope, ""
        self._frame: weakref.ref[SegmentFrame] | None = None
        self._hooks = 0  # the id of the hooks in force when the frame began
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, Link]] = {}  # outputs of the calls so far, by id

    def joined(self, tensors: list[Tensor], hooks: Hooks | None) -> tuple[SegmentFrame | None, dict[int, Link]]:
        """Return the frame that a call with these inputs continues, or None, and the links among the inputs."""
        frame = None if self._frame is None or self._hooks != _id_of(hooks) else self._frame()
        links: dict[int, Link] = {}
        for index, tensor in enumerate(tensors) if frame is not None else ():
            known = self._outputs.get(id(tensor))
            if known is not None and known[0]() is tensor and _compat.version_of_saved(tensor) == known[1]:
                links[index] = known[2]
        return (frame if links else None), links

    def is_continued_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments, not the first of the segment, would join it."""
        return self.joined(Arguments.take(args, kwargs)[1], _compat.current_hooks())[0] is not None

    def begin(self, name: str, frame: SegmentFrame, hooks: Hooks | None) -> None:
        self.first, self._frame, self._hooks = name, weakref.ref(frame), _id_of(hooks)
        self._outputs = {}

    def end(self) -> None:
        self._frame = None

    def call_done(self, frame: SegmentFrame, output: Any) -> None:
        number, outputs = len(frame.calls) - 1, self._outputs
        for index, tensor in enumerate(_tensors_of(output)):
            if is_held_itself(tensor):
                continue
            version = _compat.version_of_saved(tensor)
            known = outputs.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1] != version:
                # Autograd keeps a frame alive by its saves. Where there are none yet, as after frozen layers, its
                # outputs do: through the callback, which a weak reference holds until its tensor is freed.
                callback = None if frame.num_saves else functools.partial(_ignore, frame)
                outputs[id(tensor)] = weakref.ref(tensor, callback), version, (number, index)


def _tensors_of(output: Any) -> Sequence[Tensor]:
    return (output,) if type(output) is Tensor else list(tensors_in(output))


def _ignore(*_: object) -> None:
    """Do nothing: the callback of a weak reference, bound to an object that is to live as long as the tensor."""


def _id_of(hooks: Hooks | None) -> int:
    """Return the id of the object that the pack hook is bound to: a bound method is a new object each time."""
    return 0 if hooks is None else id(getattr(hooks[0], "__self__", hooks[0]))


@_compat.never_compiled
def run(
    segment: OpenSegment,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    is_first: bool,
    module: nn.Module,
    replay: Callable[..., Any],
    input_hooks: Hooks | None = None,
    retained: Callable[[], RetainedCall | None] | None = None,
) -> Any:
    """Run `function(*args, **kwargs)` as the next call of a segment, or as its first if `is_first` or not linked to it.

    `replay` is called in the backward with the scope, the module and the arguments. `retained` returns the retained
    outputs of a segment that begins here. The other arguments are those of `region.run`.
    """
    arguments, tensors = Arguments.take(args, kwargs, module)
    hooks = _compat.current_hooks()
    frame, links = (None, {}) if is_first else segment.joined(tensors, hooks)
    if frame is None:
        kept = None if retained is None else retained()
        frame = SegmentFrame(segment.new_scope) if kept is None else kept.segment_frame(segment.new_scope)
        segment.begin(name, frame, hooks)
    call = SegmentCall(function, module, replay, DEFAULT_OPTIONS, None, arguments)
    call.links, call.first_save = links, frame.num_saves
    call.begin(tensors, input_hooks or hooks)
    frame.calls.append(call)
    frame._is_done = False
    _compat.push_hooks(frame, frame)
    try:
        output = function(*args, **kwargs)
    except BaseException:
        segment.end()  # no call joins one that failed
        raise
    finally:
        _compat.pop_hooks()
    call.forward_done(args, kwargs, tensors)
    frame._is_done, frame._last_node = True, call._last_node
    segment.call_done(frame, output)
    return output


class SegmentCall(ReplayableCall):
    """One call of a segment. Its saved tensors are in the segment's frame."""

    __slots__ = ("_scope", "first_save", "links")

    links: dict[int, Link]  # by the index of the tensor among its arguments
    first_save: int

    def _hold(self, tensors: list[Tensor], hooks: Hooks | None) -> None:
        links = self.links
        if len(links) == len(tensors):  # the usual case
            self._held, self._unpack_input = [None] * len(tensors), None
            return
        super()._hold([tensor for index, tensor in enumerate(tensors) if index not in links], hooks)
        held = iter(self._held)
        self._held = [None if index in links else next(held) for index in range(len(tensors))]
        self._input_versions = _compat.versions_of(tensors)
        self._requires_grad = [tensor.requires_grad for tensor in tensors]

    def _check_inputs(self, tensors: list[Tensor]) -> None:
        if len(self.links) < len(tensors):
            super()._check_inputs(tensors)

    def _inputs_changed(self, indices: list[int]) -> None:
        """Allow changes of links: the replay makes them again, like any in-place change within a region."""
        others = [index for index in indices if index not in self.links]
        if others:
            super()._inputs_changed(others)

    def _check_held(self) -> None:
        if len(self.links) < len(self._held):
            self._check_each(index for index in range(len(self._held)) if index not in self.links)

    @property
    def module(self) -> nn.Module:
        assert self._module is not None
        return self._module

    def again(self, scope: Any, made: dict[Link, Tensor], collector: Collector, modes: list[Any]) -> Any:
        """Replay the call in its environment; `made` holds the outputs of earlier calls, by link."""
        self._scope = scope
        try:
            return self._run_under(modes, self._inputs(made), collector)
        finally:
            self._scope = None

    def _inputs(self, made: dict[Link, Tensor]) -> list[Tensor]:
        links = self.links
        if len(links) == len(self._held):
            return [made[link] for link in links.values()]
        inputs = [None if index in links else self._input_tensor(index) for index in range(len(self._held))]
        for index, link in links.items():
            inputs[index] = made[link]  # the same object: inner segments recognise links by identity
        return inputs  # type: ignore[return-value]

    def _call_again(self, args: Any, kwargs: dict[str, Any]) -> Any:
        assert self._replay_function is not None
        return self._replay_function(self._scope, self._module, *args, **kwargs)


class SegmentFrame(Frame):
    """The saves and calls of a segment. Kept alive by the hooks of the tensors that autograd saved in it."""

    __slots__ = ("__weakref__", "_new_scope", "calls")

    def __init__(self, new_scope: Callable[[], Any]) -> None:
        super().__init__(_nothing, None, None, DEFAULT_OPTIONS, None, Arguments())
        self._new_scope = new_scope
        self._sequence = 0
        self.calls: list[SegmentCall] = []

    @property
    def name(self) -> Any:
        return self.calls[0].name

    @property
    def num_saves(self) -> int:
        return len(self._tokens)

    @property
    def num_own_saves(self) -> int:
        return -1

    def _call_of(self, save: int) -> int:
        """Return the number of the call that made a save."""
        return bisect_right([call.first_save for call in self.calls], save) - 1

    def _check_arguments(self) -> None:
        """Do nothing: `_run_again` checks the arguments of the calls that it runs."""

    def _input_tensors(self) -> list[Tensor]:
        return []

    def _stop(self, needed: list[bool]) -> StopAt:
        stop = super()._stop(needed)
        if stop.save < 0:
            return stop
        return stop._replace(
            node=stop.node - self.calls[self._call_of(stop.save)]._sequence
        )  # that of the segment is 0

    def _run_again(self, tensors: list[Tensor], collector: Collector, mode: Any = None) -> Any:
        """Replay the calls up to the last one with a needed save, or all while a profile is recorded."""
        needed = [index for index, is_needed in enumerate(collector.needed) if is_needed]
        is_whole = mode is not None and collector.stop < 0
        calls = self.calls if is_whole else self.calls[: self._call_of(max(needed, default=-1)) + 1]
        for call in calls:
            call._check_arguments()
        users = {link: number for number, call in enumerate(calls) for link in call.links.values()}  # the last of each
        made: dict[Link, Tensor] = {}
        scope = self._new_scope()
        environment, undo_environment = None, nothing
        try:
            with Replaying(collector.pack):
                for number, call in enumerate(calls):
                    modes = call._modes(mode)
                    if modes or call._environment is not environment:  # kernels under a mode may draw other numbers
                        if environment is None or not call._environment.follow(environment):
                            undo_environment()
                            undo_environment = nothing
                            undo_environment = call._environment.restore()
                        environment = call._environment
                    output = call.again(scope, made, collector, modes)
                    for link in call.links.values():
                        if users[link] == number:
                            made.pop(link, None)
                    if collector.is_stopped:
                        return
                    for index, tensor in enumerate(_tensors_of(output)):
                        if (number, index) in users:
                            made[number, index] = tensor
        finally:
            undo_environment()

    def _compared(self, collector: Collector) -> tuple[list[Any], list[Any]]:
        found, expected = super()._compared(collector)
        if len(found) < len(expected) and not any(collector.needed[len(found) :]):  # later calls were not replayed
            expected = expected[: len(found)]
        return found, expected

    def _check(self, collector: Collector, tensors: list[Tensor]) -> None:
        found, expected = self._compared(collector)
        if any(collector.needed[len(found) :]):  # it ended before a needed save
            expected = self._metadata
        if found == expected:
            return
        wrong = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found) - 1)
        name = self.calls[max(self._call_of(wrong), 0)].name
        changed_state = [state for call in self.calls for state, _ in call._state.lost()]
        raise divergence.diverged(
            name,
            divergence.mismatch(expected, found),
            None,
            preserves_rng=True,
            changed_state=changed_state,
            is_compiled=False,
        )


def _nothing() -> None:
    """The function of a segment's frame, which is never called: its calls have functions."""
