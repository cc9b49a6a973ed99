"""The replay engine: run a function, drop what autograd saves in it, and bring that back by running it again.

The forward of a region runs under saved-tensor hooks that drop every tensor: what autograd keeps is an integer that
tells the number of the save. The first one that the backward asks for runs the function again, under hooks that
collect the saves, up to the last one that is still needed. So per saved tensor there is no object for Python's garbage
collector to track; per call there is one `Frame` with its arguments and what `module_state`, `function_state` and
`environment` captured.

The replay is checked against the forward: it must save tensors of the same shapes, dtypes and devices in the same
order. A saved tensor that is changed in place afterwards raises, as it does in plain autograd.

Regions nest. The inputs of a region inside of another are saves of the outer one; so an inner replay that needs them
lets the outer one run first, and each level costs one more run. torch's own checkpoint, `lowtide.offload` and any other
saved-tensor hooks around a region get its inputs in the same way.

(torch.utils.checkpoint was the alternative, and was used before. It keeps several objects per saved tensor, looks at
positional tensors only, and has no decision per save; its bookkeeping cost about as much as the replay itself.)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError
from lowtide.memory.checksums import checksum
from lowtide.replay import divergence
from lowtide.replay.arguments import Arguments, Fingerprint
from lowtide.replay.environment import capture
from lowtide.replay.function_state import FunctionState
from lowtide.replay.module_state import Snapshot, snapshot_of

if TYPE_CHECKING:
    from lowtide.replay.retained import RetainedCall

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_INDEX_BITS = 20  # of a token; the rest is the number of the autograd node that saved the tensor
_INDEX_MASK = (1 << _INDEX_BITS) - 1

_replays = threading.local()
_lock_making = threading.Lock()


def is_recomputing() -> bool:
    """True while this thread replays a checkpointed region, and only then.

    >>> import lowtide
    >>> lowtide.is_recomputing()
    False
    """
    return replay_depth() > 0


def replay_depth() -> int:
    """How many replays this thread is in: one inside another where a replay asks for what another region saved."""
    return getattr(_replays, "depth", 0)


class ReplaysCounted:
    """A function whose second and later calls count as replays: for torch's own checkpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._has_run = function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        _replays.depth = replay_depth() + 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _replays.depth -= 1


class _Stop(BaseException):
    """Ends a replay that has all it needs. Not an `Exception`, which code in the region may catch."""


