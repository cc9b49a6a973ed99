"""The replay engine: run a function, drop what autograd saves in it, and recompute that in the backward.

`checkpoint` calls `run` for a function, the eager engine for each module call that a plan recomputes. The forward runs
under saved-tensor hooks that drop every tensor: autograd keeps an integer, the number of the save. The first one that
the backward unpacks runs the function again, under hooks that collect the saved tensors, up to the last one that is
still needed. So per saved tensor there is no object for Python's garbage collector to track; per call there is one
`Frame` with its arguments and what `module_state`, `function_state` and `environment` captured.

The replay is checked against the forward: it must save tensors of the same shapes, dtypes and devices in the same
order. A saved tensor that is changed in place afterwards raises, as it does in plain autograd.

Regions nest. The inputs of an inner region are saved tensors of the outer one: an inner replay that needs them runs the
outer one first, so each level costs one more run. torch's own checkpoint, `lowtide.offload` and any other saved-tensor
hooks around a region receive its inputs in the same way.

(torch.utils.checkpoint was the alternative. It keeps several objects per saved tensor and has no decision per save.)
"""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.checkpoint import TorchCheckpointError
from lowtide._compat.dispatch import ReadGuard
from lowtide.errors import ChangedInPlaceError
from lowtide.replay import divergence, environment
from lowtide.replay.arguments import Arguments, Fingerprint, LastCall, alias_of, is_held_itself, same
from lowtide.replay.function_state import FunctionState
from lowtide.replay.module_state import ModuleSnapshot, snapshot_of
from lowtide.replay.recomputing import (
    DEFAULT_OPTIONS,
    METADATA,
    NO_STOP,
    Collector,
    Options,
    Replaying,
    Stop,
    StopAt,
    facts_of,
    new_metadata,
)

if TYPE_CHECKING:
    from lowtide.replay.retained import RetainedCall

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# Added to the number of a save to make its token: an integer object whose reference count shows whether autograd still
# holds it. (Python shares small integers.)
FIRST_TOKEN = 1 << 20

_replaying: dict[int, int] = {}  # threads, by the id of the frame that each replays
_requires_grad, _device = operator.attrgetter("requires_grad"), operator.attrgetter("device")


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
    retained: RetainedCall | None = None,
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
) -> Any:
    """Run `function(*args, **kwargs)`; drop what autograd saves in it, and recompute that in the backward.

    - `module`: set if `function` runs this module and reads nothing else, so that only its state is captured.
    - `replay`: called in the backward with the module and the arguments; by default `function` with the arguments.
    - `input_hooks`: pack and unpack hooks for the tensors among the arguments; by default the outer hooks.
    - `retained`: the op outputs of this call that are retained.
    - `contexts`: entered around the forward and around each replay.
    """
    arguments, tensors = Arguments.take(args, kwargs, module)
    kind = Frame if retained is None else retained.frame
    frame = kind(function, module, replay, options, None if contexts is None else contexts[1], arguments)
    frame.begin(tensors, input_hooks or _compat.current_hooks())
    _compat.push_hooks(frame, frame)
    try:
        if contexts is None:
            output = function(*args, **kwargs)
        else:
            with contexts[0]:
                output = function(*args, **kwargs)
    finally:
        _compat.pop_hooks()
    frame.forward_done(args, kwargs, tensors)
    return output


_EMPTY: list[Any] = []  # shared by all frames before their first replay; never written to


