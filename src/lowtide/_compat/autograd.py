"""Autograd and torch's checkpoint: version counters, saved-tensor hooks, and nodes of the backward graph.

Replays and stores detect in-place changes by version counters, and push and inspect saved-tensor hooks. Replays also
number the autograd nodes of a forward, and restore small tensors with their versions, unseen by dispatch modes.
`lowtide.checkpoint` takes from here what it shares with torch's: the settings, the exception class, and torch's own
function, which it calls inside `torch.compile`.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as torch_checkpoint_module
from torch import Tensor, nn

from lowtide._compat.dispatch import under_functorch, without_modes
from lowtide._compat.internals import optional, required
from lowtide._compat.tensors import is_plain

_SNAPSHOTS = "buffers and gradients cannot be put back after a replay or a failed step"
_NODES = "replays cannot number the autograd nodes of their forward"
_HOOKS = "replay regions cannot install their saved-tensor hooks"
_set_version_counters = required("torch._C._autograd._unsafe_set_version_counter", _SNAPSHOTS)
_foreach_copy = required("torch._foreach_copy_", _SNAPSHOTS)
_current_graph_task = required("torch._C._current_graph_task_id", "a running backward cannot be detected")
_top_hooks = required("torch._C._autograd._top_saved_tensors_default_hooks", "hooks in force cannot be detected")
_hooks_enabled = required("torch._C._autograd._saved_tensors_hooks_is_enabled", "hooks in force cannot be detected")

# `version_of` for tensors that autograd saves. They are never inference tensors, so the check is left out: this runs
# once per saved tensor. Relies on `Tensor._version`, which the docs of autograd mention; obsolete when it is public.
version_of_saved: Callable[[Tensor], int] = operator.attrgetter("_version")


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of in-place changes; 0 for inference tensors. Obsolete with a public `Tensor.version`."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` each tensor, with one check for inference tensors in all. Obsolete like `version_of`."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


Values = Tensor | tuple[bytes, torch.Size, torch.dtype]  # of a tensor, copied
_MOST_RAW_BYTES = 1 << 16  # larger tensors are copied by torch, which counts their memory


def clone_all(tensors: Sequence[Tensor]) -> list[Values]:
    """Copy the values of many small tensors, for `overwrite_all`. The copies are hidden from dispatch modes.

    On the CPU as bytes, in a third of the instructions of torch's ops; on an accelerator in few kernels. Obsolete with
    public `foreach` functions that take no longer.
    """
    copies: list[Any] = list(map(_raw_values, tensors))
    others = [index for index, values in enumerate(copies) if values is None]
    if others:
        with torch.no_grad(), without_modes():
            cloned = [torch.empty_like(tensors[index]) for index in others]
            _copy_values(cloned, [tensors[index] for index in others])
        for index, values in zip(others, cloned, strict=True):
            copies[index] = values
    return copies


def overwrite_all(tensors: Sequence[Tensor], values: Sequence[Values], versions: Sequence[int]) -> None:
    """Overwrite tensors with earlier values, and set the version counts that they had then.

    Obsolete with public `foreach` functions and a public `preserve_version_counter`.
    """
    others = []
    for tensor, value in zip(tensors, values, strict=True):
        memory = _memory_like(tensor, value)
        if memory is None:
            others.append((tensor, value))
        else:
            memory.raw = value[0]
    _overwrite(others)
    _set_versions(tensors, versions)


def exchange_all(
    tensors: Sequence[Tensor], values: Sequence[Values], versions: Sequence[int]
) -> tuple[list[Values], list[int]]:
    """As `overwrite_all`; return the present values and version counts, for another one. Obsolete likewise."""
    now = versions_of(tensors)
    memories: list[Any] = list(map(_memory_like, tensors, values))
    if any(memory is None for memory in memories):
        present = clone_all(tensors)
        overwrite_all(tensors, values, versions)
        return present, now
    present = [(memory.raw, *value[1:]) for memory, value in zip(memories, values, strict=True)]
    for memory, value in zip(memories, values, strict=True):  # only now, as tensors may share memory
        memory.raw = value[0]
    _set_versions(tensors, versions)
    return present, now


def _overwrite(pairs: Sequence[tuple[Tensor, Values]]) -> None:
    if not pairs:
        return
    with torch.no_grad(), without_modes():
        tensors, values = [tensor for tensor, _ in pairs], [as_tensor(each) for _, each in pairs]
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
        _copy_values(tensors, values)


def _copy_values(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in one kernel per device and dtype: `foreach` runs one per tensor if these differ in a list."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, values = groups.setdefault((target.device, target.dtype), ([], []))
        to.append(target)
        values.append(source)
    for to, values in groups.values():
        _foreach_copy(to, values)


def _set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    now = versions_of(tensors)
    if now != versions:
        changed = [(t, then) for t, v, then in zip(tensors, now, versions, strict=True) if v != then]
        _set_version_counters(tuple(t for t, _ in changed), tuple(v for _, v in changed))


def as_tensor(values: Values) -> Tensor:
    """Return copied values as a tensor. Obsolete like `clone_all`."""
    if isinstance(values, Tensor):
        return values
    raw, shape, dtype = values
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape)


def _raw_values(tensor: Tensor) -> Values | None:
    memory = _memory(tensor)
    if memory is None or tensor.dtype.is_complex:  # it may hold conjugates
        return None
    return memory.raw, tensor.shape, tensor.dtype


def _memory_like(tensor: Tensor, values: Values) -> Any | None:
    """Return the bytes of a tensor that is laid out as when these bytes were copied, else None."""
    is_like = type(values) is tuple and tensor.shape == values[1] and tensor.dtype == values[2]
    return _memory(tensor) if is_like else None


def _memory(tensor: Tensor) -> Any | None:
    """Return the bytes of a small tensor, if they are in one piece of the CPU's memory."""
    try:
        address = tensor.data_ptr() if tensor.is_cpu and tensor.is_contiguous() else 0
    except RuntimeError:  # wrapped by a transform of torch.func
        return None
    size = tensor.nbytes
    return memory_of(address, size) if address and 0 < size <= _MOST_RAW_BYTES else None