class Options(NamedTuple):
    """How a region is run. `determinism_check` is as in torch, and may be "values" too."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True


DEFAULT_OPTIONS = Options()


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
    """`function(*args, **kwargs)`, with what autograd saves in it dropped, and recomputed in the backward.

    - `module`: where `function` runs this module and reads nothing else, so that nothing else is looked for.
    - `replay`: called in the backward with the module and the arguments; by default `function` with the arguments.
    - `input_hooks`: pack and unpack for the tensors among the arguments; by default hooks further out get them.
    - `retained`: the op outputs of this call that are kept.
    - `contexts`: entered around the forward and around each replay.
    """
    arguments, tensors = Arguments.take(args, kwargs)
    last = None if module is None else _last_calls.get(module)
    if last is not None and arguments.is_like(last.arguments):
        arguments = last.arguments
    frame = Frame(function, module, replay, options, None if contexts is None else contexts[1], arguments)
    frame.retained = retained
    frame.begin(tensors, input_hooks or _compat.current_hooks())
    with saved_tensors_hooks(frame, frame), nullcontext() if contexts is None else contexts[0]:
        output = function(*args, **kwargs)
    frame.forward_done(args, kwargs, tensors)
    if module is not None:
        if last is None:
            last = _last_calls[module] = _LastCall()
        frame.share_with(last)
    return output


class _LastCall:
    """What calls of a module have in common, mostly."""

    __slots__ = ("arguments", "input_facts", "metadata")

    def __init__(self) -> None:
        self.arguments = Arguments()
        self.input_facts: list[int] = []
        self.metadata: list[Any] = []


_last_calls: weakref.WeakKeyDictionary[nn.Module, _LastCall] = weakref.WeakKeyDictionary()
_EMPTY: list[Any] = []  # before there is a replay; never written to


class Frame:
    """One call of a region, from its forward to its last replay. Kept alive by what autograd saved in the region.

    It is pack and unpack hook in one, so that there is no further object per call: called with a tensor it drops it
    and returns a token, called with a token it brings the tensor back.
    """

    __slots__ = (
        *("_arguments", "_context", "_environment", "_fingerprints", "_function", "_held", "_input_facts", "_is_done"),
        *("_lock", "_metadata", "_mutated_path", "_module", "_options", "_recomputed", "_replay_function"),
        *("_sequence", "_state", "_tokens", "_unpack_input", "_versions", "retained"),
    )

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
        self._function = function if replay is None else None  # it may be bound to much
        self._replay_function = replay
        self.retained: RetainedCall | None = None
        self._is_done = False
        self._mutated_path: Any = None
        self._metadata: list[Any] = []
        self._tokens: list[int] = []
        self._recomputed: list[Tensor | None] = _EMPTY
        self._versions: list[int] = _EMPTY
        self._lock: Any = None

    @property
    def name(self) -> Any:
        """What error messages call the region."""
        return self._module if self._module is not None else self._function

    # The forward.

    def begin(self, tensors: list[Tensor], hooks: Hooks | None) -> None:
        """Capture what the forward is about to see."""
        arguments, module = self._arguments, self._module
        self._fingerprints = None if arguments.objects is None else list(map(Fingerprint, arguments.objects))
        # Of each tensor its version and, as the lowest bit, whether it requires grad.
        versions = _compat.versions_of(tensors)
        self._input_facts = [
            version << 1 | tensor.requires_grad for tensor, version in zip(tensors, versions, strict=True)
        ]
        if hooks is None:
            self._held: list[Any] = list(map(_alias, tensors))
            self._unpack_input: Callable[[Any], Tensor] | None = None
        else:
            pack, self._unpack_input = hooks
            with torch.no_grad():
                self._held = [tensor if _is_held_itself(tensor) else pack(tensor.detach()) for tensor in tensors]
        if module is not None and arguments.callables is None:
            self._state: Snapshot | FunctionState = snapshot_of(module)
        else:
            self._state = FunctionState(self.name, arguments.callables or ())
        devices: Iterable[torch.device] = ()
        if _compat.accelerator() is not None:
            devices = [*self._state.devices(), *(tensor.device for tensor in tensors)]
        generators = self._state.generators()
        if arguments.generators is not None:
            generators = [*generators, *arguments.generators]
        self._environment = capture(devices, generators, preserve_rng_state=self._options.preserve_rng_state)
        self._sequence = _compat.sequence_number()

    @_compat.never_compiled
    def __call__(self, saved: Any) -> Any:
        return self.unpack(saved & _INDEX_MASK) if type(saved) is int else self._pack(saved)

    @_compat.never_compiled
    def _pack(self, tensor: Tensor) -> int:  # once per saved tensor: nothing here may cost a microsecond
        tokens = self._tokens
        index = len(tokens)
        token = _compat.sequence_number() << _INDEX_BITS | index
        tokens.append(token)
        self._metadata.append(metadata_of(tensor, self._options))
        if self.retained is not None:
            self.retained.saved(index, tensor)
        return token

    def forward_done(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """The forward is over: note what it changed."""
        self._is_done = True
        self._mutated_path = self._arguments.changed_container(args, kwargs, tensors)
        self._state = self._state.forward_done(runs_all=True)
        if self.retained is not None:
            self.retained.forward_done(len(self._tokens))

    def share_with(self, last: _LastCall) -> None:
        """Hold what the last call of the module holds, where that is the same: fewer objects wait for the backward."""
        if self._metadata == last.metadata:
            self._metadata = last.metadata
        if self._input_facts == last.input_facts:
            self._input_facts = last.input_facts
        last.metadata, last.input_facts, last.arguments = self._metadata, self._input_facts, self._arguments

    # The backward.

    def unpack(self, index: int) -> Tensor:
        """The saved tensor with this index: kept, or recomputed."""
        if self.retained is not None and (kept := self.retained.take(index)) is not None:
            return kept
        tensor = self._take(index)
        if tensor is None:
            with self._own_lock():
                tensor = self._take(index)  # another thread may just have brought it back
                if tensor is None:
                    _replay(self)
                    tensor = self._take(index)
        assert tensor is not None
        if _compat.version_of(tensor) != self._versions[index]:
            raise divergence.overwritten_activation(self.name, index, self._metadata[index])
        return tensor

    def _take(self, index: int) -> Tensor | None:
        """A recomputed tensor, which autograd holds from now on; None where there is none."""
        if index >= len(self._recomputed):
            return None
        tensor, self._recomputed[index] = self._recomputed[index], None
        return tensor

    def _own_lock(self) -> Any:
        """Backwards on several devices run in threads of their own, and may ask for saves of one region at once."""
        with _lock_making:
            if self._lock is None:
                self._lock = threading.RLock()
            return self._lock

    def replay(self) -> None:
        """Run the region again and have its saves here."""
        self._check_arguments()
        tensors = self._input_tensors()
        # What autograd has let go of since the forward is not needed.
        needed = [count > _UNUSED for count in _reference_counts(self._tokens)]
        retained = self.retained
        if retained is not None:
            retained.begin_replay(needed)
        collector = Collector(self._options, needed, self._stop(needed), retained)
        try:
            self._run_again(tensors, collector)
            is_right = retained is None or retained.replay_done()
        except Exception as error:
            if retained is None or not retained.may_have_caused(error):
                raise
            is_right = False
        if not is_right:
            # What the replay took was not what its ops make. Computing everything is always right.
            assert retained is not None
            retained.give_up()
            collector = Collector(self._options, needed, self._stop(needed), None)
            self._run_again(tensors, collector)
        self._check(collector, tensors)
        self._recomputed, self._versions = collector.tensors, collector.versions

    def _stop(self, needed: list[bool]) -> int:
        """The save at which a replay may stop; -1 for none."""
        last = len(needed) - 1
        while last >= 0 and not needed[last]:
            last -= 1
        if last < 0 or not self._options.early_stop:
            return -1
        node = _compat.running_node()
        # The op that saves the last needed tensor must have filled it by then. It is known by its node, which is the
        # one that asks first, unless the region has outputs that this backward does not start from.
        if node is None or _compat.sequence_of(node) + 1 != self._tokens[last] >> _INDEX_BITS:
            return -1
        return -1 if _compat.fills_later(node) else last

    def _run_again(self, tensors: list[Tensor], collector: Collector) -> Any:
        args, kwargs = self._arguments.build(tensors)
        modes: list[AbstractContextManager[Any]] = []
        lost = self._state.lost()
        if lost:  # more is in reach than is used: refuse only if the replay reads it
            modes.append(_compat.ReadGuard([tensor for _, tensor in lost], self._refuse))
        if self._context is not None:
            modes.append(self._context)
        if collector.mode is not None:
            modes.append(collector.mode)
        undo_state = self._state.restore()
        try:
            undo_environment = self._environment.restore()
            _replays.depth = replay_depth() + 1
            try:
                with torch.enable_grad(), saved_tensors_hooks(collector.pack, _as_it_is), _all(modes):
                    if self._replay_function is not None:
                        return self._replay_function(self._module, *args, **kwargs)
                    assert self._function is not None
                    return self._function(*args, **kwargs)
            finally:
                _replays.depth -= 1
                undo_environment()
        except _Stop:
            if not collector.is_stopped:
                raise
        except _compat.TorchCheckpointError as error:
            if isinstance(error, divergence.ReplayError):
                raise
            raise divergence.inner_checkpoint(self.name, error) from None
        finally:
            undo_state()
            collector.end()

    def _refuse(self, tensor: Tensor) -> None:
        names = [name for name, each in self._state.lost() if each is tensor]
        raise divergence.mutated_state(self.name, names[0])

    def _input_tensors(self) -> list[Tensor]:
        unpack = self._unpack_input
        if unpack is None:
            return self._held
        found = []
        for index, (held, facts) in enumerate(zip(self._held, self._input_facts, strict=True)):
            if isinstance(held, Tensor) and _is_held_itself(held):
                tensor = held
            else:
                try:
                    tensor = unpack(held)
                except (ChangedInPlaceError, divergence.OverwrittenError) as error:
                    path = self._arguments.path_of_tensor(index)
                    raise divergence.mutated_argument(self.name, path, "was changed in place") from error
                if tensor.requires_grad != bool(facts & 1) or tensor.grad_fn is not None:
                    tensor = tensor.detach().requires_grad_(bool(facts & 1))
            found.append(tensor)
        return found

    def _check_arguments(self) -> None:
        """Refuse arguments that are not what they were. What hooks further out hold, those have to check."""
        if self._mutated_path is not None:
            raise divergence.mutated_argument(self.name, self._mutated_path, "was changed by the region itself")
        for value, fingerprint in zip(self._arguments.objects or (), self._fingerprints or (), strict=True):
            if not fingerprint.still_holds(value):
                raise divergence.mutated_argument(self.name, self._arguments.path_of(value), "was changed")
        for index, (held, facts) in enumerate(zip(self._held, self._input_facts, strict=True)):
            is_ours = self._unpack_input is None or (isinstance(held, Tensor) and _is_held_itself(held))
            if is_ours and _compat.version_of(held) != facts >> 1:
                path = self._arguments.path_of_tensor(index)
                raise divergence.mutated_argument(self.name, path, "was changed in place")

    def _check(self, collector: Collector, tensors: list[Tensor]) -> None:
        """Raise if the replay saved other tensors than the forward did."""
        found, expected = collector.metadata, self._metadata
        if collector.is_stopped or not self._is_done:  # at least one of the two has only begun
            shared = min(len(found), len(expected))
            found, expected = found[:shared], expected[:shared]
        if found == expected:
            return
        is_missing = any(collector.needed[len(collector.tensors) :])
        if self._options.determinism_check != "none" or is_missing:
            forward_ops = divergence.graph_ops(None, self._sequence)
            raise divergence.diverged(
                self.name,
                divergence.mismatch(expected, found),
                divergence.first_difference(forward_ops, self._replayed_ops(tensors)),
                preserves_rng=self._options.preserve_rng_state,
                changed_state=[name for name, _ in self._state.lost()],
                is_compiled="compiled_function" in forward_ops,
            )

    def _replayed_ops(self, tensors: list[Tensor]) -> list[str] | None:
        """Run once more, with its graph this time, to see which ops a replay runs: only ever on the way to an error."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # collectives of a run on one rank alone would wait for the others
        since = _compat.sequence_number()
        try:
            output = self._run_again(tensors, Collector(self._options, [], -1, None))
        except Exception:
            return None
        return divergence.graph_ops(Arguments.take((output,), {})[1], since)


