"""`LazyLogits`: the output of a model's last linear layer, computed only if something reads its values.

With `split=True` the layer returns this tensor instead of its product. It has the shape, type and device of the logits
and no memory. Through `__torch_function__` it sees what loss code does with it: casts, views and slices, functions of
single elements and of single rows give another lazy tensor (`RowLayout`, `RowChain`). A loss, such as `cross_entropy`,
is computed in parts (`chunked_loss`). Any other function, and any attribute of the values, first computes the logits in
full, as the plain step does, and logs that once: results are the same, memory is not saved.

C++ code and `autograd.Function`s do not go through `__torch_function__`. The tensor therefore has an autograd node of
its own, which passes a gradient on to the layer's input and weight, and a `__torch_dispatch__` that computes the
values.

(The alternative was to recognise loss functions by name and to replace them. That breaks with every wrapper around
them; ops on logits are few and do not change.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.errors import LowtideError
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.replay.environment import modes_now
from lowtide.split.chunked_loss import HeadCall
from lowtide.split.row_chain import RowChain, RowLayout, autocast_as, hidden_saves

# Attributes and methods that a lazy tensor knows without its values.
_KNOWN = frozenset(
    "shape dtype device requires_grad ndim is_cuda is_cpu is_meta is_leaf layout is_sparse is_quantized is_nested "
    "is_mkldnn is_xpu is_mps names itemsize nbytes output_nr grad_fn is_vulkan is_ipu is_maia is_mtia is_xla _base "
    "size dim ndimension numel nelement stride is_floating_point is_complex element_size is_contiguous __len__ "
    "__hash__ storage_offset get_device is_inference is_conj is_neg is_signed is_same_size _is_view".split()
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function and its arguments
Handler = Callable[[Any, Any, Any], Any]  # called with them


class LazyLogits(Tensor):
    """Logits that are not computed yet, or what a chain of row-wise functions makes of them."""

    chain: RowChain
    row_layout: RowLayout
    probe: Tensor  # of the same type, with the same columns and no rows
    _recipe: _Recipe
    _known: Tensor | None  # the values, once they are computed
    _node: Any  # its autograd node

    @staticmethod
    def __new__(cls, chain: RowChain, layout: RowLayout, probe: Tensor, call: Call | None = None) -> LazyLogits:
        """`call` is what the plain step would compute this tensor by; None for the output of a head."""
        made: Any
        needs_grad = torch.is_grad_enabled() and any(head.needs_grad for head in chain.heads)
        recipe = _Recipe(chain, call)
        if needs_grad:
            inputs = [tensor for head in chain.heads if head.needs_grad for tensor in head.tensors]
            made = _Pending.apply(recipe, layout.shape, probe.dtype, probe.device, *inputs)
        else:
            made = _compat.wrapper_tensor(LazyLogits, layout.shape, probe.dtype, probe.device)
        with _compat.without_torch_function():
            made.chain, made.row_layout, made.probe = chain, layout, probe
            made._recipe, made._known, made._node = recipe, None, made.grad_fn
        for head in chain.heads:
            head.members.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls, head: HeadCall) -> LazyLogits:
        """The output of a head."""
        probe = head.hidden.detach().new_empty((0, head.weight.shape[0]), dtype=head.dtype)
        return cls(RowChain(None, head=head), RowLayout.of(head.shape), probe)

    @property
    def is_computed(self) -> bool:
        """Whether the values exist."""
        return self._known is not None

    def computed(self, why: str) -> Tensor:
        """The values, computed as the plain step would, with their autograd history. `why` goes to the log."""
        if self._known is None:
            for head in self.chain.heads:
                head.note(why)
            self._known = _Revealed.apply(self, why) if self._has_other_node else self._recipe.run(why)
        return self._known

    @property
    def _has_other_node(self) -> bool:
        """Whether an `autograd.Function` has passed it on: that of a module's backward hook waits for its gradient."""
        with _compat.without_torch_function():
            return self.grad_fn is not self._node

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The tensors that hold its bytes: none, or the values. A trace and the store count memory by this."""
        return ["_known"] if self._known is not None else [], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in _KNOWN:
            with _compat.without_torch_function():
                return func(*args, **kwargs)
        if name in ("__repr__", "__format__", "__str__"):
            lazy = args[0]
            if lazy._known is None:
                return f"LazyLogits(shape={tuple(lazy.row_layout.shape)}, dtype={lazy.probe.dtype}, not computed)"
        args, kwargs = _swapped((args, kwargs), _known_values)
        if lazies_in((args, kwargs)):
            if name == "register_hook" and _compat.is_before_backward_of_fsdp(args[1]):
                # The root of a sharded model: its parameters are there, and it only needs to know of the backward.
                handles = [each.register_hook(args[1]) for each in first_in_backward(args[0]) if each.requires_grad]
                return handles[0] if handles else None
            _refuse_gradients_after_loss(name, args, kwargs)
            handler = HANDLERS.get(name)
            if handler is not None and "out" not in kwargs:
                found = handler(func, args, kwargs)
                if found is not NotImplemented:
                    return found
            if name == "__setitem__" or (name.endswith("_") and not name.startswith("_")):  # in place
                _compute_all(args, kwargs, name)
            args, kwargs = _swapped((args, kwargs), lambda lazy: lazy.computed(name))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _swapped((args, kwargs or {}), lambda lazy: lazy.computed(str(func)).detach())
        return func(*args, **kwargs)


HANDLERS: dict[str, Handler] = {}  # by the function's name; filled by `logit_functions`


class _Recipe:
    """How the plain step computes a lazy tensor: the function, with its lazy arguments, and torch's modes then."""

    def __init__(self, chain: RowChain, call: Call | None) -> None:
        self._chain, self._call, self._hooks = chain, call, _compat.current_hooks()
        self._grad, self._autocast = torch.is_grad_enabled(), modes_now()[2]

    def run(self, why: str, *, anew: bool = False) -> Tensor:
        """Compute it; if `anew`, with a graph of its own down to the head's inputs.

        Other saved-tensor hooks than those of its call do not see it: a checkpoint that was given a lazy tensor would
        not see it again in its replay, where the values exist.
        """
        hooks = _compat.current_hooks()
        are_own = hooks is None or (self._hooks is not None and hooks[0] is self._hooks[0])

        def values(lazy: LazyLogits) -> Tensor:
            return lazy._recipe.run(why, anew=True) if anew else lazy.computed(why)

        with nullcontext() if are_own else hidden_saves():
            self._chain.check_unchanged()
            if self._call is None:
                assert self._chain.head is not None
                return self._chain.head.whole()
            function, args, kwargs = self._call
            args, kwargs = _swapped((args, kwargs), values)
            with torch.set_grad_enabled(self._grad), autocast_as(self._autocast):
                return function(*args, **kwargs)  # type: ignore[no-any-return]


