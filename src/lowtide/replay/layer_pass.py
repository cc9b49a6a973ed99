"""One pass through the layers of `ActivationCheckpointer`: the kept activations, replays, and the backward.

A state is the output of the layer at a position, a tensor or a numpy array; the input is the state at position -1.

- `LayerState` captures random states, torch's modes, modules and closed-over values before the layer at which a
  replay may start. The layers after it need no capture of their own: they change these values again in the replay.
- `KeptStates` holds states in an `ActivationStore`, which may be shared and may evict some of them. It notices
  evictions at look-ups, and when it stores the next state. States that are left when the object is deleted are
  released.
- `LayerPass` records which layers ran, and replays them from the nearest kept state in the order they ran.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import CapacityError, ChangedInPlaceError, StoreError
from lowtide.policies import Revolve
from lowtide.replay import divergence, environment
from lowtide.replay.arguments import Fingerprint
from lowtide.replay.function_state import FunctionState
from lowtide.replay.recomputing import guard, one_deeper
from lowtide.store.activation_store import ActivationStore, Missing
from lowtide.units import format_bytes


class LayerState:
    """The state that `function` reads, captured just before it is called with `x`."""

    __slots__ = ("_environment", "_function", "_is_done", "_state")

    def __init__(self, function: Callable[..., Any], x: Any) -> None:
        self._function = function
        self._state = FunctionState(function)
        devices = [x.device] if isinstance(x, Tensor) else []
        self._environment = environment.capture(chain(self._state.devices(), devices), self._state.generators())
        self._is_done = False

    def done(self) -> None:
        """Record what the run wrote, once it is over."""
        if not self._is_done:
            self._state = self._state.forward_done(runs_all=False)
            self._is_done = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context for a replay of the run. Afterwards the state of before is restored."""
        lost = self._state.lost()
        with ExitStack() as stack:
            stack.callback(self._state.restore(is_done=self._is_done))
            stack.callback(self._environment.restore())
            stack.enter_context(one_deeper())
            if lost:
                stack.enter_context(guard(lost, self._function))
            yield


State = Any  # a tensor or a numpy array
INPUT = -1  # the position before the first layer

_numbers = itertools.count(1)


class _Kept(NamedTuple):
    nbytes: int  # before any codec
    cost: float | None
    is_array: bool