class Collector:
    """The pack hook of one replay: it keeps the saves that are needed."""

    __slots__ = (*("_options", "_retained", "is_stopped", "metadata", "mode", "needed", "stop", "tensors", "versions"),)

    def __init__(self, options: Options, needed: list[bool], stop: int, retained: RetainedCall | None) -> None:
        self._options = options
        self.needed, self.stop, self._retained = needed, stop, retained
        self.metadata: list[Any] = []
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.is_stopped = False
        self.mode: Any = None if retained is None else retained.replay_mode(self)

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.metadata)
        self.metadata.append(metadata_of(tensor, self._options))
        # Detached: a tensor with its history would keep the replay's graph alive, and what hangs on it.
        saved = tensor.detach()
        self.tensors.append(saved if index < len(self.needed) and self.needed[index] else None)
        self.versions.append(_compat.version_of(tensor))
        if self._retained is not None:
            self._retained.saved_again(index, tensor)
        if index == self.stop:
            self.is_stopped = True
            raise _Stop
        return saved  # for a gradient that the region itself computes

    def end(self) -> None:
        """Let go of what refers to this: the replay's graph refers to the hook, and may live on."""
        self._retained = self.mode = None


@_compat.never_compiled
def _as_it_is(packed: Tensor) -> Tensor:
    return packed


