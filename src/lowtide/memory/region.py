"""One checkpointed call, from its forward to its last replay.

torch's checkpoint runs a `Region` twice: the first call is the forward, with the caller's own arguments; every later
one is a replay, with arguments rebuilt around the tensors that were kept. torch decides what is dropped and when it
comes back; the region sees to it that the second run is the first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.memory import _compat as frames
from lowtide.memory import divergence
from lowtide.memory.ambient import Ambient
from lowtide.memory.arguments import Arguments, Fingerprint, Path
from lowtide.memory.checksums import checksum
from lowtide.memory.offload import SavedInStore
from lowtide.memory.reach import Reach
from lowtide.memory.state import FunctionState, Slot
from lowtide.memory.store import ActivationStore

# What holds a region's inputs between its forward and its replay.
InputsKeeper = ActivationStore | torch.autograd.graph.saved_tensors_hooks

_replays = threading.local()


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


class SaveWatch(Protocol):
    """Who wants to see the tensors that are saved: each as the forward saves it, a replay's when that is over.

    A replay whose tensors it does not approve of is run once more. Of those that nobody wants any more it sees None.
    `begin` tells it whom to ask for how many tensors a replay has saved, while that runs. One that failed is approved
    of or not as well, if `failed` says so; else the error is raised.
    """

    def begin(self, num_saved_again: Callable[[], int]) -> None: ...
    def failed(self, error: BaseException) -> bool: ...
    def saved(self, tensor: Tensor) -> None: ...
    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool: ...


class Region:
    """Call it once for the forward, again for each replay."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        store: InputsKeeper | None,
        preserve_rng_state: bool,
        determinism_check: str,
        has_contexts: bool,
    ) -> None:
        self._function = function
        self._live: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._is_checked = determinism_check != "none"
        self._compares_values = determinism_check == "values"
        self._is_watched = False  # whether torch's check of the replay will call `replay_checked`
        self._has_contexts = self._may_overwrite = has_contexts
        self.begin_watch: Callable[[], SaveWatch] | None = None  # of a context that wants to see what is saved
        self._arguments = arguments = Arguments(args, kwargs)
        self._watched = [(weakref.ref(tensor), _compat.version_of(tensor)) for tensor in arguments.tensors]
        self._objects = [(path, value, Fingerprint(value)) for path, value in arguments.objects]
        self.has_subclass_inputs = any(type(tensor) not in _compat.PLAIN_TYPES for tensor in arguments.tensors)
        self._mutated_path: Path | None = None
        self._replay_tensors: list[Tensor] = []
        # Packed like any saved tensor: into `store`, or else wherever hooks further out want it.
        hooks = SavedInStore(store, min_bytes=0) if isinstance(store, ActivationStore) else store
        with contextlib.nullcontext() if hooks is None else hooks:
            self._inputs = _compat.save_tensors(arguments.tensors)
        reach = Reach(function, arguments.callables)
        self._state = FunctionState(reach)
        devices = {tensor.device for tensor in arguments.tensors} | self._state.devices()
        self._ambient = Ambient(devices, arguments.generators + reach.generators, preserve_rng_state=preserve_rng_state)
        self._sequence = _compat.sequence_number()

    def __call__(self) -> Any:
        if self._live is None:
            return self._replay()
        (args, kwargs), self._live = self._live, None
        return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_checked and (frame := frames.current_frame()) is not None:
            watch = None if self.begin_watch is None else self.begin_watch()
            self.begin_watch = None
            self._may_overwrite &= watch is None
            frames.watch_frame(frame, self, watch)
            self._is_watched = True
        output = self._function(*args, **kwargs)
        self._mutated_path = self._arguments.changed_container(args, kwargs)
        self._arguments.release_tensors()
        self._state.forward_done()
        return output

    def begin_replay(self) -> None:
        """Have the inputs there, before contexts of a caller's own are on.

        Stores, and replays further out, run ops for this that are none of the region's. Those give them once, so for
        a replay that is run once more they are still here.
        """
        self._check_arguments()
        if not self._replay_tensors:
            self._replay_tensors = list(self._inputs())

    def _replay(self) -> Any:
        if not self._has_contexts:
            self.begin_replay()
        lost = self._state.lost_slots()
        try:
            if not lost:
                return self._run_again()
            # Reach is wider than use: refuse what is lost only if the replay reads it.
            with _compat.ReadGuard([slot.tensor for slot in lost], functools.partial(self._refuse, lost)):
                return self._run_again()
        except divergence.ReplayError:
            raise
        except _compat.TorchCheckpointError as error:
            raise self.diverged(error) from None
        finally:
            if not self._is_watched:
                self.replay_checked()

    def _refuse(self, lost: list[Slot], tensor: Tensor) -> None:
        raise divergence.mutated_state(self._function, str(next(slot for slot in lost if slot.tensor is tensor)))

    def _run_again(self) -> Any:
        args, kwargs = self._arguments.build(self._replay_tensors)
        # Callables that undo, rather than context managers: torch ends most replays with an exception, and throwing
        # that through generators cost more than all of the rest here.
        undo_state = self._around_modes(self._state.restore)
        undo_ambient = self._ambient.restore()
        _replays.depth = replay_depth() + 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _replays.depth -= 1
            undo_ambient()
            self._around_modes(undo_state)

    def _around_modes(self, call: Callable[[], Any]) -> Any:
        """Run bookkeeping where no selective checkpoint counts its ops."""
        if not self._has_contexts:
            return call()
        with _compat.without_modes():
            return call()

    def _check_arguments(self) -> None:
        """Refuse arguments that are not what they were. What hooks further out hold, those have to check."""
        if self._mutated_path is not None:
            raise divergence.mutated_argument(self._function, self._mutated_path, "was changed by the region itself")
        for path, value, fingerprint in self._objects:
            if not fingerprint.still_holds(value):
                raise divergence.mutated_argument(self._function, path, "was changed")
        for path, (reference, version) in zip(self._arguments.paths, self._watched, strict=True):
            tensor = reference()
            if tensor is not None and _compat.version_of(tensor) != version:
                raise divergence.mutated_argument(self._function, path, "was changed in place")

    # What torch's bookkeeping calls (see `watch_frame`).

    @property
    def metadata(self) -> Callable[[Tensor], dict[str, Any]]:
        """What tells of a saved tensor what has to be the same in the replay."""
        return _metadata_and_values if self._compares_values else frames.metadata_of

    def replay_checked(self) -> None:
        """Let go of the inputs: kept until here in case the replay has to be looked into."""
        self._replay_tensors = []

    def diverged(self, torch_error: Exception) -> Exception:
        """The error for a replay that saved other tensors than the forward did."""
        changed = [str(slot) for slot in self._state.lost_slots()]
        forward_ops = divergence.graph_ops(None, self._sequence)
        return divergence.diverged(
            self._function,
            torch_error,
            divergence.first_difference(forward_ops, self._replayed_ops()),
            preserves_rng=self._ambient.preserves_rng,
            changed_state=changed,
            is_compiled="compiled_function" in forward_ops,
        )

    def overwritten(self, position: int, metadata: dict[str, Any]) -> Exception | None:
        """The error for a saved tensor that the replay changed in place afterwards, unless a context allows that."""
        if self._may_overwrite:
            return None
        return divergence.overwritten_activation(self._function, position, metadata)

    def _replayed_ops(self) -> list[str] | None:
        """Run once more, with its graph this time, to see which ops a replay runs: only ever on the way to an error."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # collectives of a run on one rank alone would wait for the others
        since = _compat.sequence_number()
        try:
            with torch.enable_grad():
                outputs = Arguments((self._run_again(),), {}).tensors
        except Exception:
            return None
        return divergence.graph_ops(outputs, since)


@_compat.never_compiled
def _metadata_and_values(tensor: Tensor) -> dict[str, Any]:
    return {**frames.metadata_of(tensor), "checksum": checksum(tensor)}