class KeptStates:
    """States by position (or another key), in a store. The input is never evicted and not counted."""

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self._name = f"checkpointer {next(_numbers)}"
        self._kept: dict[Hashable, _Kept] = {}
        self.evicted: set[Hashable] = set()
        self._worth: dict[Hashable, float] = {}  # cost per byte, the oldest first
        self.num_created = self.num_evicted = self.evicted_bytes = 0
        self._num_evicted_by_store = 0  # at the last `look` of a `put`; the store may be shared

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a state was kept; it may have been evicted since."""
        return key in self._kept

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the kept states, without the input."""
        return (key for key in list(self._kept) if key != INPUT)

    def __len__(self) -> int:
        return len(self._kept) - (INPUT in self._kept)

    def put(self, key: Hashable, value: State, cost: float | None = None) -> None:
        is_array = isinstance(value, np.ndarray | np.generic)
        if not is_array and not isinstance(value, Tensor):
            raise TypeError(f"an activation is a tensor or a numpy array, not {type(value).__name__}")
        # Arrays have no version counter, so the store gets a copy.
        tensor = torch.from_numpy(np.array(value, order="C")) if is_array else value
        self.store.put(self._key(key), tensor, cost=cost, evictable=key != INPUT)
        self.num_created += key != INPUT and key not in self._kept
        self._kept[key] = _Kept(bytes_of(tensor), cost, is_array)
        self.evicted.discard(key)
        if self.store.num_evicted != self._num_evicted_by_store:
            self._num_evicted_by_store = self.store.num_evicted
            self.look()

    def get(self, key: Hashable) -> State | None:
        """Return a state; None if it was not kept or was evicted."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        try:
            value = self.store.get(self._key(key)) if self.store.has(self._key(key)) else None
        except ChangedInPlaceError as error:
            where = f"of layer {key[1]}" if isinstance(key, tuple) else f"at position {key} of the layers that ran"
            what = "the input" if key == INPUT else f"the activation {where}"
            raise ChangedInPlaceError(
                f"{what} was changed in place since it was kept, by a layer or by other code, so layers after it "
                "cannot be recomputed. Let layers return new tensors."
            ) from error
        if value is None or isinstance(value, Missing):
            self._note_evicted(key)
            return None
        return value.numpy().copy() if kept.is_array else value

    def holds(self, key: Hashable) -> bool:
        """Return whether a state is kept and was not evicted."""
        if key in self._kept and not self.store.has(self._key(key)):
            self._note_evicted(key)
        return key in self._kept

    def drop(self, key: Hashable) -> None:
        """Release a state, if it is kept."""
        if self._kept.pop(key, None) is not None:
            self.store.release_later(self._key(key))

    def drop_pass(self) -> None:
        """Release the input and the states by position, once a pass is over. Others are the user's own."""
        for key in [key for key in self._kept if isinstance(key, int)]:
            self.drop(key)

    def make_room(self, budget_bytes: int, key: Hashable, nbytes: int, cost: float | None) -> int | None:
        """Drop states with a lower cost per byte than this one until it fits; of equal ones the earlier stays.

        Return the bytes dropped, or None if this one has the lowest cost per byte.
        """
        self._worth.pop(key, None)
        self._worth[key] = (1.0 if cost is None else cost) / max(nbytes, 1)
        needed = nbytes - budget_bytes + sum(self._kept[each].nbytes for each in self if each != key)
        dropped_bytes = 0
        while needed > dropped_bytes:
            least = min(reversed(self._worth), key=self._worth.__getitem__)
            del self._worth[least]
            if least == key:
                self.drop(key)
                return None
            if least in self._kept:
                dropped_bytes += self._kept[least].nbytes
                self.drop(least)
        return dropped_bytes

    def clear(self) -> None:
        """Release everything and reset the counters."""
        for key in list(self._kept):
            self.drop(key)
        self.evicted.clear()
        self._worth.clear()
        self.num_created = self.num_evicted = self.evicted_bytes = 0

    def look(self) -> None:
        """Count the states that the store has evicted."""
        for key in list(self._kept):
            if not self.store.has(self._key(key)):
                self._note_evicted(key)

    def held_bytes_by_tier(self) -> dict[str, int]:
        """Return the encoded bytes of the states in each tier, without the input."""
        stats = self.store.stats()
        keys = {self._key(key) for key in self}
        held = Counter(dict.fromkeys(stats.held_bytes_by_tier, 0))
        for entry in stats.entries:
            if entry.key in keys:
                held[entry.tier] += entry.nbytes
        return dict(held)

    def copied(self, store: ActivationStore, *, deep: bool) -> KeptStates:
        """Return a copy with the same states under other keys."""
        new = KeptStates(store)
        for key, kept in list(self._kept.items()):
            value = self.get(key)
            if value is not None:
                new.put(key, value.clone() if deep and isinstance(value, Tensor) else value, kept.cost)
        new.evicted, new._worth = set(self.evicted), dict(self._worth)
        new.num_created, new.num_evicted = self.num_created, self.num_evicted
        new.evicted_bytes = self.evicted_bytes
        return new

    def _note_evicted(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:  # another thread has noted it
            return
        self.store.release_later(self._key(key))
        self.num_evicted += 1
        self.evicted_bytes += kept.nbytes
        self.evicted.add(key)

    def _key(self, key: Hashable) -> Hashable:
        return (self._name, key)

    def __del__(self) -> None:
        for key in self._kept:
            self.store.release_later(self._key(key))


def bytes_of(x: State) -> int:
    """Bytes of a state; 0 for sparse tensors, which stores do not count."""
    return 0 if isinstance(x, Tensor) and x.layout != torch.strided else int(x.nbytes)


LayerFn = Callable[[State, int], State]
BackwardFn = Callable[[State, Any, int], Any]


@dataclass(frozen=True)
class LayerStats:
    """What a checkpointer holds, and what it did since the pass began (or since `clear`).

    Bytes are those of layers; the input, which belongs to the caller, is not counted. `num_created` layers were kept (a
    layer that is saved again counts once), `num_evicted` of them were evicted by the store, `num_checkpoints` remain.
    """

    num_checkpoints: int
    num_created: int
    num_evicted: int
    stored_bytes_by_tier: Mapping[str, int]
    budget_bytes_by_tier: Mapping[str, float]
    saved_bytes: int
    num_forwards: int
    num_replayed: int
    max_held: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of kept layers in all tiers."""
        return sum(self.stored_bytes_by_tier.values())

    @property
    def utilization_by_tier(self) -> Mapping[str, float]:
        """Bytes of kept layers as a share of each tier's budget; 0 without a limit."""
        return {tier: held / self.budget_bytes_by_tier[tier] for tier, held in self.stored_bytes_by_tier.items()}

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {share:.0%}" for tier, share in self.utilization_by_tier.items() if share)
        return (
            f"{self.num_checkpoints} layers kept ({format_bytes(self.stored_bytes)}{': ' if tiers else ''}{tiers}), "
            f"{self.num_evicted} evicted, {format_bytes(self.saved_bytes)} not kept; {self.num_forwards} layers run, "
            f"{self.num_replayed} of them again; {self.max_held} activations held at most"
        )


class LayerPass:
    """Runs layers, records them in `ran`, and recomputes their outputs. The backward removes them from the end."""

    def __init__(self, states: KeptStates) -> None:
        self.states = states
        self.ran: list[int] = []
        self._captured: dict[int, LayerState] = {}  # the state before the layers at these positions
        self._at_hand: tuple[State, Fingerprint] | None = None
        self.num_forwards = self.num_replayed = self.max_held = 0

    def copied(self, states: KeptStates, *, deep: bool) -> LayerPass:
        """Return a copy that uses other states."""
        new = LayerPass(states)
        new.__dict__.update(self.__dict__ | {"states": states})
        new.ran, new._captured = list(self.ran), dict(self._captured)
        if deep and self._at_hand is not None:
            x = self._at_hand[0]
            x = x.clone() if isinstance(x, Tensor) else x.copy()
            new._at_hand = x, Fingerprint(x)
        return new

    # Forward

    def begin_run(self, fn: LayerFn, x: State) -> None:
        """Capture the state before the next layer, so that a replay can start there."""
        self.end_run()
        self._captured[len(self.ran)] = LayerState(fn, x)

    def end_run(self) -> None:
        """End the run of layers that `begin_run` began."""
        if self._captured:
            self._captured[max(self._captured)].done()

    def hold_at_hand(self, x: State) -> None:
        """Hold the input of the next layer, the last one, for its backward."""
        self._at_hand = x, Fingerprint(x)

    def run(self, fn: LayerFn, x: State, layer: int, *, again: bool = False) -> State:
        """Run a layer under `no_grad`, as autograd would keep what is to be dropped."""
        self.num_forwards += 1
        self.num_replayed += again
        with torch.no_grad():
            output = fn(x, layer)
        if isinstance(output, np.generic):
            output = np.asarray(output)
        if not isinstance(output, Tensor | np.ndarray):
            raise TypeError(f"layer {layer} gave {type(output).__name__}: layers give a tensor or a numpy array")
        return output

    def note_held(self, transient: int = 0) -> None:
        self.max_held = max(self.max_held, len(self.states) + (INPUT in self.states) + transient)

    # Replays

    def state(self, position: int, fn: LayerFn) -> State:
        """Return the output of the layer at `position`, kept or recomputed."""
        start, x = self._nearest(position)
        return self._replay(x, start + 1, position + 1, fn)

    def _nearest(self, position: int) -> tuple[int, State]:
        """Return the last kept state at or before `position` that a replay can start from."""
        for start in range(position, INPUT - 1, -1):
            if start == position or start + 1 in self._captured:
                x = self.states.get(start)
                if x is not None:
                    return start, x
        raise StoreError("the input is no longer in the store: other code has removed it. Call forward again.")

    def _replay(
        self, x: State, first: int, end: int, fn: LayerFn, *, states: list[State] | None = None, capture: bool = False
    ) -> State:
        """Replay the layers from position `first` to before `end`, starting from `x`.

        Outputs are appended to `states`. With `capture`, replays can start at `end` afterwards.
        """
        cuts = [position for position in range(first + 1, end) if position in self._captured]
        for begin, stop in zip([first, *cuts], [*cuts, end], strict=True):
            if begin == stop:
                break
            with self._captured[begin].restored():
                for layer in self.ran[begin:stop]:
                    before = None if states is None else (x, Fingerprint(x))
                    x = self.run(fn, x, layer, again=True)
                    if states is not None and before is not None:
                        _check_unchanged(*before, fn)
                        states.append(x)
                        self.note_held(len(states) - 1)
                if capture and stop == end:
                    self._captured[end] = captured = LayerState(fn, x)
                    captured.done()
        return x

    # Backward

    def back_through_segment(self, first: int, grad: Any, fn: LayerFn, backward_fn: BackwardFn) -> Any:
        """Go back to the nearest kept state, or to the layer at position `first` if that comes before."""
        last = len(self.ran) - 1
        start, x = self._nearest(last - 1)
        states = [x]
        del x
        self._replay(states[0], start + 1, last, fn, states=states)
        while len(self.ran) > max(start + 1, first):
            grad = backward_fn(states.pop(), grad, self.ran.pop())
        if start >= first:
            self._forget(start)
        return grad

    def revolve(self, slots: int, grad: Any, fn: LayerFn, backward_fn: BackwardFn) -> Any:
        """Go back through all layers with `slots` states, by the optimal schedule (Griewank and Walther 2000)."""
        kept = sorted(key for key in self.states if isinstance(key, int) and key + 1 in self._captured)
        if self._at_hand is not None:
            (x, mark), self._at_hand = self._at_hand, None
            _check_unchanged(x, mark, fn)
            grad = backward_fn(x, grad, self.ran.pop())
            del x
        for index, start in reversed(list(enumerate([INPUT, *kept]))):
            grad = self._revolve_from(start, slots - index, grad, fn, backward_fn)
            if start != INPUT:
                self._forget(start)
        return grad

    def _revolve_from(self, start: int, slots: int, grad: Any, fn: LayerFn, backward_fn: BackwardFn) -> Any:
        """Go back from the last layer to the first after the kept position `start`, with `slots` states in all."""
        while (ahead := len(self.ran) - start - 1) > 0:
            if slots <= 1 or ahead == 1:
                grad = backward_fn(self.state(len(self.ran) - 2, fn), grad, self.ran.pop())
                continue
            middle = start + Revolve(slots).next_kept(ahead)
            x = self._replay(self.state(start, fn), start + 1, middle + 1, fn, capture=True)
            try:
                self.states.put(middle, x)
            except CapacityError:
                if self.states.store.on_full != "evict":
                    raise
            self.note_held()
            del x
            grad = self._revolve_from(middle, slots - 1, grad, fn, backward_fn)
            self._forget(middle)
        return grad

    def _forget(self, position: int) -> None:
        self.states.drop(position)
        self._captured.pop(position + 1, None)


def _check_unchanged(x: State, mark: Fingerprint, fn: LayerFn) -> None:
    if not mark.still_holds(x):
        raise divergence.changes_its_input(fn)
