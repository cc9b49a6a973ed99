"""`ActivationCheckpointer`: activation checkpointing for a layer loop that the user writes, without autograd.

The activation of layer `i` is its output. `forward` keeps the input and the outputs that the policy selects.
`recompute` starts from the nearest kept output at or before its target. `backward` goes back one segment at a time and
runs each segment once more; with `Revolve`, a number of slots bounds the memory, and layers run as often as that
schedule needs. Layers run under `no_grad`, as autograd would keep everything that is dropped here.

This file is the public class. `layer_pass` runs and replays the layers with the random numbers and buffers of their
forward, and holds the activations in an `ActivationStore`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from lowtide.errors import CapacityError, StoreError
from lowtide.policies import EveryN, MaxBytes, Policy, Revolve, Selective, SqrtN, Uniform, check_limit, check_policy
from lowtide.replay.arguments import Fingerprint
from lowtide.replay.layer_pass import INPUT, BackwardFn, KeptStates, LayerFn, LayerPass, LayerStats, State, bytes_of
from lowtide.store.activation_store import ActivationStore, check_store
from lowtide.units import format_bytes, parse_bytes


class ActivationCheckpointer:
    """Keeps some activations of a layer loop, and recomputes the others from the nearest one that is there.

    - `policy`: which layers are kept (`EveryN(4)`: 0, 4, 8 ...).
    - `max_checkpoints`: how many at most; beyond it `forward` keeps no more and `save` raises `CapacityError`. A
      policy that bounds memory (`SqrtN`, `Uniform`, `Revolve`) is refused if it keeps more.
    - `budget`: bytes, or `"1GiB"`, for the kept layers and the input. When it is full, layers are evicted, and
      recomputed when they are asked for. The input is never evicted.
    - `order`: which layers are evicted first, as in `ActivationStore`: `"oldest"`, `"cost"`, or `"auto"`, which goes by
      cost once `forward(..., costs=)` or `save(..., cost=)` gave one.
    - `codec`: how they are written (see `docs/store.md`); none by default, and then everything is exact. Tensors under
      4 KiB are kept as they are.
    - `store`: where they live, in place of `budget`, `order` and `codec`. It may be shared, also between checkpointers.
    - `enabled`: if False, `forward` only runs the layers and keeps nothing.

    All of these are attributes; `policy`, `max_checkpoints` and `enabled` can be set. Activations are tensors or numpy
    arrays. `copy` and `deepcopy` give an independent checkpointer with the same activations, in the same store if that
    was given.

    >>> import torch, lowtide
    >>> weights = [torch.tensor(float(i + 1)) for i in range(6)]
    >>> checkpointer = lowtide.ActivationCheckpointer(lowtide.EveryN(2))
    >>> checkpointer.forward(torch.ones(3), range(6), lambda x, i: x * weights[i])[0].item()
    720.0
    >>> checkpointer.num_checkpoints, checkpointer.recompute(3, range(6), lambda x, i: x * weights[i])[0].item()
    (3, 24.0)
    >>> checkpointer.backward(torch.ones(3), range(6), lambda x, i: x * weights[i], lambda x, g, i: g * weights[i])
    tensor([720., 720., 720.])

    With a budget, costs decide what stays, and what was evicted is recomputed:

    >>> checkpointer = lowtide.ActivationCheckpointer(lowtide.Selective(10), budget=36)
    >>> costs = [50, 1, 20, 1, 90, 1]
    >>> checkpointer.forward(torch.ones(3), range(6), lambda x, i: x * weights[i], costs=costs)[0].item()
    720.0
    >>> stats = checkpointer.stats()
    >>> stats.num_created, stats.num_evicted, stats.num_checkpoints, checkpointer.has(4)
    (3, 1, 2, True)
    >>> checkpointer.recompute(2, range(6), lambda x, i: x * weights[i])[0].item()
    6.0
    """

    hidden_from_replay = True  # where layers are methods of an object that holds this one

    def __init__(
        self,
        policy: Policy = EveryN(4),  # noqa: B008  frozen
        *,
        max_checkpoints: int | None = None,
        budget: int | str | None = None,
        order: str = "auto",
        codec: str | None = None,
        store: ActivationStore | None = None,
        enabled: bool = True,
    ) -> None:
        check_policy(policy)
        check_store(store)
        check_limit(max_checkpoints)
        if budget is not None and parse_bytes(budget) == 0:
            raise ValueError(
                "a budget of 0 bytes has no room for the input, which is always held. Give more, None for no limit, or "
                "enabled=False to keep nothing"
            )
        if store is not None and (budget, order, codec) != (None, "auto", None):
            raise ValueError("give budget, order and codec to the store itself, or leave store out")
        if isinstance(policy, Revolve):
            _check_bound(policy, policy.slots - 1, max_checkpoints)
        self.policy, self.max_checkpoints, self.enabled = policy, max_checkpoints, enabled
        self._budget, self._order, self._codec, self._given_store = budget, order, codec, store
        self._states = KeptStates(self._new_store() if store is None else store)
        self.clear()

    budget = property(lambda self: self._budget, doc="As given.")
    order = property(lambda self: self._order, doc="As given.")
    codec = property(lambda self: self._codec, doc="As given.")
    store = property(lambda self: self._states.store, doc="The store that activations live in.")

    def __repr__(self) -> str:
        options = {"max_checkpoints": self.max_checkpoints, "budget": self.budget, "codec": self.codec}
        given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        given += [f"order={self.order!r}"] * (self.order != "auto") + ["enabled=False"] * (not self.enabled)
        given += [f"store={self._given_store!r}"] * (self._given_store is not None)
        return f"{type(self).__name__}({', '.join([repr(self.policy), *given])})"

    def __copy__(self) -> ActivationCheckpointer:
        return self._copied(deep=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationCheckpointer:
        memo[id(self)] = new = self._copied(deep=True)
        return new

    # Single activations

    def save(self, i: int, x: State, *, cost: float | None = None) -> None:
        """Keep `x` as the activation of layer `i`: a `CapacityError` beyond `max_checkpoints`, unless it renews one."""
        slot = self._slot(i)
        if slot not in self._states and not self._has_slot_left():
            raise CapacityError(
                f"layer {i} would be checkpoint {len(self._states) + 1} of at most {self.max_checkpoints} "
                f"({self._kept_layers()}). Raise max_checkpoints, or clear() first."
            )
        self._put(slot, x, cost)

    def maybe_save(self, i: int, x: State, *, cost: float | None = None) -> bool:
        """Keep `x` as activation of layer `i` if `enabled`, the policy keeps it and there is room; return whether."""
        if not self.enabled:
            return False
        if isinstance(self.policy, Selective):
            is_kept = not self.policy.decide(1, None if cost is None else [cost])[0]
        else:
            is_kept = isinstance(self.policy, MaxBytes) or not self.policy.should_checkpoint(i)
        return is_kept and self._keep(self._slot(i), x, cost)

    def has(self, i: int) -> bool:
        """Whether the activation of layer `i` is kept."""
        return self._states.holds(self._slot(i))

    def get(self, i: int) -> State:
        """The kept activation of layer `i`; `KeyError` if it was not kept, or was evicted."""
        slot = self._slot(i)
        value = self._states.get(slot)
        if value is None:
            how = "was evicted" if slot in self._states.evicted else "was not kept"
            raise KeyError(f"layer {i} {how}; {self._kept_layers()}. recompute(i, ...) computes others again")
        return value

    def take(self, i: int) -> State:
        """Return the kept activation of layer `i` and release it."""
        value = self.get(i)
        self.remove(i)
        return value

    def remove(self, i: int) -> None:
        """Release the kept activation of layer `i`, if there is one."""
        self._states.drop(self._slot(i))

    def clear(self) -> None:
        """Release everything and reset the counters."""
        self._states.clear()
        self._pass = LayerPass(self._states)
        self._output: tuple[weakref.ref[Any], Fingerprint] | None = None  # of the last forward
        self._saved_bytes = 0

    def is_checkpoint_layer(self, i: int, n: int | None = None, *, costs: Sequence[float] | None = None) -> bool:
        """Return whether the policy keeps layer `i` (of `n`, with `costs`, for policies that need these)."""
        return not (self.policy.should_checkpoint(i) if n is None else self.policy.decide(n, costs)[i])

    @property
    def num_checkpoints(self) -> int:
        """Layers kept and not evicted, the input not counted."""
        self._states.look()
        return len(self._states)

    @property
    def stored_bytes(self) -> int:
        """Encoded bytes of the kept layers; the input, which belongs to the caller, is not counted."""
        return sum(self._states.held_bytes_by_tier().values())

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations of this pass that were not kept, or were evicted."""
        self._states.look()
        return self._saved_bytes + self._states.evicted_bytes

    def stats(self) -> LayerStats:
        """Return what is held in which tier, and how many layers ran."""
        return LayerStats(
            num_checkpoints=self.num_checkpoints,
            num_created=self._states.num_created,
            num_evicted=self._states.num_evicted,
            stored_bytes_by_tier=self._states.held_bytes_by_tier(),
            budget_bytes_by_tier=self.store.stats().budget_bytes_by_tier,
            saved_bytes=self.saved_bytes,
            num_forwards=self._pass.num_forwards,
            num_replayed=self._pass.num_replayed,
            max_held=self._pass.max_held,
        )

    # The loop

    def forward(self, x: State, layers: Sequence[int], fn: LayerFn, *, costs: Sequence[float] | None = None) -> State:
        """Run `fn(x, i)` for each `i` in `layers`; keep the input and what the policy keeps, drop the rest.

        `costs` are what recomputing each of `layers` takes, for policies and for the order of eviction.

        A forward that is given the output of the one before, and other layers, continues it: `[0, 1, 2]`, then
        `[3, 4, 5]`. Any other begins a new pass and releases the one before, and so does every one under `Revolve`,
        which schedules all layers at once. A layer may appear in `layers` more than once. Runs without gradients.
        """
        layers = _listed(layers)
        if costs is not None and len(costs) != len(layers):
            raise ValueError(f"costs has {len(costs)} values for {len(layers)} layers")
        recomputed = self._decide(layers, costs) if self.enabled else []
        if not self.enabled or not self._continues(x, layers):
            self.clear()
        try:
            if self.enabled:
                return self._forward(x, layers, fn, recomputed, costs)
            for layer in layers:
                x = self._pass.run(fn, x, layer)
            return x
        except BaseException:
            self.clear()
            raise

    def recompute(self, i: int, layers: Sequence[int], fn: LayerFn) -> State:
        """Return the activation of layer `i`, recomputed from the nearest kept layer at or before it or from the input.

        `layers` are those that ran, or a contiguous part of them; its first occurrence is used. If `i` appears in it
        more than once, the last counts: `recompute(1, [0, 1], fn)` is the first 1 of `[0, 1, 0, 1]`.
        """
        layers, ran = _listed(layers), self._pass.ran
        if i not in layers:
            raise ValueError(f"layer {i} is not among the layers {_shorten(layers)}")
        index = len(layers) - 1 - layers[::-1].index(i)
        if not ran:
            return self._recompute_saved(layers[: index + 1], fn)
        starts = range(len(ran) - len(layers) + 1)
        offset = next((start for start in starts if ran[start : start + len(layers)] == layers), None)
        if offset is None:
            raise self._not_what_ran(layers)
        return self._pass.state(offset + index, fn)

    def backward(self, grad: Any, layers: Sequence[int], fn: LayerFn, backward_fn: BackwardFn) -> Any:
        """Go back through `layers`, `backward_fn(activation_in, grad, i)` for each; gives the gradient of the input.

        `layers` are those that ran, or the last of them: then another `backward` goes on with the others. Runs each
        segment between kept layers once more (with `Revolve`: the optimal schedule) and releases what it has used.
        """
        layers, ran = _listed(layers), self._pass.ran
        first = len(ran) - len(layers)
        if not ran and layers:
            raise StoreError(f"there is no forward pass to go back through: {_CALL_FORWARD}")
        if first < 0 or ran[first:] != layers:
            raise self._not_what_ran(layers)
        self._output = None
        self._states.drop(len(ran) - 1)  # the output, which the backward does not need
        try:
            if isinstance(self.policy, Revolve) and first == 0 and ran:
                grad = self._pass.revolve(self.policy.slots, grad, fn, backward_fn)
            while len(ran) > first:
                grad = self._pass.back_through_segment(first, grad, fn, backward_fn)
        except BaseException:
            self.clear()
            raise
        if not ran:
            self._states.drop_pass()
        return grad

    # Inside

    def _forward(
        self, x: State, layers: list[int], fn: LayerFn, recomputed: list[bool], costs: Sequence[float] | None
    ) -> State:
        current = self._pass
        if not current.ran:
            self._put(INPUT, x, None)
        for index, layer in enumerate(layers):
            position = len(current.ran)
            if index == 0 or position - 1 in self._states:
                current.begin_run(fn, x)
            if isinstance(self.policy, Revolve) and index == len(layers) - 1:
                current.hold_at_hand(x)  # the schedule continues with this layer's backward
            x = current.run(fn, x, layer)
            current.ran.append(layer)
            if recomputed[index] or not self._keep(position, x, None if costs is None else costs[index]):
                self._saved_bytes += bytes_of(x)
        current.end_run()
        self._output = weakref.ref(x), Fingerprint(x)
        return x

    def _continues(self, x: State, layers: list[int]) -> bool:
        """Return whether a forward continues the last one. `Revolve` schedules all layers at once and never does."""
        if self._output is None or isinstance(self.policy, Revolve) or not set(layers).isdisjoint(self._pass.ran):
            return False
        output, mark = self._output
        return output() is x and mark.still_holds(x)

    def _decide(self, layers: list[int], costs: Sequence[float] | None) -> list[bool]:
        """Return which layers are recomputed, decided by their numbers if the policy can, else by their positions."""
        if isinstance(self.policy, MaxBytes):  # decides as sizes get known, in `_keep`
            return [False] * len(layers)
        try:
            return [self.policy.should_checkpoint(layer) for layer in layers]
        except TypeError:
            decisions = self.policy.decide(len(layers), costs)
        if isinstance(self.policy, SqrtN | Uniform | Revolve) and any(decisions):
            _check_bound(self.policy, decisions.count(False), self.max_checkpoints)
        return decisions

    def _keep(self, slot: Hashable, x: State, cost: float | None) -> bool:
        """Keep a state that the policy keeps, if there is room; return whether there was."""
        if slot not in self._states and not self._has_slot_left():
            return False
        if isinstance(self.policy, MaxBytes):
            budget_bytes = parse_bytes(self.policy.budget)
            dropped_bytes = self._states.make_room(budget_bytes, slot, bytes_of(x), cost)
            if dropped_bytes is None:
                return False
            self._saved_bytes += dropped_bytes
        try:
            self._put(slot, x, cost)
        except CapacityError:
            if self.store.on_full != "evict":
                raise
            return False  # with the input alone, there is no room for it
        return True

    def _put(self, slot: Hashable, x: State, cost: float | None) -> None:
        try:
            self._states.put(slot, x, cost)
        except CapacityError as error:
            if self._budget is None:
                raise
            what = "the input, which is always held," if slot == INPUT else "the activation"
            beside = "" if slot == INPUT or INPUT not in self._states else " beside the input, which is always held"
            raise CapacityError(
                f"{what} takes {format_bytes(bytes_of(x))}, and budget={self._budget!r} has no room for that{beside}. "
                "Give budget= more, or choose a codec."
            ) from error
        self._pass.note_held()

    def _has_slot_left(self) -> bool:
        if self.max_checkpoints is None or len(self._states) < self.max_checkpoints:
            return True
        self._states.look()
        return len(self._states) < self.max_checkpoints

    def _slot(self, i: int) -> Hashable:
        """Return the key of the activation of layer `i`: the position where it last ran, if it did."""
        ran = self._pass.ran
        return len(ran) - 1 - ran[::-1].index(i) if i in ran else ("layer", i)

    def _recompute_saved(self, layers: list[int], fn: LayerFn) -> State:
        """Recompute from an activation that `save` kept, as no forward ran."""
        for index in reversed(range(len(layers))):
            x = self._states.get(self._slot(layers[index]))
            if x is not None:
                for layer in layers[index + 1 :]:
                    x = self._pass.run(fn, x, layer, again=True)
                return x
        raise StoreError(f"there is no input to start from: {_CALL_FORWARD}")

    def _new_store(self) -> ActivationStore:
        on_full = "spill" if self._budget is None else "evict"
        return ActivationStore(device=self._budget, on_full=on_full, order=self._order, codec=self._codec)

    def _copied(self, *, deep: bool) -> ActivationCheckpointer:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._states = self._states.copied(self._given_store or self._new_store(), deep=deep)
        new._pass = self._pass.copied(new._states, deep=deep)
        return new

    def _not_what_ran(self, layers: list[int]) -> ValueError:
        how = "A forward continues the one before only if it is given that one's very output, and other layers"
        if isinstance(self.policy, Revolve):
            how = "Each forward is a pass of its own under Revolve, which schedules all layers at once"
        return ValueError(
            f"the layers {_shorten(layers)} are not those that ran, {_shorten(self._pass.ran)}. Give the layers of "
            f"this pass. {how}"
        )

    def _kept_layers(self) -> str:
        self._states.look()
        ran = self._pass.ran
        kept = [ran[key] if isinstance(key, int) else key[1] for key in self._states]  # type: ignore[index]
        return f"kept are {_shorten(sorted(kept))}" if kept else "none is kept"


_CALL_FORWARD = "call forward(x, layers, fn) first, with enabled=True"


def _check_bound(policy: Policy, num_kept: int, max_checkpoints: int | None) -> None:
    """Raise if a policy that bounds memory keeps more layers than `max_checkpoints` allows."""
    if max_checkpoints is not None and num_kept > max_checkpoints:
        raise ValueError(
            f"{policy} keeps {num_kept} layers beside the input, and max_checkpoints is {max_checkpoints}: raise "
            f"max_checkpoints, or use Revolve({max_checkpoints + 1}), which needs no more"
        )


def _listed(layers: Sequence[int]) -> list[int]:
    try:
        return list(layers)
    except TypeError:
        raise TypeError(f"layers are the numbers of the layers, such as range(12), not {layers!r}") from None


def _shorten(layers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, layers[:12]))}{', ...' if len(layers) > 12 else ''}]"
