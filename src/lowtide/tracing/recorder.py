"""`Recorder`: a dispatch mode that records every op, storage, saved tensor and module call of one step.

`tracing.trace` enters it around a forward and a backward, on real or fake tensors, and builds a `StepGraph` from its
records. Ops come from `__torch_dispatch__`, saved tensors from saved-tensor hooks, module calls from global module
hooks.

A plan changes what autograd holds, not what Python holds, so the two must be told apart, which an allocator's history
cannot do. The pack hook gives autograd an alias of each saved tensor, and the recorder counts the aliases of each
storage. A storage whose reference count equals its number of aliases is held by autograd alone; this is polled before
every op.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.errors import TraceError
from lowtide.replay.arguments import tensors_in
from lowtide.replay.op_facts import facts_of
from lowtide.tracing.devices import AllocatedBytes
from lowtide.tracing.fakes import Shadows, as_kernels_lay_out
from lowtide.tracing.trace_records import (
    ArgumentChanges,
    Clock,
    Layout,
    RawCall,
    RawOp,
    RawSave,
    RawValue,
    before_forwards,
    settled_flags,
)
from lowtide.units import in_blocks

_fake_kernels = _compat.FakeKernels()

# Ops of the backward, by forward op: torch runs them in place, and not in place under a dispatch mode.
_FILLED_IN_PLACE = {
    "aten.scatter_add.default": "aten.gather.default",
    "aten.put.default": "aten.take.default",
    "aten.index_put.default": "aten.index.Tensor",
    "aten.masked_scatter.default": "aten.masked_select.default",
}


class _Alias:
    """What autograd holds instead of a saved tensor; its destructor tells the recorder when autograd drops it."""

    __slots__ = ("recorder", "saves", "tensor")

    def __init__(self, recorder: Recorder, tensor: Tensor | _compat.FakeAlias, saves: list[RawSave]) -> None:
        self.recorder, self.tensor, self.saves = recorder, tensor, saves

    def __del__(self) -> None:
        self.recorder.release(self.saves)


class Recorder(_compat.DispatchMode):
    """Records a step on `device`: run it inside `recording()`, with `begin_backward()` between forward and backward.

    `names` has the paths of the model's modules. `before_write` is called with tensors and generators that existed
    before the step and are about to change. `shadows` is given for fake tensors. `finish()` ends the recording.
    """

    def __init__(
        self,
        device: torch.device,
        names: dict[nn.Module, str],
        clock: Clock | None = None,
        before_write: Callable[[Tensor | torch.Generator], None] | None = None,
        meter: Callable[[], AllocatedBytes] | None = None,
        mark: str | None = None,
        shadows: Shadows | None = None,
        block_bytes: int = 1,
    ) -> None:
        super().__init__()
        self.device = device
        self._fake_type = _compat.fake_type()
        self._seen_through = frozenset((*_compat.PLAIN_TYPES, self._fake_type, nn.Buffer))
        self.ops: list[RawOp] = []
        self.values: list[RawValue] = []
        self.saves: list[RawSave] = []
        self.calls: list[RawCall] = []
        self.num_forward, self.notes = -1, list[str]()
        self.marks: list[tuple[Any, Any]] = []
        self._names, self._clock, self._before_write = names, clock or Clock(), before_write
        self._meter = meter  # bytes allocated now, and the most since it was last read
        self._shadows, self.block_bytes = shadows, block_bytes
        self._mark = mark  # a name for each op in the profiler's trace
        self._by_storage: dict[int, int] = {}
        self._polled: dict[int, RawValue] = {}  # values that Python may still hold
        self._in_use: dict[int, list[RawSave]] = {}  # saves that the backward has read and may still be using
        self._open_calls: list[int] = []
        self._op_of_node: dict[int, int] = {}
        self._changes, self._thread, self._is_over = ArgumentChanges(), threading.get_ident(), False
        self._begun: dict[nn.Module, Any] = {}  # hooks that run when a module's own pre-hooks are done
        self._gathered: list[_Gathered] = []
        self._gathered_now: list[int] = []  # values that belong to the next op
        self._in_place: list[tuple[int, int, int]] = []  # ops that may be in place: number, first operand, result
        self._joined: set[int] = set()  # those of them that are

    def path_of(self, call: int) -> str:
        """Return the module path of a call, `""` for none (-1)."""
        return self.calls[call].path if call >= 0 else ""

    # Values.
    def add_existing(self, tensor: Tensor, kind: str, name: str) -> None:
        """Register a tensor that exists before the step."""
        for part in _compat.parts_of(tensor):
            self._value_of(part, kind, name, born=-1)

    def _value_of(self, tensor: Tensor, kind: str, name: str, born: int) -> int:
        known = self._by_storage.get(_compat.storage_id(tensor))
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        is_here = tensor.device == self.device
        size = in_blocks(storage.nbytes(), self.block_bytes) if is_here else 0
        reference = _compat.StorageReference(tensor)
        value = RawValue(size, kind if is_here else "elsewhere", name, born, reference)
        value.is_settled = not (tensor.is_floating_point() or tensor.is_complex())
        index = len(self.values)
        self.values.append(value)
        self._by_storage[reference.id] = index
        if born >= 0:
            self._polled[index] = value
        return index

    def values_of(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the values of the tensors' storages; an unknown storage must have existed before the step."""
        parts = (part for tensor in tensors for part in _compat.parts_of(tensor))
        return tuple(dict.fromkeys(self._value_of(part, "constant", "", born=-1) for part in parts))

    def watch_gathered(self, tensors: list[Tensor], name: str) -> None:
        """Record when the memory of these tensors exists. FSDP gathers and frees the parameters of a unit in place.

        Ops that use them read a parameter of no bytes; the bytes are a value of their own, which no plan changes.
        """
        for tensor in tensors:
            reference = _compat.StorageReference(tensor)
            self._by_storage[reference.id] = len(self.values)
            self.values.append(RawValue(0, "parameter", name, -1, reference))
        group = _Gathered(tensors, name)
        self._gathered.append(group)
        if size := group.num_bytes(self.block_bytes):
            self.values.append(RawValue(size, "constant", name, -1, None))
            group.is_static = True

    def _poll_gathered(self, position: int) -> None:
        for group in self._gathered:
            size = group.num_bytes(self.block_bytes)
            if size and group.value < 0 and not group.is_static:
                group.value = len(self.values)
                self.values.append(RawValue(size, "activation", group.name, position, None))
                self._gathered_now.append(group.value)
            elif not size and group.value >= 0:
                self.values[group.value].dropped = position
                group.value = -1

    def _poll(self) -> None:
        """Find the values whose last Python reference was dropped since the last op."""
        position = len(self.ops)
        if self._gathered:
            self._poll_gathered(position)
        if self._in_use:
            self._find_used(position)
        gone = [
            index
            for index, value in self._polled.items()
            if value.storage is not None and value.storage.num_uses() <= value.num_aliases
        ]
        for index in gone:
            value = self._polled.pop(index)
            value.dropped = position
            if not value.num_aliases:
                self._forget(value)

    def _find_used(self, position: int) -> None:
        for index in list(self._in_use):
            value = self.values[index]
            if value.storage is None or value.storage.num_uses() <= value.num_saved:
                for save in self._in_use.pop(index):
                    save.used = position if save.used < 0 else save.used

    def _forget(self, value: RawValue) -> None:
        if value.storage is not None:
            self._by_storage.pop(value.storage.id, None)
            value.storage = None

    # Ops.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._seen_through.issuperset(types):
            return NotImplemented  # a tensor subclass: its inner ops are dispatched to this mode
        if id(func) in _compat.BOOKKEEPING_IDS:
            return self._unrecorded(func, args, kwargs)
        is_answered, answer = self._shadows.number(func, args, kwargs) if self._shadows is not None else (False, None)
        facts = facts_of(func)
        name, flags = facts.name, facts.flags_of_call(args, kwargs)
        if "custom" in flags:
            self.notes.append(f"{name} is a custom kernel: recorded as one op, whatever runs inside")
        self._refuse_missing_device(name, kwargs)
        self._poll()
        index = len(self.ops)
        given = [part for tensor in tensors_in((args, kwargs)) for part in _compat.parts_of(tensor)]
        inputs = self.values_of(given)
        mutated = facts.written_tensors(args, kwargs)
        if mutated and "mutates" not in flags:
            flags = (*flags, "mutates")
        is_reduction = "collective" in flags and self.num_forward >= 0  # such as of DDP's buckets: no need to restore
        self._report_writes(() if is_reduction else mutated, args, kwargs)
        call, forward_op = self._owner()
        allocated = self._meter().now if self._meter is not None else 0
        before = self._clock.mark()
        out = answer if is_answered else self._run(func, args, kwargs)
        self.marks.append((before, self._clock.mark()))
        if self._shadows is not None:
            out = as_kernels_lay_out(name, given, out)
            self._shadows.follow(func, args, kwargs, out)
        made = [part for tensor in tensors_in(out) for part in _compat.parts_of(tensor)]
        num_known = len(self.values)
        outputs = tuple(
            dict.fromkeys(
                value
                for tensor in made
                if (value := self._value_of(tensor, "activation", name, born=index)) >= num_known
            )
        )
        if self._gathered_now:
            outputs, self._gathered_now = (*outputs, *self._gathered_now), []
        workspace = 0
        if self._meter is not None:
            kept = sum(self.values[value].bytes for value in outputs)
            workspace = max(0, self._meter().peak - allocated - kept)
        self.ops.append(
            RawOp(
                name,
                call,
                inputs,
                outputs,
                self.values_of(mutated) if mutated else (),
                flags,
                int(_compat.op_flops(func, args, kwargs, out)),
                sum(tensor.nbytes for tensor in given) + sum(tensor.nbytes for tensor in made),
                made[0].dtype if made else None,
                forward_op,
                workspace,
                facts.has_dynamic_shape,
                layouts=tuple(map(Layout.of, given)) if self._meter is None else (),
            )
        )
        self.ops[-1].flags = settled_flags(self.ops[-1], self.values)
        if self.num_forward >= 0 and len(inputs) > 1 and len(outputs) == 1:
            self._note_in_place(given[0])
        return out

    def _unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that computes nothing."""
        if func is _compat.DEVICE_QUERY and type(args[0]) is self._fake_type:
            return args[0].device  # as the fake answers itself, without going through the dispatcher again
        if self._shadows is None:
            return func(*args, **kwargs)
        out = _fake_kernels(func, args, kwargs)
        self._shadows.follow(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._shadows is not None:
            return _fake_kernels(func, args, kwargs)
        if self._mark is None:
            return func(*args, **kwargs)
        with torch.profiler.record_function(self._mark):
            return func(*args, **kwargs)

    def _report_writes(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> None:
        """Report what existed before the step and is about to change."""
        if self._before_write is None:
            return
        for tensor in tensors:
            if any(self._existed(value) for value in self.values_of([tensor])):
                self._before_write(tensor)
        for item in (*args, *kwargs.values()):
            if isinstance(item, torch.Generator):
                self._before_write(item)

    def _note_in_place(self, first: Tensor) -> None:
        """Remember the last op if autograd may write its result over the first operand when no dispatch mode is active.

        These are the sums of gradients of a tensor that the forward used several times, and ops that fill a new tensor
        of zeros in the backward of another. A sum inside the backward of one node has its operands from that node.
        Autograd does not write over a view, such as the gradient of a weight that was transposed, as this refers to its
        base.
        """
        if _compat.is_view(first):
            return
        op, value = self.ops[-1], self.values[self.values_of([first])[0]]
        if value.born < self.num_forward or value.bytes != self.values[op.outputs[0]].bytes:
            return
        maker = self.ops[value.born]
        filled = _FILLED_IN_PLACE.get(op.name)
        if filled is None:
            is_in_place = op.name == "aten.add.Tensor" and maker.forward_op != op.forward_op
        else:
            is_in_place = op.forward_op >= 0 and self.ops[op.forward_op].name == filled
        if is_in_place:
            self._in_place.append((len(self.ops) - 1, op.inputs[0], op.outputs[0]))

    def _join_in_place(self) -> None:
        """Make one value of the first operand and the result where nothing else had the operand after the op."""
        joined: dict[int, int] = {}
        for index, before, after in self._in_place:
            if self.values[before].dropped != index + 1:
                continue
            first = joined[after] = joined.get(before, before)
            op, value, result = self.ops[index], self.values[first], self.values[after]
            op.outputs, op.mutates, op.flags = (), (first,), (*op.flags, "mutates")
            self._joined.add(index)
            value.kind, value.name, value.dropped = result.kind, result.name, result.dropped
        if not joined:
            return
        kept = [value for value in range(len(self.values)) if value not in joined]
        number = {value: index for index, value in enumerate(kept)}
        number |= {after: number[first] for after, first in joined.items()}
        self.values = [self.values[value] for value in kept]
        for op in self.ops:
            op.inputs, op.outputs, op.mutates = (
                tuple(dict.fromkeys(number[value] for value in values))
                for values in (op.inputs, op.outputs, op.mutates)
            )
        for save in self.saves:
            save.value = number[save.value]
        for call in self.calls:
            call.inputs = tuple(number[value] for value in call.inputs)
            call.outputs = tuple(number[value] for value in call.outputs)

    def _owner(self) -> tuple[int, int]:
        """Return the module call that this op belongs to, and for a backward op its forward op."""
        if self.num_forward < 0:
            # Autograd numbers a node before its op runs: the last number is that of this op, or of an op around it.
            self._op_of_node.setdefault(_compat.sequence_number() - 1, len(self.ops))
            return self._open_call(), -1
        node = _compat.running_node()
        forward_op = -1 if node is None else self._op_of_node.get(_compat.sequence_of(node), -1)
        if forward_op < 0 and self.ops and len(self.ops) > self.num_forward:
            return self.ops[-1].call, -1  # accumulation into a leaf: same call as the op that made the gradient
        return (self.ops[forward_op].call if forward_op >= 0 else -1), forward_op

    def _open_call(self) -> int:
        """Return the innermost call whose forward runs now, -1 for none."""
        return next((call for call in reversed(self._open_calls) if self.calls[call].has_begun), -1)

    def _existed(self, value: int) -> bool:
        """Return whether a value's contents are from before the step. Those of gathered parameters are not kept."""
        return self.values[value].born < 0 and (self.values[value].kind, self.values[value].bytes) != ("parameter", 0)

    def _refuse_missing_device(self, name: str, kwargs: dict[str, Any]) -> None:
        wanted = torch.device(kwargs.get("device") or "cpu")
        if wanted.type not in ("cpu", "meta", self.device.type) and _compat.accelerator() is None:
            raise TraceError(
                f"{name} allocates on {wanted}, and this machine has none. Use the device of the batch in loss_fn "
                "(`x.to(batch.device)`), so that the step can be traced here."
            )

    # Saves.

    def _pack(self, tensor: Tensor) -> _Alias:
        call = self._open_call()
        alias: Tensor | _compat.FakeAlias
        if _compat.FakeAlias.is_possible(tensor, self._fake_type):
            alias = _compat.FakeAlias(tensor)  # leaving the modes would take five times as long
        else:
            with _compat.without_modes():
                alias = tensor.detach()
        saves = []
        for index in self.values_of([tensor]):
            self.values[index].num_aliases += 1
            self.values[index].num_saved += self.num_forward < 0
            self.values[index].note_saved(tensor, is_plain=type(tensor) in self._seen_through)
            saves.append(
                RawSave(index, call, len(self.ops), in_backward=self.num_forward >= 0, number=self._number_save(call))
            )
        if self.num_forward < 0:  # saves of a checkpoint's replay in the backward are not saves of the forward
            self.saves += saves
        return _Alias(self, alias, saves)

    def _number_save(self, call: int) -> int:
        """Number a save among those of its call, in the same way as the engines count saves when they run the step."""
        while call >= 0 and self.calls[call].path.startswith("<"):  # not a module of the model: engines ignore it
            call = self.calls[call].parent
        if call < 0 or self.num_forward >= 0:
            return -1
        self.calls[call].num_saves += 1
        return self.calls[call].num_saves - 1

    def _unpack(self, kept: _Alias) -> Tensor:
        for save in kept.saves:
            if save.read < 0:
                save.read = len(self.ops)
                if self.values[save.value].born >= 0:  # parameters stay in use
                    self._in_use.setdefault(save.value, []).append(save)
        # Another alias, whose reference shows when the backward is done with the value.
        if isinstance(kept.tensor, _compat.FakeAlias):
            return kept.tensor.detach()
        with _compat.without_modes():
            return kept.tensor.detach()

    def release(self, saves: list[RawSave]) -> None:
        """Record that autograd dropped a saved tensor; called by the destructor of its alias."""
        if self._is_over:
            return
        for save in saves:
            save.released = len(self.ops)
            if save.used < 0:
                save.used = save.released
            value = self.values[save.value]
            value.num_aliases -= 1
            value.num_saved -= not save.in_backward
            if save.in_backward and not value.num_saved and save.value not in self._polled:
                # Saved by a replay in the backward, which no plan changes: counts as a Python reference. If a save of
                # the forward is still there, the replay has got the value from that.
                value.dropped = max(value.dropped, save.released)
            if not value.num_aliases and save.value not in self._polled and value.born >= 0:
                self._forget(value)

    # Module calls.

    def _is_unrelated_call(self) -> bool:
        """Whether the module is called in the backward (by a checkpoint in the model) or in another thread."""
        return self.num_forward >= 0 or threading.get_ident() != self._thread

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self._is_unrelated_call():
            return
        path = self._names.get(module)
        if path is None:  # created during the step, or not part of the model
            path = f"<{type(module).__name__}>"
        parent = self._open_calls[-1] if self._open_calls else -1
        self._open_calls.append(len(self.calls))
        call = RawCall(path, type(module).__name__, parent, len(self.ops), has_begun=module not in self._begun)
        self.calls.append(call)

    def _leave_module(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if self._is_unrelated_call():
            return
        kwargs, output = rest if len(rest) == 2 else ({}, None)  # torch leaves kwargs out after an exception
        index = self._open_calls.pop()
        self._changes.end(index)
        call = self.calls[index]
        call.end, call.has_begun = len(self.ops), True
        call.inputs = self.values_of(tensors_in((args, kwargs)))
        call.outputs = self.values_of(tensors_in(output))

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_unrelated_call():
            call = self.calls[self._open_calls[-1]]
            call.first, call.has_begun = len(self.ops), True
            self._changes.begin(self._open_calls[-1], args, kwargs)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """A context in which ops, saved tensors and module calls are recorded."""
        entered = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        left = nn.modules.module.register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True)
        self._begun = before_forwards(self._names, self._begin_forward)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self:
                yield self
        finally:
            self._is_over = True
            entered.remove()
            for hook in self._begun.values():
                hook.remove()
            _compat.remove_global_hook(left)

    def begin_backward(self) -> None:
        """End the forward: the ops that follow are the backward's."""
        self._poll()
        self.num_forward = len(self.ops)
        self._in_use.clear()
        self._changes.finish()
        for index, name in self._changes.changed.items():
            self.calls[index].changes = name
        saves, last_end = list[RawSave](), max((call.end for call in self.calls), default=0)
        for save in self.saves:
            # The loss does not use it: its autograd graph is dropped with the model's outputs.
            is_unused = save.read < 0 and save.call >= 0 and save.released >= last_end
            if is_unused:
                save.used, save.released = -1, self.num_forward
            elif save.released >= 0:  # dropped inside of the model, by a backward in the forward, or part of the loss
                if save.value not in self._polled:
                    self.values[save.value].dropped = max(self.values[save.value].dropped, save.released)
                continue
            elif save.read >= 0:  # by a backward inside the forward
                save.read = save.used = -1
                self.notes.append("the forward runs a backward of its own: replays for that backward are not simulated")
            saves.append(save)
        self.saves = saves

    def add_workspaces(self, peaks: list[int]) -> None:
        """Set each op's workspace from its peak allocation in the recording, `peaks`, which includes its outputs."""
        for index, (op, peak) in enumerate(zip(self.ops, peaks, strict=True)):
            made = op.mutates if index in self._joined else op.outputs
            op.workspace_bytes = max(0, peak - sum(self.values[value].bytes for value in made))

    def note_gradient(self, gradient: Tensor, name: str) -> None:
        """Mark a leaf's gradient as such: it lives beyond the step and is not polled any more."""
        for index in self.values_of([gradient]):
            value = self.values[index]
            if value.kind == "activation":
                value.kind, value.name = "gradient", name
                self._polled.pop(index, None)

    def survivors(self) -> list[str]:
        """Return the ops whose outputs are still referenced after the step."""
        made = (value for value in self.values if value.born >= 0)
        return [value.name for value in made if value.storage is not None and value.storage.num_uses()]

    def finish(self) -> None:
        """End the recording: values and saves that are still alive live until the end of the step."""
        self._poll()
        self._is_over = True
        end = len(self.ops)
        for value in self.values:
            value.item_bytes = value.item_bytes or 0
            if value.dropped < 0 or value.born < 0:
                value.dropped = end
        for save in self.saves:
            if save.released < 0:
                save.released = end
            if save.used < 0 or save.read < 0:
                save.used = save.released
        for op, seconds in zip(self.ops, self._clock.seconds(self.marks), strict=True):
            op.seconds = seconds
        self.marks.clear()
        self._join_in_place()


class _Gathered:
    """Tensors that are allocated and freed together, with the value of their present allocation (-1: freed)."""

    def __init__(self, tensors: list[Tensor], name: str) -> None:
        self.name, self.value, self.is_static = name, -1, False
        self._storages = [tensor.untyped_storage() for tensor in tensors]

    def num_bytes(self, block_bytes: int) -> int:
        if not self._storages or not self._storages[0].nbytes():
            return 0
        return sum(in_blocks(storage.nbytes(), block_bytes) for storage in self._storages)
