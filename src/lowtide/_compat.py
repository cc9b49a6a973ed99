"""Every touch of torch's private API, one small function each, with what would make it obsolete.

Nothing else in lowtide may import or name a private torch attribute; a test enforces it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as dynamo_frames
from torch.utils._python_dispatch import _disable_current_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])


# `torch.compiler.disable` without importing the compiler, which takes longer than all of lowtide, until the first call.
# Obsolete when torch's own is as lazy.
disable_dynamo = torch._disable_dynamo


def never_compiled(function: _Function) -> _Function:
    """`function` itself, which Dynamo leaves alone with all that it calls, where C++ or torch's own code calls it.

    For what runs very often: the two calls that `disable_dynamo` puts before each make a difference. A caller that
    Dynamo traces has it traced too, unlike there. Obsolete when torch's own has no wrapper.
    """
    try:
        skip = dynamo_frames._FrameAction.SKIP
        dynamo_frames.set_code_exec_strategy(function.__code__, dynamo_frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # a torch that has another way
        return disable_dynamo(function)  # type: ignore[return-value]
    return function


def under_functorch() -> bool:
    """Whether a torch.func transform is running. Obsolete when torch.func supports saved-tensor hooks (#122729)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


_LAZY_TYPES = (nn.UninitializedParameter, nn.UninitializedBuffer)


PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided bytes and no more: nothing sparse, wrapped or of another class."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def is_copyable(tensor: Tensor) -> bool:
    """Whether a tensor can be given other values: plain, and no element there twice, as in an expanded one."""
    return is_plain(tensor) and not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether this is a lazy module's parameter or buffer before its first forward."""
    return type(tensor) in _LAZY_TYPES  # isinstance() goes through a slow metaclass here


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


# Ops that compute nothing and make no storage: questions about a tensor, other names for one, a constant's first.
BOOKKEEPING_OPS = frozenset(
    {
        torch.ops.prim.device.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


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


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, as the dicts it reads them from. Obsolete with a public slot API."""
    return module._parameters, module._buffers


def submodules(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, each once; several times faster than `module.modules()`, which builds names."""
    found, index = {id(module): module}, [module]
    for parent in index:
        for child in parent._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                index.append(child)
    return index


def child_modules(module: nn.Module) -> dict[str, Any]:
    """The module's children, as the dict it reads them from. Obsolete with a public slot API."""
    return module._modules  # type: ignore[return-value]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the module's forward. Obsolete with a public way to list them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def child_name(parent: nn.Module, child: nn.Module) -> str | None:
    """The name under which `parent` holds `child`, if it does."""
    return next((name for name, module in parent._modules.items() if module is child), None)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a sharding runtime (FSDP2, TP) manages this tensor and swaps it in and out on its own."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


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


def is_op(value: Any) -> bool:
    return isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers to look at: none in fake, meta, functional and other wrapped tensors."""
    return type(tensor) in PLAIN_TYPES and not tensor.is_meta and torch._C._len_torch_dispatch_stack() == 0


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # in this thread. Obsolete with a public one


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A block whose ops no dispatch mode sees (a selective checkpoint would count them)."""
    return _disable_current_modes() if num_dispatch_modes() else contextlib.nullcontext()


# For any device type, in one call. Obsolete with a public one.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def bare_kernels() -> Iterator[None]:
    """A block whose ops are kernels and nothing else: no history, no casts, and nobody sees them.

    Obsolete with a public way to switch autocast off for all devices.
    """
    with torch.no_grad(), torch._C._DisableAutocast(), without_modes():
        yield


def default_device() -> torch.device | None:
    """The device of `torch.set_default_device` or `with torch.device(...)`, if one is in force in this thread.

    Obsolete when `torch.get_default_device` tells a device that was set from none, and takes no microseconds.
    """
    if not torch._C._len_torch_function_stack():
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def current_device_index() -> int:
    """The index of the current accelerator, which is initialised. Obsolete when torch's own takes no microseconds."""
    return torch._C._accelerator_getDeviceIndex()


def default_generator(kind: str, index: int) -> torch.Generator:
    """The generator that ops on a device draw from. Obsolete when every device module has `default_generators`."""
    module = torch.get_device_module(kind)
    generators = getattr(module, "default_generators", None)
    return generators[index] if generators else module._get_default_mps_generator()


@functools.cache
def accelerator() -> torch.device | None:
    """The accelerator of this process, if torch was built for one and finds it."""
    return torch.accelerator.current_accelerator(check_available=True)


class StorageReference:
    """Tells whether a storage still lives, without keeping it alive; its `id` is not given to another meanwhile.

    Obsolete when `weakref.ref(tensor.untyped_storage())` says so on every torch we allow.
    """

    __slots__ = ("id",)

    def __init__(self, tensor: Tensor) -> None:
        self.id: int = 0
        storage: Any = tensor.untyped_storage()
        self.id = storage._weak_ref()

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        if self.id:
            free(self.id)  # bound above: when Python ends, `torch` may be gone before the last of these

    def is_alive(self) -> bool:
        return not torch.UntypedStorage._expired(self.id)

    def as_tensor(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """The storage, which is alive, as a tensor from its beginning."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.id)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)


def profiler_is_active() -> bool:
    """Whether a profiler runs in any thread of this process, or is about to: in the warm-up of its schedule.

    To start another one would end it. Profilers are found as what refers to their class, as each object does: half the
    time of looking at every object. Obsolete when torch's profilers nest, or when torch tells whether one is active.
    """
    profiler = torch.autograd.profiler
    return profiler._is_profiler_enabled or any(
        type(each) is profiler.profile and each.entered and each.kineto_results is None
        for each in gc.get_referrers(profiler.profile)
    )


def generator_id(generator: torch.Generator) -> int:
    """The same number for every Python object of one generator: a dispatch mode is given another one each time."""
    return generator._cdata


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