def memory_of(address: int, size: int) -> Any:
    """Return the bytes at an address: read or write its `raw`.

    A quarter of the time of `ctypes.string_at`, which takes half as long as a copy by numpy. Obsolete when small
    tensors are copied as fast by torch.
    """
    return _array_type(size).from_address(address)


@functools.lru_cache(maxsize=1024)
def _array_type(size: int) -> Any:
    return ctypes.c_char * size


def set_version(tensor: Tensor, version: int) -> None:
    """Set a version counter: to an earlier one after a restore, or to 0 if new. Obsolete like `overwrite_all`."""
    if not tensor.is_inference():
        _set_version_counters((tensor,), (version,))


# The sequence number that the next autograd node of this thread will get. Obsolete with a public one.
sequence_number: Callable[[], int] = required("torch._C._autograd._get_sequence_nr", _NODES)


class BackwardReturn:
    """Calls `callback` once when this thread's next `backward()` has returned or raised, in the state of its caller.

    The callback is told whether it raised. A callback of the engine's own runs inside of it, where a profiler cannot be
    stopped: the engine puts the caller's thread-local state back. Replaces `torch.autograd._engine_run_backward` until
    then. Obsolete with a public hook.
    """

    _NAME = "_engine_run_backward"

    def __init__(self, callback: Callable[[bool], None]) -> None:
        self._callback, self._is_installed, self._thread, self._depth = callback, False, 0, 0
        self._original: Any = None

    def install(self) -> None:
        self._thread = threading.get_ident()
        if not self._is_installed:
            self._is_installed, self._original = True, getattr(torch.autograd, self._NAME)
            setattr(torch.autograd, self._NAME, self._run)

    def remove(self) -> None:
        if self._is_installed and getattr(torch.autograd, self._NAME) == self._run:
            setattr(torch.autograd, self._NAME, self._original)
            self._is_installed = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        original = self._original  # stays: a thread may have read `_run` just before it was removed
        if self._thread != threading.get_ident():
            return original(*args, **kwargs)
        self._depth += 1  # a checkpoint may run a backward inside of this one
        has_failed = True
        try:
            result = original(*args, **kwargs)
            has_failed = False
            return result
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.remove()
                self._callback(has_failed)


# The autograd node whose backward runs in this thread, or None. Obsolete with a public one.
running_node: Callable[[], Any | None] = required("torch._C._current_autograd_node", _NODES)


def fills_later(node: Any) -> bool:
    """Return whether an autograd node saves a tensor before its op fills it, so that it holds no values at the save.

    tests/_compat/test_autograd_fills_later.py looks for such nodes among all of torch's ops. Obsolete when torch fills
    tensors before it saves them.
    """
    return node.name() in _FILLS_LATER


_FILLS_LATER = frozenset({"RreluWithNoiseBackward0", "RreluWithNoiseBackward1"})


def is_clone(node: Any) -> bool:
    """Return whether an autograd node is that of a clone. Relies on names of nodes; obsolete with documented ones."""
    return bool(node.name() == "CloneBackward0")


def saves_results(node: Any) -> bool:
    """Return whether the op of an autograd node saves results, and so has computed everything at its last save.

    Norms, dropout on an accelerator, and some activations. Most other ops save their inputs, before they compute.
    Relies on the names of nodes; obsolete with documented ones.
    """
    return node.name().rstrip("0123456789") in _SAVE_RESULTS