class _Revealed(torch.autograd.Function):
    """The values of a lazy tensor; their gradient goes to its autograd node."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, why: str) -> Tensor:
        return lazy._recipe.run(why).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Pending(torch.autograd.Function):
    """The autograd node of a lazy tensor, for gradients that reach it other than through `__torch_function__`."""

    @staticmethod
    def forward(
        ctx: Any, recipe: _Recipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *inputs: Tensor
    ) -> Tensor:
        ctx.recipe, ctx.inputs = recipe, inputs
        return _compat.wrapper_tensor(LazyLogits, shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            values = ctx.recipe.run("a gradient", anew=True)
        needed = [each for each, is_needed in zip(ctx.inputs, ctx.needs_input_grad[4:], strict=True) if is_needed]
        found = iter(torch.autograd.grad(values, needed, gradient, allow_unused=True))
        return None, None, None, None, *(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[4:])


def first_in_backward(tensor: Tensor) -> list[Tensor]:
    """The tensors whose autograd nodes run first when a backward reaches `tensor`.

    A loss in parts has no node for the logits: it goes on with the inputs of their layers.
    """
    if isinstance(tensor, LazyLogits):
        return [head.hidden for head in tensor.chain.heads]
    return [tensor]


def lazies_in(tree: Any) -> list[LazyLogits]:
    """The lazy tensors in nested arguments."""
    return [tensor for tensor in tensors_in(tree) if isinstance(tensor, LazyLogits)]


def _swapped(tree: Any, function: Callable[[LazyLogits], Tensor]) -> Any:
    return map_tensors(lambda tensor: function(tensor) if isinstance(tensor, LazyLogits) else tensor, tree)


def _known_values(lazy: LazyLogits) -> Tensor:
    """The values of a lazy tensor if they exist, or must exist for others to get its gradient; else the lazy tensor."""
    if lazy._known is None and lazy._has_other_node:
        return lazy.computed("a backward hook")
    return lazy if lazy._known is None else lazy._known


def _refuse_gradients_after_loss(name: str, args: Any, kwargs: Any) -> None:
    """Raise if a gradient of logits is asked for after a loss: the loss has no node for them, so none would arrive."""
    if name == "grad":
        wanted = kwargs.get("inputs", args[1:2])
    else:
        wanted = args[:1] if name in ("register_hook", "retain_grad") else ()
    if any(head.has_loss for lazy in lazies_in(wanted) for head in lazy.chain.heads):
        raise LowtideError(
            f"{name} on logits whose loss split=True has computed in parts: they have no gradient. Ask for it before "
            "the loss is computed (the logits are then computed in full), or fit without split=True."
        )


def _compute_all(args: Any, kwargs: Any, why: str) -> None:
    """Compute every lazy tensor of the heads involved: views must see the change, and copies must not."""
    for lazy in lazies_in((args, kwargs)):
        for head in lazy.chain.heads:
            for reference in head.members:
                if (member := reference()) is not None:
                    member.computed(why)
