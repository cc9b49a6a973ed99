"""Run one call again: its inputs and state, the hooks that collect what it saves, and the replay depth of the thread.

`region` makes a `ReplayableCall` for each call that it may replay. Before the forward it captures what the forward will
read: arguments, module state, random numbers and torch's modes. The replay restores all of it, and is refused if an
input or a weight was changed in place since.

A replay runs inside `Replaying`, with the pack hook of a `Collector`. The collector stores the saved tensors that the
backward still needs, records the metadata by which the replay is checked, and stops the replay after the last needed
tensor by raising `Stop`. `checksum` is what `determinism_check="values"` compares.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.autograd import TorchCheckpointError, version_of_saved
from lowtide._compat.dispatch import ReadGuard
from lowtide.errors import ChangedInPlaceError
from lowtide.replay import divergence, environment
from lowtide.replay.arguments import Arguments, Fingerprint, LastCall, alias_of, is_held_itself, same
from lowtide.replay.function_state import FunctionState
from lowtide.replay.module_state import ModuleSnapshot, snapshot_of
from lowtide.store import codecs

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack


class _Replays(threading.local):
    depth = 0


_replays = _Replays()


def is_recomputing() -> bool:
    """True while this thread replays a checkpointed region, and only then.

    >>> import lowtide
    >>> lowtide.is_recomputing()
    False
    """
    return _replays.depth > 0


def replay_depth() -> int:
    """Return the number of nested replays in this thread. A replay that needs the saves of an outer region nests."""
    return _replays.depth


class one_deeper:
    """A context that counts as a replay in this thread."""

    def __enter__(self) -> None:
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1


class Replaying:
    """A context for a replay: gradients are enabled, and `pack` receives every tensor that autograd saves."""

    __slots__ = ("_had_grad", "_pack")

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        self._pack = pack

    def __enter__(self) -> None:
        self._had_grad = torch.is_grad_enabled()
        _compat.push_hooks(self._pack, _as_it_is)
        _compat.set_grad_enabled(True)
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1
        _compat.set_grad_enabled(self._had_grad)
        _compat.pop_hooks()


@_compat.never_compiled
def _as_it_is(packed: Tensor) -> Tensor:
    return packed


_CHUNK = 1 << 20


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim int64 tensor on the same device that depends on every bit and on the order of elements.

    Sums bits times position-dependent odd weights, in integer arithmetic: equal bits give equal sums on every device,
    in any order of summation. Needs 8 MiB beside the tensor, whatever its size, and no synchronisation.
    """
    with torch.no_grad(), _compat.without_modes():
        values = tensor.detach()
        if values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values)
        raw = codecs.as_integers(values.contiguous().reshape(-1))
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for start in range(0, raw.numel(), _CHUNK):
            chunk = raw[start : start + _CHUNK].to(torch.int64)
            total = total * 31 + (chunk * _weights(raw.device)[: chunk.numel()]).sum()
        return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd numbers scattered by Knuth's multiplicative hashing constant: a swap of two unequal elements shows.
    return torch.arange(1, 2 * _CHUNK, 2, dtype=torch.int64, device=device) * 2654435761


class Stop(BaseException):
    """Raised to end a replay early. Not an `Exception`, which code in the region may catch."""


class StopAt(NamedTuple):
    """Where a replay may stop."""

    save: int  # the index of the save after which it may; -1 for nowhere
    node: int  # the number of the autograd node that makes this save
    at_end: bool = False  # nothing follows: returning costs less than `Stop`, which passes twenty frames of torch


NO_STOP = StopAt(-1, 0)


class Options(NamedTuple):
    """Options of a region. `determinism_check` is as in torch, with "values" in addition."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    def metadata(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the metadata that a saved tensor and its recomputation must share."""
        if self.determinism_check == "none":
            return ()
        return metadata_of(tensor) if self.determinism_check == "default" else (*metadata_of(tensor), checksum(tensor))


DEFAULT_OPTIONS = Options()


