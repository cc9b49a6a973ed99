"""`ActivationCheckpointer`: the bookkeeping of a layer loop of your own, with no autograd needed.

The activation of layer `i` is its output. `forward` keeps the outputs the policy keeps (boundaries) and the input;
`recompute` starts from the nearest one at or before its target; `backward` goes back a segment at a time and runs
each segment once more. With `Revolve`, memory is bounded by slots instead, and layers run as often as the theory says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.errors import CapacityError, StoreError
from lowtide.memory.store import ActivationStore, Missing, check_store
from lowtide.policies import EveryN, Policy, Revolve, Uniform, check_policy
from lowtide.units import format_bytes

LayerFn = Callable[[Tensor, int], Tensor]
BackwardFn = Callable[[Tensor, Any, int], Any]
_INPUT = "input"


@dataclass(frozen=True)
class LayerStats:
    """What a checkpointer holds and has done."""

    num_checkpoints: int
    stored_bytes: int
    saved_bytes: int
    num_forwards: int
    num_replayed: int
    max_held: int

    def __str__(self) -> str:
        return (
            f"{self.num_checkpoints} layers kept ({format_bytes(self.stored_bytes)}), {format_bytes(self.saved_bytes)} "
            f"not kept; {self.num_forwards} layers run, {self.num_replayed} of them again; "
            f"{self.max_held} activations held at most"
        )


class ActivationCheckpointer:
    """Keeps some activations of a layer loop and brings back the others.

    - `policy`: which layers are kept (`EveryN(4)`: 0, 4, 8 ...).
    - `max_checkpoints`: how many at most; beyond it `forward` keeps no more, and `save` raises `CapacityError`.
    - `codec`: how they are written (see `docs/store.md`); none by default, and then everything is exact.
    - `store`: where they live; a store of its own, on the device, by default.

    >>> import torch, lowtide
    >>> weights = [torch.tensor(float(i + 1)) for i in range(6)]
    >>> checkpointer = lowtide.ActivationCheckpointer(lowtide.EveryN(2))
    >>> checkpointer.forward(torch.ones(3), range(6), lambda x, i: x * weights[i])[0].item()
    720.0
    >>> checkpointer.num_checkpoints, checkpointer.recompute(3, range(6), lambda x, i: x * weights[i])[0].item()
    (3, 24.0)
    >>> checkpointer.backward(torch.ones(3), range(6), lambda x, i: x * weights[i], lambda x, g, i: g * weights[i])
    tensor([720., 720., 720.])
    """

    def __init__(
        self,
        policy: Policy = EveryN(4),  # noqa: B008  frozen
        *,
        max_checkpoints: int = 64,
        codec: str | None = None,
        store: ActivationStore | None = None,
    ) -> None:
        check_policy(policy)
        check_store(store)
        if isinstance(max_checkpoints, bool) or not isinstance(max_checkpoints, int) or max_checkpoints < 0:
            raise ValueError(f"max_checkpoints is a number of layers, 0 or more, not {max_checkpoints!r}")
        if store is not None and codec is not None:
            raise ValueError("give the codec to the store itself, or leave store out")
        if isinstance(policy, Revolve) and policy.slots - 1 > max_checkpoints:
            raise ValueError(f"{policy} keeps {policy.slots - 1} layers beside the input: raise max_checkpoints")
        self.policy = policy
        self.max_checkpoints = max_checkpoints
        self._store = ActivationStore(codec=codec) if store is None else store
        self._kept: dict[int, tuple[int, int]] = {}  # layer: (position in the loop, bytes as given)
        self._order: dict[int, int] = {}
        self._has_input = False
        self._at_hand: Tensor | None = None
        self._saved_bytes = self._num_forwards = self._num_replayed = self._max_held = 0

    # Bookkeeping by hand

    def save(self, i: int, x: Tensor) -> None:
        """Keep `x` as the activation of layer `i`: a `CapacityError` beyond `max_checkpoints`, unless it renews one."""
        if i not in self._kept and len(self._kept) >= self.max_checkpoints:
            raise CapacityError(
                f"layer {i} would be checkpoint {len(self._kept) + 1} of at most {self.max_checkpoints} "
                f"({self._listed()}). Raise max_checkpoints, or clear() first."
            )
        self._store.put(self._key(i), x)
        self._kept[i] = (self._order.get(i, i), x.nbytes)
        self._note_held()

    def get(self, i: int) -> Tensor:
        """The kept activation of layer `i`."""
        if i not in self._kept:
            raise KeyError(f"layer {i} was not kept; {self._listed()}. recompute(i, ...) brings others back")
        return self._fetch(self._key(i))

    def clear(self) -> None:
        """Let go of everything, and count from zero."""
        for i in list(self._kept):
            self._drop(i)
        if self._has_input:
            self._store.remove(self._key(_INPUT))
        self._has_input = False
        self._at_hand = None
        self._order = {}
        self._saved_bytes = self._num_forwards = self._num_replayed = self._max_held = 0

    def is_checkpoint_layer(self, i: int, n: int | None = None) -> bool:
        """Whether the policy keeps layer `i` (of `n`, for policies that need to know)."""
        return not (self.policy.should_checkpoint(i) if n is None else self.policy.decide(n)[i])

    @property
    def num_checkpoints(self) -> int:
        """Layers kept, the input not counted."""
        return len(self._kept)

    @property
    def stored_bytes(self) -> int:
        """What the kept layers really take, as encoded; the input, which is the caller's, is not counted."""
        keys = {self._key(i) for i in self._kept}
        return sum(entry.nbytes for entry in self._store.stats().entries if entry.key in keys)

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that the last forward did not keep."""
        return self._saved_bytes

    def stats(self) -> LayerStats:
        return LayerStats(
            self.num_checkpoints,
            self.stored_bytes,
            self._saved_bytes,
            self._num_forwards,
            self._num_replayed,
            self._max_held,
        )

    # The loop

    def forward(self, x: Tensor, layers: Sequence[int], fn: LayerFn) -> Tensor:
        """Run `fn(x, i)` for each `i` in `layers`; keep the input and what the policy keeps, drop the rest."""
        layers = self._check_layers(layers)
        self.clear()
        self._order = {layer: position for position, layer in enumerate(layers)}
        self._store.put(self._key(_INPUT), x)
        self._has_input = True
        self._note_held()
        for layer, recomputed in zip(layers, self._decide(layers), strict=True):
            if isinstance(self.policy, Revolve) and layer == layers[-1]:
                self._at_hand = x  # the theory goes straight on to this layer's backward, with its input at hand
            x = self._run(fn, x, layer)
            if not recomputed and len(self._kept) < self.max_checkpoints:
                self.save(layer, x)
            else:
                self._saved_bytes += x.nbytes
        return x

    def recompute(self, i: int, layers: Sequence[int], fn: LayerFn) -> Tensor:
        """The activation of layer `i`, from the nearest kept layer at or before it, or from the input."""
        layers = self._check_layers(layers)
        if i not in layers:
            raise ValueError(f"layer {i} is not among the layers {_shorten(layers)}")
        position = layers.index(i)
        start = next((p for p in range(position, -1, -1) if layers[p] in self._kept), -1)
        x = self._state(layers, start)
        for layer in layers[start + 1 : position + 1]:
            x = self._run(fn, x, layer, again=True)
        return x

    def backward(self, grad: Any, layers: Sequence[int], fn: LayerFn, backward_fn: BackwardFn) -> Any:
        """Go back through `layers`, `backward_fn(activation_in, grad, i)` for each; gives the gradient of the input.

        Runs each segment between kept layers once more (with `Revolve`: the optimal schedule) and lets go of what it
        has used. Call it once after `forward`.
        """
        layers = self._check_layers(layers)
        if layers and layers[-1] in self._kept:
            self._drop(layers[-1])  # the output, which going back does not need
        if isinstance(self.policy, Revolve):
            return self._revolve(grad, layers, fn, backward_fn)
        position = len(layers) - 1
        while position >= 0:
            start = next((p for p in range(position - 1, -1, -1) if layers[p] in self._kept), -1)
            states = [self._state(layers, start)]  # states[k] is the input of layer start + 1 + k
            for layer in layers[start + 1 : position]:
                states.append(self._run(fn, states[-1], layer, again=True))
                self._note_held(len(states) - 1)
            while position > start:
                grad = backward_fn(states.pop(), grad, layers[position])
                position -= 1
            if start >= 0:
                self._drop(layers[start])
        return grad

    # Revolve

    def _revolve(self, grad: Any, layers: list[int], fn: LayerFn, backward_fn: BackwardFn) -> Any:
        kept = [-1, *sorted(self._order[layer] for layer in self._kept if layer in self._order)]
        end = len(layers)  # layers from here on are done
        if self._at_hand is not None:
            grad, self._at_hand, end = backward_fn(self._at_hand, grad, layers[-1]), None, end - 1
        for start in reversed(kept):
            free = self.policy.slots - sum(state <= start for state in kept) + 1  # type: ignore[attr-defined]
            grad = self._revolve_from(start, end, free, grad, layers, fn, backward_fn)
            end = start + 1
            if start >= 0:
                self._drop(layers[start])
        return grad

    def _revolve_from(
        self, start: int, end: int, slots: int, grad: Any, layers: list[int], fn: LayerFn, backward_fn: BackwardFn
    ) -> Any:
        """Back from layer `end - 1` to the first after position `start`, which is kept, with `slots` states in all."""
        while end - start - 1 > 1:
            step = Revolve(slots).next_kept(end - start - 1) if slots > 1 else end - start - 2
            x = self._state(layers, start)
            for layer in layers[start + 1 : start + 1 + step]:
                x = self._run(fn, x, layer, again=True)
            middle = start + step
            if slots > 1:
                self.save(layers[middle], x)
                del x
                grad = self._revolve_from(middle, end, slots - 1, grad, layers, fn, backward_fn)
                self._drop(layers[middle])
            else:
                grad = backward_fn(x, grad, layers[middle + 1])
            end = middle + 1
        if end - start - 1 == 1:
            grad = backward_fn(self._state(layers, start), grad, layers[start + 1])
        return grad

    # Inside

    def _decide(self, layers: list[int]) -> list[bool]:
        """By position for policies that see all layers, by the layer's own number where the rule needs no more."""
        if isinstance(self.policy, Uniform):  # a segment is replayed from the output of the one before it
            kept = {segment.end for segment in self.policy.segments(len(layers))[:-1]}
            return (
                [position not in kept for position in range(len(layers))] if kept else self.policy.decide(len(layers))
            )
        try:
            return [self.policy.should_checkpoint(layer) for layer in layers]
        except TypeError:
            return self.policy.decide(len(layers))

    def _run(self, fn: LayerFn, x: Tensor, layer: int, *, again: bool = False) -> Tensor:
        self._num_forwards += 1
        self._num_replayed += again
        return fn(x, layer)

    def _state(self, layers: list[int], position: int) -> Tensor:
        """The output of the layer at `position`, which is kept; the input for -1."""
        if position >= 0:
            return self.get(layers[position])
        if not self._has_input:
            raise StoreError("there is no input to start from: call forward(x, layers, fn) first")
        return self._fetch(self._key(_INPUT))

    def _fetch(self, key: Any) -> Tensor:
        value = self._store.get(key)
        if isinstance(value, Missing):
            raise StoreError(f"{key[1]} was evicted from the store: use on_full='spill', or keep fewer layers")
        return value

    def _drop(self, i: int) -> None:
        self._store.remove(self._key(i))
        del self._kept[i]

    def _key(self, i: int | str) -> tuple[int, int | str]:
        return (id(self), i)

    def _note_held(self, transient: int = 0) -> None:
        self._max_held = max(self._max_held, len(self._kept) + self._has_input + transient)

    def _check_layers(self, layers: Sequence[int]) -> list[int]:
        layers = list(layers)
        if len(set(layers)) != len(layers):
            raise ValueError(f"each layer stands once in layers; got {_shorten(layers)}")
        return layers

    def _listed(self) -> str:
        return f"kept are {_shorten(sorted(self._kept))}" if self._kept else "none is kept"


def _shorten(layers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, layers[:12]))}{', ...' if len(layers) > 12 else ''}]"