class ReplayableCall:
    """One call that may run again: its inputs, and the state, random numbers and modes that it read."""

    # fmt: off
    __slots__ = (
        "_arguments", "_context", "_environment", "_fingerprints", "_function", "_held", "_input_versions", "_is_done",
        "_last_node", "_module", "_mutated_path", "_options", "_replay_function", "_requires_grad", "_sequence",
        "_state", "_unpack_input",
    )
    # fmt: on

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        replay: Callable[..., Any] | None,
        options: Options,
        context: AbstractContextManager[Any] | None,
        arguments: Arguments,
    ) -> None:
        self._module, self._options, self._context, self._arguments = module, options, context, arguments
        self._function = function if replay is None else None  # it may hold much alive
        self._replay_function = replay
        self._is_done = False
        self._last_node = -1
        self._mutated_path: Any = None

    @property
    def name(self) -> Any:
        """The module or function that error messages name."""
        return self._module if self._module is not None else self._function

    def begin(self, tensors: list[Tensor], hooks: Hooks | None) -> None:
        """Capture the state that the forward will read."""
        self._hold(tensors, hooks)
        arguments, module = self._arguments, self._module
        self._fingerprints = None if arguments.objects is None else list(map(Fingerprint, arguments.objects))
        if module is not None and arguments.callables is None:
            self._state: ModuleSnapshot | FunctionState = snapshot_of(module)
        else:
            self._state = FunctionState(self.name, arguments.callables or ())
        devices = chain(self._state.devices(), map(_device, tensors))
        generators = self._state.generators()
        if arguments.generators is not None:
            generators = [*generators, *arguments.generators]
        self._environment = environment.capture(
            devices, generators, preserve_rng_state=self._options.preserve_rng_state
        )
        self._sequence = _compat.sequence_number()

    def _hold(self, tensors: list[Tensor], hooks: Hooks | None) -> None:
        self._input_versions = _compat.versions_of(tensors)
        self._requires_grad = list(map(_requires_grad, tensors))
        if hooks is None:
            self._held: list[Any] = list(map(alias_of, tensors))
            self._unpack_input: Callable[[Any], Tensor] | None = None
        else:
            pack, self._unpack_input = hooks
            with torch.enable_grad():  # see `Collector._may_stop`
                self._held = [tensor if is_held_itself(tensor) else pack(tensor.detach()) for tensor in tensors]

    def forward_done(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> LastCall | None:
        """Record what the forward changed; return what the module's next call may share, None for a function."""
        self._is_done = True
        self._last_node = _compat.sequence_number() - 1
        if self._arguments.has_containers:
            self._mutated_path = self._arguments.changed_container(args, kwargs, tensors)
        self._check_inputs(tensors)
        self._state = state = self._state.forward_done(runs_all=True)
        if not isinstance(state, ModuleSnapshot):
            return None
        last = state.tree.last_call
        last.arguments = self._arguments
        return last

    def _check_inputs(self, tensors: list[Tensor]) -> None:
        """Record whether the forward changed its inputs in place: a replay is then refused."""
        versions = _compat.versions_of(tensors)
        if versions != self._input_versions:
            self._inputs_changed([i for i, version in enumerate(versions) if version != self._input_versions[i]])

    def _inputs_changed(self, indices: list[int]) -> None:
        self._mutated_path = self._arguments.path_of_tensor(indices[0])

    def _modes(self, mode: Any) -> list[AbstractContextManager[Any]]:
        """Return the contexts for a replay, given a dispatch mode or None."""
        modes = [each for each in (self._context, mode) if each is not None]
        lost = self._state.lost()
        if lost:  # captured state may be unused: refuse only if the replay reads it, even by an op that does not run
            modes.append(ReadGuard([tensor for _, tensor in lost], self._refuse))
        return modes

    def _run_under(self, modes: list[AbstractContextManager[Any]], tensors: list[Tensor], collector: Collector) -> Any:
        """Run the call again with the state that it read; random states, torch's modes and hooks are in force."""
        args, kwargs = self._arguments.build(tensors)
        undo_state = self._state.restore(is_done=self._is_done)
        try:
            collector.begin()
            if not modes:
                return self._call_again(args, kwargs)
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return self._call_again(args, kwargs)
        except Stop:
            if not collector.is_stopped:
                raise
        except TorchCheckpointError as error:
            if isinstance(error, divergence.ReplayError):
                raise
            raise divergence.inner_checkpoint(self.name, error) from None
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):  # an input is a leaf in the replay
                raise divergence.changes_its_input(self.name) from error
            raise
        finally:
            undo_state()

    def _call_again(self, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        if self._replay_function is not None:
            return self._replay_function(self._module, *args, **kwargs)
        assert self._function is not None
        return self._function(*args, **kwargs)

    def _refuse(self, tensor: Tensor) -> None:
        names = [name for name, each in self._state.lost() if each is tensor]
        raise divergence.mutated_state(self.name, names[0])

    def _input_tensors(self) -> list[Tensor]:
        return self._held if self._unpack_input is None else list(map(self._input_tensor, range(len(self._held))))

    def _input_tensor(self, index: int) -> Tensor:
        held, requires_grad = self._held[index], self._requires_grad[index]
        if self._unpack_input is None or (isinstance(held, Tensor) and is_held_itself(held)):
            return held
        try:
            tensor = self._unpack_input(held)
        except (ChangedInPlaceError, divergence.OverwrittenError) as error:
            path = self._arguments.path_of_tensor(index)
            raise divergence.mutated_argument(self.name, path, "was changed in place") from error
        if tensor.requires_grad != requires_grad or tensor.grad_fn is not None:
            return tensor.detach().requires_grad_(requires_grad)
        return tensor

    def _check_arguments(self) -> None:
        """Raise if an argument has changed. Inputs that outer hooks hold are checked by those hooks."""
        if self._mutated_path is not None:
            raise divergence.mutated_argument(self.name, self._mutated_path, "was changed by the region itself")
        if self._fingerprints is not None:
            for value, fingerprint in zip(self._arguments.objects or (), self._fingerprints, strict=True):
                if not fingerprint.still_holds(value):
                    raise divergence.mutated_argument(self.name, self._arguments.path_of(value), "was changed")
        self._check_held()

    def _check_held(self) -> None:
        if self._unpack_input is not None or _compat.versions_of(self._held) != self._input_versions:
            self._check_each(range(len(self._held)))

    def _check_each(self, indices: Iterable[int]) -> None:
        for index in indices:
            held = self._held[index]
            is_ours = self._unpack_input is None or (isinstance(held, Tensor) and is_held_itself(held))
            if is_ours and _compat.version_of(held) != self._input_versions[index]:
                path = self._arguments.path_of_tensor(index)
                raise divergence.mutated_argument(self.name, path, "was changed in place")


class Frame(ReplayableCall):
    """One call of a region, from its forward to its last replay. Kept alive as the hook of the tensors saved in it.

    It is pack and unpack hook in one, to save objects: called with a tensor it drops it and returns a token, called
    with a token it returns the recomputed tensor.
    """

    __slots__ = ("_is_default", "_metadata", "_recomputed", "_tokens", "_versions")

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        replay: Callable[..., Any] | None,
        options: Options,
        context: AbstractContextManager[Any] | None,
        arguments: Arguments,
    ) -> None:
        super().__init__(function, module, replay, options, context, arguments)
        self._metadata: list[Any] = []
        self._is_default = options.determinism_check == "default"
        self._tokens: list[int] = []
        self._recomputed: list[Tensor | None] = _EMPTY
        self._versions: list[int] = _EMPTY

    @property
    def num_own_saves(self) -> int:
        """The number of tensors saved so far; -1 if other calls follow, which replays run too."""
        return len(self._tokens)

    @_compat.never_compiled
    def __call__(self, saved: Any) -> Any:  # runs twice per saved tensor: every microsecond counts
        if type(saved) is not int:
            tokens = self._tokens
            token = len(tokens) + FIRST_TOKEN
            tokens.append(token)
            try:
                self._metadata.append(METADATA[facts_of(saved)] if self._is_default else self._options.facts(saved))
            except (KeyError, TypeError):
                self._metadata.append(new_metadata(saved))
            return token
        index = saved - FIRST_TOKEN
        if index < len(self._recomputed):
            tensor = self._recomputed[index]
            if tensor is not None and _compat.version_of_saved(tensor) == self._versions[index]:
                self._recomputed[index] = None  # autograd holds it from now on
                return tensor
        # Compiled autograd traces this hook, and must not trace the replay.
        return _unpack(self, index) if torch.compiler.is_compiling() else self.unpack(index)

    def forward_done(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> LastCall | None:
        """Also share equal metadata with the module's last call."""
        last = super().forward_done(args, kwargs, tensors)
        if last is not None:
            self._metadata = last.metadata = same(last.metadata, self._metadata)
            self._input_versions = last.input_versions = same(last.input_versions, self._input_versions)
            self._requires_grad = last.requires_grad = same(last.requires_grad, self._requires_grad)
        return last

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor with this index, replaying the region if it is not available."""
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
        if _compat.version_of_saved(tensor) != self._versions[index]:
            raise divergence.overwritten_activation(self.name, index, self._metadata[index])
        return tensor

    def _take(self, index: int) -> Tensor | None:
        if index >= len(self._recomputed):
            return None
        tensor, self._recomputed[index] = self._recomputed[index], None
        return tensor

    def replay(self) -> None:
        """Run the region again and store its saves."""
        self._check_arguments()
        tensors, needed = self._input_tensors(), self._needed()
        collector = self._options.collector(needed, self._stop(needed))
        self._run_again(tensors, collector)
        self._finish(collector, tensors)

    def _needed(self) -> list[bool]:
        """Return, for each save, whether autograd still holds it."""
        counts = list(map(sys.getrefcount, self._tokens))
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
        return StopAt(last, number - self._sequence, self._is_end(last, number, node))

    def _is_end(self, save: int, number: int, node: Any) -> bool:
        """Return whether nothing is left of the region after this save, which the running node made.

        (Letting one more op run would be faster on small tensors, but its output would add to the peak.) With a process
        group a replay always stops: collectives may follow that autograd does not see.
        """
        is_last = save == len(self._metadata) - 1 and number == self._last_node
        return is_last and _compat.saves_results(node) and not _is_distributed()

    def _finish(self, collector: Collector, tensors: list[Tensor]) -> None:
        self._check(collector, tensors)
        self._recomputed, self._versions = collector.tensors, collector.versions

    def _run_again(self, tensors: list[Tensor], collector: Collector, mode: Any = None) -> Any:
        modes = self._modes(mode)
        _compat.keep_prefetches_useful()
        undo_environment = self._environment.restore()
        try:
            with Replaying(collector.pack):
                return self._run_under(modes, tensors, collector)
        finally:
            undo_environment()

    def _compared(self, collector: Collector) -> tuple[list[Any], list[Any]]:
        """Return the metadata of the replay's and of the forward's saves that are to be compared."""
        replayed: list[Any] = collector.metadata
        expected: list[Any] = self._metadata
        if collector.is_stopped or not self._is_done:  # at least one of the two is incomplete
            shared = min(len(replayed), len(expected))
            replayed, expected = replayed[:shared], expected[:shared]
        return replayed, expected

    def _check(self, collector: Collector, tensors: list[Tensor]) -> None:
        """Raise if the replay saved other tensors than the forward did."""
        replayed, expected = self._compared(collector)
        if replayed == expected:
            return
        is_missing = any(collector.needed[len(collector.tensors) :])
        if self._options.determinism_check != "none" or is_missing:
            forward_ops = divergence.graph_ops(None, self._sequence)
            raise divergence.diverged(
                self.name,
                divergence.mismatch(expected, replayed),
                divergence.first_difference(forward_ops, self._replayed_ops(tensors)),
                preserves_rng=self._options.preserve_rng_state,
                changed_state=[name for name, _ in self._state.lost()],
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


_UNUSED = next(map(sys.getrefcount, [int("9" * 20)]))  # the reference count of a token that autograd does not hold


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@_compat.disable_dynamo
def _unpack(frame: Frame, index: int) -> Tensor:
    return frame.unpack(index)
