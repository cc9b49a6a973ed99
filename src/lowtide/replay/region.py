"""The replay engine: run calls, drop what autograd saves in them, and recompute that in the backward.

A **region** is one call of a function (`checkpoint`) or of a module (the eager engine). The forward runs under
saved-tensor hooks that drop every tensor: autograd keeps an integer, the number of the save. The first one that the
backward unpacks runs the call again, under hooks that collect the saved tensors, up to the last one that is still
needed. So per saved tensor there is no object for Python's garbage collector to track; per region there is one `Frame`,
and per call one `ReplayableCall`.

A **segment** is a run of sibling module calls (`layers.3`, `layers.4`, ...) that share one frame. With one region per
layer, the input of every layer is kept. A segment keeps the input of its first call only, and other tensors that come
from outside (masks, positions). A tensor that a call gets from an earlier call of the segment is a link: it must be the
very tensor which that call returned, and the replay computes it again. Calls are joined while they run. A call begins a
new segment if none of its inputs is an output of the segment, if such an output was changed in place, or if other
saved-tensor hooks are in force, as inside another library's checkpoint.

The replay is checked against the forward: it must save tensors of the same shapes, dtypes and devices in the same
order. A saved tensor that is changed in place afterwards raises, as it does in plain autograd.

Regions and segments nest. The inputs of an inner region are saved tensors of the outer one: an inner replay that needs
them runs the outer one first, so each level costs one more run. torch's own checkpoint, `lowtide.offload` and any other
saved-tensor hooks around a region receive its inputs in the same way.

(torch.utils.checkpoint was the alternative. It keeps several objects per saved tensor and has no decision per save.)
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.autograd import version_of_saved
from lowtide.replay import divergence
from lowtide.replay.arguments import Arguments, is_held_itself, same, tensors_in
from lowtide.replay.object_state import nothing
from lowtide.replay.recomputing import (
    DEFAULT_OPTIONS,
    METADATA,
    NO_LINKS,
    NO_STOP,
    Collector,
    Hooks,
    Link,
    Options,
    ReplayableCall,
    Replaying,
    StopAt,
    metadata_of,
    new_metadata,
)

# Added to the number of a save to make its token: an integer object whose reference count shows whether autograd still
# holds it. (Python shares small integers.)
FIRST_TOKEN = 1 << 20

_replaying: dict[int, int] = {}  # threads, by the id of the frame that each replays


@_compat.never_compiled
def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    module: nn.Module | None = None,
    replay: Callable[..., Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
    input_hooks: Hooks | None = None,
    new_frame: MakeFrame | None = None,
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
    segment: OpenSegment | None = None,
    name: str = "",
) -> Any:
    """Run `function(*args, **kwargs)`; drop what autograd saves in it, and recompute that in the backward.

    - `module`: set if `function` runs this module and reads nothing else, so that only its state is captured.
    - `replay`: called in the backward with the segment's scope (None for a region), the module and the arguments; by
      default `function` with the arguments.
    - `input_hooks`: pack and unpack hooks for the tensors among the arguments; by default the outer hooks.
    - `new_frame`: makes the frame, if this call begins one; by default `Frame`.
    - `contexts`: entered around the forward and around each replay.
    - `segment`: what this call, of the layer `name`, joins or begins.
    """
    arguments, tensors = Arguments.take(args, kwargs, module)
    hooks = _compat.current_hooks()
    frame, links = (None, NO_LINKS) if segment is None else segment.joined(tensors, hooks)
    if frame is None:
        context, new_scope = contexts and contexts[1], None if segment is None else segment.new_scope
        frame = (new_frame or Frame)(options, context, new_scope)
        if segment is not None:
            segment.begin(name, frame, hooks)
    call = ReplayableCall(function, module, replay, arguments, links, len(frame.tokens))
    call.begin(tensors, input_hooks or hooks, preserve_rng_state=options.preserve_rng_state)
    if call.state.is_lazy:  # the forward makes parameters and draws their values, which no replay can repeat
        if segment is not None:
            segment.end()
        with contexts[0] if contexts is not None else nullcontext():
            return function(*args, **kwargs)
    frame.calls.append(call)
    frame.is_done = False
    _compat.push_hooks(frame, frame)
    try:
        if contexts is None:
            output = function(*args, **kwargs)
        else:
            with contexts[0]:
                output = function(*args, **kwargs)
    except BaseException:
        if segment is not None:
            segment.end()  # no call joins one that failed
        raise
    finally:
        _compat.pop_hooks()
    frame.call_done(call, args, kwargs, tensors)
    if segment is not None:
        segment.call_done(frame, output)
    return output


_EMPTY: list[Any] = []  # shared by all frames before their first replay; never written to


class Frame:
    """A region or segment, from its forward to its last replay. Kept alive as the hook of the tensors saved in it.

    It is pack and unpack hook in one, to save objects: called with a tensor it drops it and returns a token, called
    with a token it returns the recomputed tensor. The saves of all calls are numbered in one sequence.

    `new_scope` is given for segments: it makes an object that the calls of one replay share.
    """

    # fmt: off
    __slots__ = (
        "__weakref__", "_context", "_is_default", "_last_node", "_metadata", "_new_scope", "_options", "_recomputed",
        "_versions", "calls", "is_done", "tokens",
    )
    # fmt: on

    def __init__(
        self, options: Options, context: AbstractContextManager[Any] | None, new_scope: Callable[[], Any] | None
    ) -> None:
        self._options, self._context, self._new_scope = options, context, new_scope
        self._is_default = options.determinism_check == "default"
        self.calls: list[ReplayableCall] = []
        self.is_done = False
        self._last_node = -1
        self._metadata: list[Any] = []
        self.tokens: list[int] = []
        self._recomputed: list[Tensor | None] = _EMPTY
        self._versions: list[int] = _EMPTY

    @property
    def num_own_saves(self) -> int:
        """The number of tensors saved so far; -1 if other calls follow, which replays run too."""
        return len(self.tokens) if self._new_scope is None else -1

    def _call_of(self, save: int) -> int:
        """Return the number of the call that made a save."""
        return bisect_right([call.first_save for call in self.calls], save) - 1 if len(self.calls) > 1 else 0

    @_compat.never_compiled
    def __call__(self, saved: Any) -> Any:  # runs twice per saved tensor: every microsecond counts
        if type(saved) is not int:
            tokens = self.tokens
            token = len(tokens) + FIRST_TOKEN
            tokens.append(token)
            try:
                self._metadata.append(
                    METADATA[metadata_of(saved)] if self._is_default else self._options.metadata(saved)
                )
            except (KeyError, TypeError):
                self._metadata.append(new_metadata(saved))
            return token
        index, recomputed = saved - FIRST_TOKEN, self._recomputed
        if index < len(recomputed):
            tensor = recomputed[index]
            if tensor is not None and version_of_saved(tensor) == self._versions[index]:
                recomputed[index] = None  # autograd holds it from now on
                return tensor
        # Compiled autograd traces this hook, and must not trace the replay.
        return _unpack(self, index) if torch.compiler.is_compiling() else self.unpack(index)

    def call_done(
        self, call: ReplayableCall, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Record what a call's forward changed. A region shares equal metadata with the module's last call."""
        self.is_done, self._last_node = True, _compat.sequence_number() - 1
        last = call.forward_done(args, kwargs, tensors)
        if last is not None and self._new_scope is None:
            self._metadata = last.metadata = same(last.metadata, self._metadata)

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor with this index, replaying the calls if it is not available."""
        tensor = self._take(index)
        if tensor is None:
            # Backwards of several devices run in threads of their own, and may unpack saves of one region at once.
            me = threading.get_ident()
            while _replaying.setdefault(id(self), me) != me:
                time.sleep(0)
            try:
                tensor = self._take(index)  # another thread may have replayed meanwhile
                if tensor is None:
                    self.replay()
                    tensor = self._take(index)
            finally:
                _replaying.pop(id(self), None)
            assert tensor is not None
        if version_of_saved(tensor) != self._versions[index]:
            name = self.calls[self._call_of(index)].name
            raise divergence.overwritten_activation(name, index, self._metadata[index])
        return tensor

    def _take(self, index: int) -> Tensor | None:
        if index >= len(self._recomputed):
            return None
        tensor, self._recomputed[index] = self._recomputed[index], None
        return tensor

    def replay(self) -> None:
        """Run the calls again and store their saves."""
        tensors, needed = self._first_inputs(), self._needed()
        collector = Collector(self._options, needed, self._stop(needed))
        self._run_again(tensors, collector)
        self._finish(collector, tensors)

    def _first_inputs(self) -> list[Tensor]:
        """Return the inputs of the first call, also for a second run: torch's checkpoint unpacks each only once."""
        self.calls[0].check_arguments()
        return self.calls[0].inputs({})

    def _needed(self) -> list[bool]:
        """Return, for each save, whether autograd still holds it."""
        counts = list(map(sys.getrefcount, self.tokens))
        return [count > _UNUSED for count in counts] if _UNUSED in counts else [True] * len(counts)

    def _stop(self, needed: list[bool]) -> StopAt:
        """Return the save at which a replay may stop, with its autograd node.

        That is the last needed save, if the running node made it. Usually it did, as the last node of the region is the
        first that unpacks. Of the running node it is known whether its op fills a tensor before saving it.
        """
        last = len(needed) - 1
        while last >= 0 and not needed[last]:
            last -= 1
        node = _compat.running_node()
        if last < 0 or not self._options.early_stop or node is None or _compat.fills_later(node):
            return NO_STOP
        number = _compat.sequence_of(node)
        return StopAt(last, number - self.calls[self._call_of(last)].sequence, self._is_end(last, number, node))

    def _is_end(self, save: int, number: int, node: Any) -> bool:
        """Return whether nothing is left to replay after this save, which the running node made.

        (Letting one more op run would be faster on small tensors, but its output would add to the peak.) With a process
        group a replay always stops: collectives may follow that autograd does not see.
        """
        is_last = save == len(self._metadata) - 1 and number == self._last_node
        return is_last and _compat.saves_results(node) and not _is_distributed()

    def _run_again(self, tensors: list[Tensor], collector: Collector, mode: Any = None) -> Any:
        """Replay the calls up to the last with a needed save (all while profiling); return the last one's output."""
        calls = self.calls
        users: dict[Link, int] = {}  # the last call that uses an output of an earlier one
        made: dict[Link, Tensor] = {}  # these outputs
        if len(calls) > 1:
            is_profiling = mode is not None and collector.stop < 0
            if not is_profiling and True in collector.needed:
                last = len(collector.needed) - 1 - collector.needed[::-1].index(True)
                calls = calls[: self._call_of(last) + 1]
            for call in calls[1:]:
                call.check_arguments()
            users = {link: number for number, call in enumerate(calls) for link in call.links.values()}
        scope = None if self._new_scope is None else self._new_scope()
        output: Any = None
        environment, undo_environment = None, nothing
        _compat.keep_prefetches_useful()
        try:
            with Replaying(collector.pack):
                for number, call in enumerate(calls):
                    modes = call.modes(self._context, mode)
                    if modes or call.environment is not environment:  # kernels under a mode may draw other numbers
                        if environment is None or not call.environment.follow(environment):
                            undo_environment()
                            undo_environment = nothing
                            undo_environment = call.environment.restore()
                        environment = call.environment
                    if number:
                        tensors = call.inputs(made)
                    output = call.run_again(scope, tensors, modes, collector)
                    if collector.is_stopped:
                        return None
                    if users:
                        for link in call.links.values():
                            if users[link] == number:
                                made.pop(link, None)
                        each = enumerate(_tensors_of(output))
                        made.update({(number, index): tensor for index, tensor in each if (number, index) in users})
        finally:
            undo_environment()
        return output

    def _finish(self, collector: Collector, tensors: list[Tensor]) -> None:
        self._check(collector, tensors)
        self._recomputed, self._versions = collector.tensors, collector.versions

    def _compared(self, collector: Collector) -> tuple[list[Any], list[Any]]:
        """Return the metadata of the replay's and of the forward's saves that are to be compared."""
        found: list[Any] = collector.metadata
        expected: list[Any] = self._metadata
        if collector.is_stopped or not self.is_done:  # at least one of the two is incomplete
            shared = min(len(found), len(expected))
            found, expected = found[:shared], expected[:shared]
        elif len(self.calls) > 1 and len(found) < len(expected) and not any(collector.needed[len(found) :]):
            expected = expected[: len(found)]  # later calls were not replayed
        return found, expected

    def _check(self, collector: Collector, tensors: list[Tensor]) -> None:
        """Raise if the replay saved other tensors than the forward did."""
        found, expected = self._compared(collector)
        num_saved = len(collector.tensors)
        is_missing = num_saved < len(collector.needed) and any(collector.needed[num_saved:])
        if found == expected and not is_missing:
            return
        if self._options.determinism_check != "none" or is_missing:
            expected = self._metadata if is_missing else expected
            pairs = enumerate(zip(found, expected, strict=False))
            wrong = next((index for index, (now, then) in pairs if now != then), len(found) - 1)
            forward_ops = divergence.graph_ops(None, self.calls[0].sequence)
            raise divergence.diverged(
                self.calls[max(self._call_of(wrong), 0)].name,
                divergence.mismatch(expected, found),
                divergence.first_difference(forward_ops, self._replayed_ops(tensors)),
                preserves_rng=self._options.preserve_rng_state,
                changed_state=[name for call in self.calls for name, _ in call.state.lost()],
                is_compiled="compiled_function" in forward_ops,
            )

    def _replayed_ops(self, tensors: list[Tensor]) -> list[str] | None:
        """Run once more and list the ops in the replay's graph, for an error message."""
        if _is_distributed():
            return None  # collectives on one rank alone would wait for the others
        since = _compat.sequence_number()
        try:
            output = self._run_again(tensors, Collector(self._options, [], NO_STOP))
        except Exception:
            return None
        return divergence.graph_ops(Arguments.take((output,), {})[1], since)