_SAVE_RESULTS = frozenset(
    f"{name}Backward"
    for name in "CudnnBatchNorm FusedRmsNorm LogSoftmax MiopenBatchNorm NativeBatchNorm NativeDropout NativeGroupNorm "
    "NativeLayerNorm Relu Sigmoid Softmax Tanh".split()
)


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node, which grows in the order of the forward. Relies on `Node._sequence_nr`."""
    return node._sequence_nr()


def autograd_nodes_since(sequence: int, roots: Sequence[Any] | None = None) -> list[Any]:
    """List nodes numbered `sequence` or later, reachable from `roots` (default: the running node), oldest first.

    Accumulators of leaves carry the highest number of all, so they come last. Obsolete with a public
    `current_autograd_node` and `Node.sequence_nr`.
    """
    if roots is None:
        running = running_node()
        roots = [] if running is None else [running]
    seen, stack = {}, [node for node in roots if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        number = node._sequence_nr()
        if number >= sequence:
            seen[node] = number
            stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return sorted(seen, key=seen.__getitem__)


def current_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost saved-tensor hooks in force, as `(pack, unpack)`. Obsolete with a public function for it."""
    hooks = _top_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


# Install and remove saved-tensor hooks, as `torch.autograd.graph.saved_tensors_hooks` does when it is entered and left,
# without three Python calls each: they run once per region. Obsolete when torch's own are as fast.
push_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None] = required(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    _HOOKS,
    also=("torch._C._autograd._pop_saved_tensors_default_hooks",),
)
pop_hooks: Callable[[], None] = required("torch._C._autograd._pop_saved_tensors_default_hooks", _HOOKS)

# `torch.set_grad_enabled` without its Python wrapper, as it runs twice per replay. Obsolete when torch's is as fast.
set_grad_enabled: Callable[[bool], Any] = optional("torch._C._set_grad_enabled", torch.set_grad_enabled)


def version_owner(tensor: Tensor) -> Tensor:
    """Return the tensor that a version counter was made for: a view's base, else the tensor itself.

    A detached view has no base and is its own owner. Relies on `Tensor._base`;
    obsolete with a public handle on version counters.
    """
    return tensor if tensor._base is None else tensor._base


class VersionWatch:
    """Detects in-place changes of a tensor and of all its aliases, without keeping its storage alive.

    A detached alias shares the version counter. Setting its `data` releases the storage and keeps the counter.
    Obsolete with a public handle on version counters.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version = 0
        self._alias: Tensor | None = None
        if is_plain(tensor) and not tensor.is_inference():
            self._version = tensor._version
            self._alias = tensor.detach()
            self._alias.data = tensor.new_empty(0)

    def has_changed(self) -> bool:
        return self._alias is not None and self._alias._version != self._version


def is_parameter_or_view_of_one(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or buffer, a view of a parameter, or a cast or transpose of one.

    Relies on the names of autograd nodes and on `AccumulateGrad.variable`; obsolete with documented node names.
    """
    if isinstance(tensor, _OF_MODULES) or (tensor._base is not None and isinstance(tensor._base, nn.Parameter)):
        return True
    node = tensor.grad_fn
    for _ in range(3):  # t(to(weight)): each step has one input, and the last is the parameter's accumulator
        if node is None or not node.name().startswith(_CASTS_AND_VIEWS) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if node is not None and "AccumulateGrad" in node.name():
            return isinstance(node.variable, nn.Parameter)
    return False


_OF_MODULES = (nn.Parameter, nn.Buffer)
_CASTS_AND_VIEWS = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "UnsafeViewBackward")


def no_hooks_in_force() -> bool:
    """Return whether no saved-tensor hooks are in force and new ones are allowed. Obsolete with public functions."""
    return current_hooks() is None and _hooks_enabled() and not under_functorch()


def hooks_are_in_force(hooks: Any) -> bool:
    """Return whether these saved-tensor hooks are the innermost in force. Obsolete like `current_hooks`."""
    current = current_hooks()
    return current is not None and current[0] is hooks.pack_hook


def is_replayed() -> bool:
    """Return whether a checkpoint may run this code again: saved-tensor hooks are in force, or a backward is running.

    Obsolete with public functions for both.
    """
    return current_hooks() is not None or is_in_backward()


def is_in_backward() -> bool:
    """Return whether this thread runs a backward. Obsolete likewise."""
    return bool(_current_graph_task() != -1)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether hooks run after a gradient is accumulated. Relies on `Tensor._post_accumulate_grad_hooks`."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def with_marked_version(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor whose version starts at a sentinel that autograd never reaches.

    The alias and its views can be recognised by that version. Obsolete with a public `preserve_version_counter`.
    """
    alias = tensor.data
    set_version(alias, _MARK)
    return alias


def has_marked_version(tensor: Tensor) -> bool:
    """Return whether a tensor is from `with_marked_version`, or a view of such a tensor. Obsolete likewise."""
    return version_of(tensor) == _MARK


def propagate_version_mark(op: Any, args: Any, output: Any) -> None:
    """Mark an op's output if its argument is marked and it has a version of its own. Obsolete when it shares that."""
    if op in _UNTRACKED_VIEWS and has_marked_version(args[0]):
        set_version(output, _MARK)