def _all(modes: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    if not modes:
        return nullcontext()
    stack = ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


def _reference_counts(tokens: list[int]) -> list[int]:
    return [sys.getrefcount(token) for token in tokens]


_UNUSED = _reference_counts([(2**70)])[0]  # of a token that autograd does not hold


@_compat.disable_dynamo
def _replay(frame: Frame) -> None:
    frame.replay()


def _alias(tensor: Tensor) -> Tensor:
    """The tensor without its history: changed in place later, it would come to hold the graph that holds it."""
    if _is_held_itself(tensor):
        return tensor
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad else alias


def _is_held_itself(tensor: Tensor) -> bool:
    """Parameters are not activations, and autograd saves no inference tensors; neither gets a history."""
    return isinstance(tensor, nn.Parameter) or tensor.is_inference()


# What is compared of a saved tensor and its recomputation. One tuple for all tensors that are alike, so that a region
# holds references and no objects.
_METADATA: dict[Any, Any] = {}
_MAX_METADATA = 4096


@_compat.never_compiled
def metadata_of(tensor: Tensor, options: Options) -> Any:
    """Shape, dtype and device; and a checksum if values are compared too."""
    try:
        metadata = _METADATA[tensor.shape, tensor.dtype, tensor.device]
    except (KeyError, TypeError):  # not seen before, or of a shape in symbols
        metadata = _new_metadata(tensor)
    return metadata if options.determinism_check != "values" else (*metadata, checksum(tensor))


def _new_metadata(tensor: Tensor) -> Any:
    metadata = (tensor.shape, tensor.dtype, tensor.device)
    if type(tensor) in _compat.PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(_METADATA) >= _MAX_METADATA:
            _METADATA.clear()
        _METADATA[metadata] = metadata
    return metadata