class Collector:
    """Collects the saved tensors of one replay through its pack hook `pack`; only needed ones are stored."""

    # fmt: off
    __slots__ = (
        "_options", "_recorded", "_sequence", "_stop_at", "_takes_all", "is_stopped", "needed", "stop", "tensors",
        "versions",
    )
    # fmt: on

    def __init__(self, options: Options, needed: list[bool], stop: StopAt) -> None:
        self._options, self.needed = options, needed
        self._takes_all = all(needed) and bool(needed) and options.determinism_check != "values"  # as in most replays
        self.stop, self._stop_at = stop.save, stop
        self._sequence = 0
        self._recorded: list[Any] = []  # metadata of each save, if not all are stored or if they have checksums
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.is_stopped = False

    def begin(self) -> None:
        self._sequence = _compat.sequence_number()

    @property
    def metadata(self) -> list[Any]:
        """The metadata of each save so far, to be compared with the forward's."""
        if not self._takes_all:
            return self._recorded
        facts = metadata_of if self._options.determinism_check == "default" else self._options.metadata
        return list(map(facts, self.tensors))  # type: ignore[arg-type]

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:  # runs for every saved tensor
        index = len(self.tensors)
        # With its history, the tensor would keep the replay's graph alive. (`grad_fn` makes an object, `is_leaf` none.)
        saved = tensor if tensor.is_leaf else tensor.detach()
        if self._takes_all:
            self.tensors.append(saved)
        else:
            self._recorded.append(self._options.metadata(tensor))
            self.tensors.append(saved if index < len(self.needed) and self.needed[index] else None)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop:
            self._may_stop(tensor)
        return saved  # used if the region itself computes a gradient

    def _may_stop(self, tensor: Tensor) -> None:
        # torch disables gradients around its calls of hooks. An inner region enables them to save its inputs: these
        # have been filled, and all of that region follows.
        is_input = torch.is_grad_enabled()
        _, node, at_end = self._stop_at
        newest = _compat.sequence_number() - 1
        # An op in place (`mul_`, `silu(inplace=True)`) saves a clone of what it overwrites, whose node follows its own.
        own = tensor.grad_fn
        if own is not None and _compat.sequence_of(own) == newest and _compat.is_clone(own):
            newest -= 1
        if is_input or (not at_end and newest - self._sequence == node):
            self.is_stopped = True
            raise Stop


# Shape, dtype and device of saved tensors, one tuple per combination: a region then holds references and no objects of
# its own. Hooks read this dict directly, which saves a call.
METADATA: dict[Any, Any] = {}
_MAX_METADATA = 4096

metadata_of = operator.attrgetter("shape", "dtype", "device")


def new_metadata(tensor: Tensor) -> Any:
    """Return the metadata of a tensor that is not in `METADATA`, and add it unless its shape is symbolic."""
    metadata = metadata_of(tensor)
    if type(tensor) in _compat.PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(METADATA) >= _MAX_METADATA:
            METADATA.clear()
        METADATA[metadata] = metadata
    return metadata


def guard(lost: list[tuple[str, Tensor]], name: Any) -> ReadGuard:
    """Return a dispatch mode that raises if a replay reads a lost tensor; one that does not is right."""

    def refuse(tensor: Tensor) -> None:
        raise divergence.mutated_state(name, next(what for what, each in lost if each is tensor))

    return ReadGuard([tensor for _, tensor in lost], refuse)


# An input that an earlier call of the same segment returned: the number of that call, and of its output.
Link = tuple[int, int]
NO_LINKS: dict[int, Link] = {}

_requires_grad, _device = operator.attrgetter("requires_grad"), operator.attrgetter("device")