MakeFrame = Callable[[Options, AbstractContextManager[Any] | None, Callable[[], Any] | None], Frame]

_UNUSED = next(map(sys.getrefcount, [int("9" * 20)]))  # the reference count of a token that autograd does not hold


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@_compat.disable_dynamo
def _unpack(frame: Frame, index: int) -> Tensor:
    return frame.unpack(index)


class OpenSegment:
    """The segment that calls join during one forward, or during one replay of an outer region.

    `new_scope` makes an object that the calls of one replay share; it is passed to their `replay`. `first` is the name
    of the call that the segment began with.
    """

    __slots__ = ("_frame", "_hooks", "_outputs", "first", "new_scope")

    def __init__(self, new_scope: Callable[[], Any]) -> None:
        self.new_scope, self.first = new_scope, ""
        self._frame: weakref.ref[Frame] | None = None
        self._hooks = 0  # the id of the hooks in force when the frame began
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, Link]] = {}  # outputs of the calls so far, by id

    def joined(self, tensors: list[Tensor], hooks: Hooks | None) -> tuple[Frame | None, dict[int, Link]]:
        """Return the frame that a call with these inputs continues, or None, and the links among the inputs."""
        frame = None if self._frame is None or self._hooks != _id_of(hooks) else self._frame()
        links: dict[int, Link] = {}
        for index, tensor in enumerate(tensors) if frame is not None else ():
            known = self._outputs.get(id(tensor))
            if known is not None and known[0]() is tensor and version_of_saved(tensor) == known[1]:
                links[index] = known[2]
        return (frame if links else None), links

    def is_continued_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments, not the first of the segment, would join it."""
        return self.joined(Arguments.take(args, kwargs)[1], _compat.current_hooks())[0] is not None

    def begin(self, name: str, frame: Frame, hooks: Hooks | None) -> None:
        self.first, self._frame, self._hooks = name, weakref.ref(frame), _id_of(hooks)
        self._outputs = {}

    def end(self) -> None:
        """Let no more calls join: the next one begins a new frame."""
        self._frame = None

    def call_done(self, frame: Frame, output: Any) -> None:
        number, outputs = len(frame.calls) - 1, self._outputs
        for index, tensor in enumerate(_tensors_of(output)):
            if is_held_itself(tensor):
                continue
            version = version_of_saved(tensor)
            known = outputs.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1] != version:
                # Autograd keeps a frame alive by its saves. Where there are none yet, as after frozen layers, its
                # outputs do: through the callback, which a weak reference holds until its tensor is freed.
                callback = None if frame.tokens else functools.partial(_ignore, frame)
                outputs[id(tensor)] = weakref.ref(tensor, callback), version, (number, index)


def _tensors_of(output: Any) -> Sequence[Tensor]:
    return (output,) if type(output) is Tensor else list(tensors_in(output))


def _ignore(*_: object) -> None:
    """Do nothing: the callback of a weak reference, bound to an object that is to live as long as the tensor."""


def _id_of(hooks: Hooks | None) -> int:
    """Return the id of the object that the pack hook is bound to: a bound method is a new object each time."""
    return 0 if hooks is None else id(getattr(hooks[0], "__self__", hooks[0]))
