"""The private torch API that a region needs of torch's checkpoint, with what would make it obsolete."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint_module
from torch import Tensor

from lowtide._compat import PLAIN_TYPES, TorchCheckpointError, current_hooks, never_compiled
from lowtide.errors import LowtideError


def current_frame() -> Any | None:
    """The bookkeeping of the torch checkpoint whose forward runs now, found in the closure of its pack hook.

    Obsolete when torch's checkpoint takes a metadata function and an error callback.
    """
    hooks = current_hooks()
    if hooks is None or not hasattr(hooks[0], "__code__"):
        return None
    pack: Any = hooks[0]
    for name, cell in zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True):
        if name == "frame":
            return cell.cell_contents
    return None


@never_compiled
def metadata_of(tensor: Tensor) -> dict[str, Any]:
    """What torch compares of a saved tensor and its recomputation: shape, dtype and device.

    torch keeps it for each saved tensor: the same for all that are alike, so that the garbage collector, which is woken
    by the number of new objects, is woken less. Obsolete when torch's checkpoint keeps it so.
    """
    try:
        return _METADATA[tensor.shape, tensor.dtype, tensor.device]
    except (KeyError, TypeError):  # not seen before, or of a shape in symbols
        return _new_metadata(tensor)


def _new_metadata(tensor: Tensor) -> dict[str, Any]:
    metadata: dict[str, Any] = torch_checkpoint_module._default_meta_extractor(tensor)
    if type(tensor) in PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(_METADATA) >= _MOST_METADATA:
            _METADATA.clear()
        _METADATA[tensor.shape, tensor.dtype, tensor.device] = metadata
    return metadata


_METADATA: dict[tuple[torch.Size, torch.dtype, torch.device], dict[str, Any]] = {}
_MOST_METADATA = 4096


class FrameObserver(Protocol):
    """Who wants to see what a torch checkpoint saves and recomputes."""

    @property
    def metadata(self) -> Callable[[Tensor], Any]: ...
    def diverged(self, torch_error: Exception) -> Exception: ...
    def overwritten(self, position: int, metadata: dict[str, Any]) -> Exception | None: ...
    def replay_checked(self) -> None: ...


def watch_frame(frame: Any, observer: FrameObserver, watch: Any = None) -> None:
    """Let `observer` describe what the frame saves, and raise its errors in place of torch's.

    `overwritten` concerns a recomputed tensor changed in place after the replay saved it: torch hands it to the
    backward as it is, where plain autograd raises. A `watch` sees the tensors too (`SaveWatch` in `memory.region`).
    """
    ref = weakref.ref(frame)  # a strong one would be a cycle, and activations would wait for the garbage collector
    versions: list[int] = []  # of saved tensors, in the order of frame.weak_holders
    given: list[Any] = []  # arguments of the replay: none of them are the region's, which has its own
    describe, note_version = observer.metadata, versions.append

    @never_compiled
    def describe_saved(tensor: Tensor) -> Any:  # once per saved tensor: nothing here may cost a microsecond
        note_version(tensor._version)
        return describe(tensor)

    @never_compiled
    def show_and_describe_saved(tensor: Tensor) -> Any:
        watch.saved(tensor)
        return describe_saved(tensor)

    def check_recomputed_tensors_match(gid: Any) -> None:
        frame: Any = ref()
        frame.metadata_fn = describe
        try:
            # First: a replay that went wrong because of what the watch knows need not have saved the same tensors.
            if watch is not None and not watch.saved_again(_recomputed(frame, gid)):
                _recompute_once_more(frame, gid, given)
                watch.saved_again(_recomputed(frame, gid))
            type(frame).check_recomputed_tensors_match(frame, gid)
            if not frame.ignore_saved_mismatch:
                _check_overwritten(frame, gid, versions, observer)
        except TorchCheckpointError as error:
            raise (error if isinstance(error, LowtideError) else observer.diverged(error)) from None
        finally:
            frame.metadata_fn = shown
            observer.replay_checked()

    if watch is not None:
        watch.begin(functools.partial(_num_saved_again, ref))
        frame.recompute_fn = functools.partial(_recompute, frame.recompute_fn, observer, watch, given)
    shown = describe_saved if watch is None else show_and_describe_saved
    frame.metadata_fn = shown
    frame.check_recomputed_tensors_match = check_recomputed_tensors_match


def _recompute(
    recompute_fn: Callable[..., None], observer: FrameObserver, watch: Any, given: list[Any], *args: Any
) -> None:
    """A replay. One that fails, and is to be run once more, ends here."""
    given[:] = args  # hooks further out give them once
    try:
        recompute_fn(*args)
    except torch_checkpoint_module._StopRecomputationError:
        raise
    except BaseException as error:
        if not watch.failed(error):
            observer.replay_checked()
            raise


def _num_saved_again(ref: Any) -> int:
    """How much the replay that runs has saved; 0 where that is not known."""
    counts: dict[Any, int] = ref().recomp_counter
    return counts.get(torch._C._current_graph_task_id(), 0)


def _recomputed(frame: Any, gid: Any) -> list[Tensor | None]:
    """What a replay has saved, in order; None for what nobody wants any more."""
    holders = [reference() for reference in frame.weak_holders]
    handles = [None if holder is None else holder.handles.get(gid) for holder in holders]
    return [None if handle is None else frame.recomputed[gid].get(handle) for handle in handles]


def _recompute_once_more(frame: Any, gid: Any, args: list[Any]) -> None:
    """Throw away what a replay has saved, and replay again, as the frame's unpack hook does."""
    for reference in frame.weak_holders:
        if (holder := reference()) is not None:
            holder.handles.pop(gid, None)
    frame.recomputed[gid].clear()
    frame.recomp_counter[gid] = 0
    try:
        with torch_checkpoint_module._recomputation_hook(weakref.ref(frame), gid), torch.enable_grad():
            frame.recompute_fn(*args)
    except torch_checkpoint_module._StopRecomputationError:
        pass


def _check_overwritten(frame: Any, gid: Any, versions: list[int], observer: FrameObserver) -> None:
    recomputed = frame.recomputed[gid]
    if [tensor._version for tensor in recomputed.data.values()] == versions:  # as nearly always
        return
    for position, weak_holder in enumerate(frame.weak_holders):
        holder = weak_holder()
        handle = None if holder is None else holder.handles[gid]
        if handle is not None and recomputed[handle]._version > versions[position]:
            error = observer.overwritten(position, frame.x_metadatas[position])
            if error is not None:
                raise error


def selective_ops(mode: Any) -> tuple[Callable[..., Any], list[str], bool] | None:
    """What a selective checkpoint's forward mode saw: its policy, the ops that ran, and whether any was saved.

    None for a context of another kind. On torch 2.11 only ops that were saved are listed.
    """
    if not isinstance(mode, torch_checkpoint_module._CachingTorchDispatchMode):
        return None
    recompute = getattr(torch_checkpoint_module, "_RECOMPUTE", None)
    saved = any(
        entry is not recompute
        for entries in mode.storage.values()
        for entry in (entries.values() if isinstance(entries, dict) else entries)
    )
    return mode.policy_fn, [str(key[0] if isinstance(key, tuple) else key) for key in mode.storage], saved