class ReplayableCall:
    """One call that may run again: its inputs, and the state, random numbers and modes that it read.

    `links` are the inputs, by index, that earlier calls of the segment returned. They are not held: the replay computes
    them again. `first_save` is the number of tensors that these calls had saved.
    """

    # fmt: off
    __slots__ = (
        "_arguments", "_fingerprints", "_function", "_held", "_input_versions", "_is_done", "_mutated_path",
        "_replay_function", "_requires_grad", "_unpack_input", "environment", "first_save", "links", "module",
        "sequence", "state",
    )
    # fmt: on

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        replay: Callable[..., Any] | None,
        arguments: Arguments,
        links: dict[int, Link],
        first_save: int,
    ) -> None:
        self.module, self._replay_function, self._arguments = module, replay, arguments
        self._function = function if replay is None else None  # it may hold much alive
        self.links, self.first_save = links, first_save
        self._is_done = False
        self._mutated_path: Any = None

    @property
    def name(self) -> Any:
        """The module or function that error messages name."""
        return self.module if self.module is not None else self._function

    def begin(self, tensors: list[Tensor], hooks: Hooks | None, *, preserve_rng_state: bool) -> None:
        """Capture the state that the forward will read."""
        self._hold(tensors, hooks)
        arguments, module = self._arguments, self.module
        self._fingerprints = None if arguments.objects is None else list(map(Fingerprint, arguments.objects))
        if module is not None and arguments.callables is None:
            self.state: ModuleSnapshot | FunctionState = snapshot_of(module)
        else:
            self.state = FunctionState(self.name, arguments.callables or ())
        devices = chain(self.state.devices(), map(_device, tensors))
        generators = self.state.generators()
        if arguments.generators is not None:
            generators = [*generators, *arguments.generators]
        self.environment = environment.capture(devices, generators, preserve_rng_state=preserve_rng_state)
        self.sequence = _compat.sequence_number()

    def _hold(self, tensors: list[Tensor], hooks: Hooks | None) -> None:
        """Hold the inputs that are not links."""
        links = self.links
        self._input_versions = _compat.versions_of(tensors)
        self._requires_grad = list(map(_requires_grad, tensors))
        self._unpack_input = None if hooks is None else hooks[1]
        own = [tensor for index, tensor in enumerate(tensors) if index not in links] if links else tensors
        if hooks is None or not own:
            self._held: list[Any] = list(map(alias_of, own))
        else:
            pack = hooks[0]
            with torch.enable_grad():  # see `Collector._may_stop`
                self._held = [tensor if is_held_itself(tensor) else pack(tensor.detach()) for tensor in own]
        if links:
            held = iter(self._held)
            self._held = [None if index in links else next(held) for index in range(len(tensors))]

    def forward_done(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> LastCall | None:
        """Record what the forward changed; return what the module's next call may share, None for a function."""
        self._is_done = True
        if self._arguments.has_containers:
            self._mutated_path = self._arguments.changed_container(args, kwargs, tensors)
        self._note_changed_inputs(tensors)
        self.state = state = self.state.forward_done(runs_all=True)
        if not isinstance(state, ModuleSnapshot):
            return None
        last = state.tree.last_call
        last.arguments = self._arguments
        self._input_versions = last.input_versions = same(last.input_versions, self._input_versions)
        self._requires_grad = last.requires_grad = same(last.requires_grad, self._requires_grad)
        return last

    def _note_changed_inputs(self, tensors: list[Tensor]) -> None:
        """Record whether the forward changed its inputs in place: a replay is then refused.

        Links may change: the replay makes them again, like any in-place change within a region.
        """
        versions = _compat.versions_of(tensors)
        if versions != self._input_versions:
            pairs = enumerate(zip(versions, self._input_versions, strict=True))
            changed = [index for index, (now, then) in pairs if now != then and index not in self.links]
            if changed:
                self._mutated_path = self._arguments.path_of_tensor(changed[0])

    def check_arguments(self) -> None:
        """Raise if an argument has changed. Inputs that outer hooks hold are checked by those hooks."""
        if self._mutated_path is not None:
            raise divergence.mutated_argument(self.name, self._mutated_path, "was changed by the region itself")
        if self._fingerprints is not None:
            for value, fingerprint in zip(self._arguments.objects or (), self._fingerprints, strict=True):
                if not fingerprint.still_holds(value):
                    raise divergence.mutated_argument(self.name, self._arguments.path_of(value), "was changed")
        is_plain = not self.links and self._unpack_input is None
        if is_plain and _compat.versions_of(self._held) == self._input_versions:
            return
        for index, held in enumerate(self._held):
            is_ours = self._unpack_input is None or (isinstance(held, Tensor) and is_held_itself(held))
            if index not in self.links and is_ours and _compat.version_of(held) != self._input_versions[index]:
                path = self._arguments.path_of_tensor(index)
                raise divergence.mutated_argument(self.name, path, "was changed in place")

    def inputs(self, made: dict[Link, Tensor]) -> list[Tensor]:
        """Return the inputs for a replay; `made` holds what the earlier calls of the segment have returned again."""
        links = self.links
        if not links:
            return self._held if self._unpack_input is None else list(map(self._input, range(len(self._held))))
        # The very objects: inner segments recognise links by identity.
        return [made[links[index]] if index in links else self._input(index) for index in range(len(self._held))]

    def _input(self, index: int) -> Tensor:
        held = self._held[index]
        if self._unpack_input is None or (isinstance(held, Tensor) and is_held_itself(held)):
            return held
        requires_grad = self._requires_grad[index]
        try:
            tensor = self._unpack_input(held)
        except (ChangedInPlaceError, divergence.OverwrittenError) as error:
            path = self._arguments.path_of_tensor(index)
            raise divergence.mutated_argument(self.name, path, "was changed in place") from error
        if tensor.requires_grad != requires_grad or tensor.grad_fn is not None:
            return tensor.detach().requires_grad_(requires_grad)
        return tensor

    def modes(self, *modes: Any) -> list[AbstractContextManager[Any]]:
        """Return the contexts for a replay: the given ones that are not None, and one that guards lost state."""
        found = [each for each in modes if each is not None]
        lost = self.state.lost()
        return [*found, guard(lost, self.name)] if lost else found

    def run_again(
        self, scope: Any, tensors: list[Tensor], modes: list[AbstractContextManager[Any]], collector: Collector
    ) -> Any:
        """Run the call with the state that it read. Random states, torch's modes and hooks are already in force."""
        args, kwargs = self._arguments.build(tensors)
        undo_state = self.state.restore(is_done=self._is_done)
        try:
            collector.begin()
            if not modes:
                return self._call(scope, args, kwargs)
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return self._call(scope, args, kwargs)
        except Stop:
            if not collector.is_stopped:
                raise
        except TorchCheckpointError as error:
            if isinstance(error, divergence.ReplayError):
                raise
            # Of torch's own checkpoint inside of this region.
            raise divergence.ReplayError(f"{error}\nregion: {divergence.describe(self.name)}") from None
        except RuntimeError as error:
            if collector.is_stopped:
                return None  # TorchScript's interpreter raises an error of its own in place of `Stop`
            if "leaf Variable that requires grad" in str(error):  # an input is a leaf in the replay
                raise divergence.changes_its_input(self.name) from error
            raise
        finally:
            undo_state()

    def _call(self, scope: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        if self._replay_function is not None:
            return self._replay_function(scope, self.module, *args, **kwargs)
        assert self._function is not None
        return self._function(*args, **kwargs)
