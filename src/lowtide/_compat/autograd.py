"""Every touch of torch's private API, one small function each, with what would make it obsolete.

Nothing else in lowtide may import or name a private torch attribute; a test enforces it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._compat.dispatch import under_functorch, without_modes
from lowtide._compat.tensors import is_plain

# `version_of` for tensors that autograd saves, which are never inference tensors: quick, for what runs once per save.
version_of_saved: Callable[[Tensor], int] = operator.attrgetter("_version")


def version_of(tensor: Tensor) -> int:
    """Autograd's count of in-place changes. Inference tensors have none and read as 0."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """`version_of` each, quickly."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of many small tensors, in few kernels on an accelerator. No dispatch mode sees them being made.

    Obsolete with public `foreach` functions.
    """
    if not tensors:
        return []
    with torch.no_grad(), without_modes():
        copies = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(copies, list(tensors))
    return copies


def overwrite_all(tensors: Sequence[Tensor], values: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Give tensors other values, and the version counts that belong to those values.

    Obsolete with public `foreach` functions and a public `preserve_version_counter`.
    """
    if not tensors:
        return
    with torch.no_grad(), without_modes():
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
        torch._foreach_copy_(list(tensors), list(values))
    counted = [(tensor, v) for tensor, v in zip(tensors, versions, strict=True) if not tensor.is_inference()]
    if counted:
        torch._C._autograd._unsafe_set_version_counter(tuple(t for t, _ in counted), tuple(v for _, v in counted))


def set_version(tensor: Tensor, version: int) -> None:
    """Count as many changes as there were, for a tensor that has its content back. Obsolete like `overwrite_all`."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def reset_version(tensor: Tensor) -> None:
    """Count no changes so far, for a tensor that has just been filled."""
    set_version(tensor, 0)


def sequence_number() -> int:
    """The number the next autograd node will get. Obsolete with a public one."""
    return torch._C._autograd._get_sequence_nr()


def running_node() -> Any | None:
    """The autograd node whose backward runs in this thread. Obsolete with a public one."""
    return torch._C._current_autograd_node()


def fills_later(node: Any) -> bool:
    """Whether an autograd node saves a tensor before its op fills it: at the save, that holds nothing yet.

    tests/test_early_stop.py looks for such nodes among all of torch's ops.
    """
    return node.name() in _FILLS_LATER


_FILLS_LATER = frozenset({"RreluWithNoiseBackward0", "RreluWithNoiseBackward1"})


def sequence_of(node: Any) -> int:
    """The number of an autograd node, in the order of the forward. Obsolete with a public one."""
    return node._sequence_nr()


def autograd_nodes_since(sequence: int, roots: Sequence[Any] | None = None) -> list[Any]:
    """Nodes numbered `sequence` or later, reachable from `roots` (default: the node that is running), oldest first.

    Accumulators of leaves carry the highest number of all, so they come last. Obsolete with a public
    `current_autograd_node` and `Node.sequence_nr`.
    """
    if roots is None:
        running = torch._C._current_autograd_node()
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
    """The saved-tensor hooks in force. Obsolete with a public way to ask."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


# What `torch.autograd.graph.saved_tensors_hooks` does when it is entered and left, without three calls of Python each:
# for what runs once per region. Obsolete when torch's own is as quick.
push_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # as quick, for the same reason


def version_owner(tensor: Tensor) -> Tensor:
    """The tensor that a version counter was made for: what a view is a view of. Detached views are not known as views.

    Obsolete with a public handle on version counters.
    """
    return tensor if tensor._base is None else tensor._base


class VersionWatch:
    """Sees in-place changes of a tensor and of all its aliases, without keeping a byte of it alive.

    A detached alias shares the version counter; giving it other data lets go of the storage and keeps the counter.
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
    """Whether a tensor is a parameter or buffer, a view of a parameter, or a mere cast or transpose of one."""
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
    """Whether saved-tensor hooks may be put on, and no one else has. Obsolete with public ways to ask."""
    return current_hooks() is None and torch._C._autograd._saved_tensors_hooks_is_enabled() and not under_functorch()


def hooks_are_in_force(hooks: Any) -> bool:
    """Whether these saved-tensor hooks are the ones that see what is saved now. Obsolete like `current_hooks`."""
    current = current_hooks()
    return current is not None and current[0] is hooks.pack_hook


def is_replayed() -> bool:
    """Whether what runs now is, or may be, run again by a checkpoint: under saved-tensor hooks, or in a backward.

    Obsolete with a public way to ask for either.
    """
    return current_hooks() is not None or torch._C._current_graph_task_id() != -1


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks run after its gradient is accumulated, as those of an optimizer in the backward. Obsolete with a
    public way to list them.
    """
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def with_marked_version(tensor: Tensor) -> Tensor:
    """The same bytes with changes counted from a number that no one comes to, so that it and its views are known again.

    Obsolete with a public `preserve_version_counter`.
    """
    alias = tensor.data
    set_version(alias, _MARK)
    return alias


def has_marked_version(tensor: Tensor) -> bool:
    return version_of(tensor) == _MARK


def propagate_version_mark(op: Any, args: Any, output: Any) -> None:
    """Mark what shares a marked argument's bytes but does not count changes with it."""
    if op in _UNTOLD_VIEWS and has_marked_version(args[0]):
        set_version(output, _MARK)


_MARK = 1 << 30
_UNTOLD_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


def leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves that a backward from `output` accumulates into."""
    return [node.variable for node in autograd_nodes_since(0, [output.grad_fn]) if hasattr(node, "variable")]