_MARK = 1 << 30
_UNTRACKED_VIEWS = tuple(
    optional(f"torch.ops.aten.{name}.default", None) for name in ("_unsafe_view", "_reshape_alias")
)


def leaves_of(output: Tensor) -> list[Tensor]:
    """List the leaves that a backward from `output` accumulates into. Relies on `AccumulateGrad.variable`."""
    return [node.variable for node in autograd_nodes_since(0, [output.grad_fn]) if hasattr(node, "variable")]


# torch.utils.checkpoint.


def checkpoint_in_force() -> Any | None:
    """Return the pack hook of the innermost checkpoint region that runs or replays in this thread; None outside of any.

    A hook that was installed inside the region hides it, unless that hook has an attribute `passes_on_to`. Obsolete
    with a public function that returns the current region.
    """
    hooks = current_hooks()
    while hooks is not None and "passes_on_to" in getattr(hooks[0], "__dict__", ()):
        hooks = hooks[0].passes_on_to  # type: ignore[attr-defined]
    module = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    return hooks[0] if hooks is not None and module.startswith(_CHECKPOINTS) else None


_CHECKPOINTS = ("torch.utils.checkpoint", "lowtide.replay.")


def checkpoint_setting(name: str, default: bool) -> bool:
    """Return what `torch.utils.checkpoint.set_checkpoint_<name>` has set, if it is in force, else `default`.

    Obsolete with public getters. A setting that this torch lacks is ignored: they save time or help to debug.
    """
    value: bool | None = getattr(torch_checkpoint_module, _SETTINGS[name], None)
    return default if value is None else value


_SETTINGS = {"early_stop": "_enable_checkpoint_early_stop", "debug_enabled": "_checkpoint_debug_enabled"}


def selective_ops(mode: Any) -> tuple[Callable[..., Any], list[str], bool] | None:
    """Return the policy of a selective checkpoint's forward mode, the ops that ran, and whether any was saved.

    None for a context of another kind. On torch 2.11 only ops that were saved are listed. Obsolete when torch itself
    reports policies that match no op.
    """
    mode_type: Any = getattr(torch_checkpoint_module, "_CachingTorchDispatchMode", ())
    if not isinstance(mode, mode_type):
        return None
    recompute = getattr(torch_checkpoint_module, "_RECOMPUTE", None)
    saved = any(
        entry is not recompute
        for entries in mode.storage.values()
        for entry in (entries.values() if isinstance(entries, dict) else entries)
    )
    return mode.policy_fn, [str(key[0] if isinstance(key, tuple) else key) for key in mode.storage], saved


def find_torch_checkpoint() -> Callable[..., Any]:
    """Return torch's own `checkpoint`, also if another library has replaced it in `torch.utils.checkpoint`.

    Such libraries keep a reference to torch's: in another attribute of the module (Unsloth, ms-swift), or in what their
    function wraps, closes over or is a partial of. If none of these is torch's, the replacement is returned. Obsolete
    when libraries stop replacing it.
    """
    names = vars(torch_checkpoint_module)
    candidates, seen = [names["checkpoint"], *names.values()], set()
    for candidate in candidates:  # grows
        if id(candidate) in seen or not isinstance(candidate, FunctionType | functools.partial):
            continue
        seen.add(id(candidate))
        if _is_torch_checkpoint(candidate):
            return candidate
        cells = getattr(candidate, "__closure__", None) or ()
        candidates += [cell.cell_contents for cell in cells if cell != CellType()]
        candidates += [getattr(candidate, name, None) for name in ("__wrapped__", "func")]
    return names["checkpoint"]  # type: ignore[no-any-return]


def _is_torch_checkpoint(function: Any) -> bool:
    """Return whether a function is defined by torch and decorated only by torch."""
    chain = [function]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    spaces = [getattr(each, "__globals__", {}) for each in chain]
    is_defined_there = spaces[-1] is vars(torch_checkpoint_module) and chain[-1].__name__ == "checkpoint"
    return is_defined_there and all(str(space.get("__name__")).startswith("torch.") for space in spaces)


# Bound at import: a user who replaces `torch.utils.checkpoint.checkpoint` by lowtide's must not make it call itself.
torch_checkpoint = find_torch_checkpoint()
if TYPE_CHECKING:
    TorchCheckpointError = torch_checkpoint_module.CheckpointError
else:  # a RuntimeError; not in torch's `__all__`
    TorchCheckpointError = optional("torch.utils.checkpoint.CheckpointError", RuntimeError)
