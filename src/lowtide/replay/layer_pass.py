"""One pass through the layers of a loop: what ran, where a replay can start, and the way back.

A state is the output of the layer at a position; the input is the state at -1. Replays start at a kept state, in what
`Captured` took there, and go on through the layers in the order they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import CapacityError, StoreError
from lowtide.policies import Revolve
from lowtide.replay import divergence
from lowtide.replay.arguments import Fingerprint
from lowtide.replay.captured import Captured
from lowtide.replay.kept_states import INPUT, KeptStates, State
from lowtide.units import format_bytes

LayerFn = Callable[[State, int], State]
BackwardFn = Callable[[State, Any, int], Any]


@dataclass(frozen=True)
class LayerStats:
    """What a checkpointer holds and has done since the pass began (or since `clear`).

    Bytes are of layers: the input, which is the caller's, is not counted. `num_created` layers were kept, a layer saved
    again counts once; `num_evicted` of them were dropped by the store for want of room, `num_checkpoints` are there.
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
        """In all tiers."""
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
    """The layers that ran, in `ran`, and how to have their outputs again. Going back takes layers off its end."""

    hidden_from_replay = True

    def __init__(self, states: KeptStates) -> None:
        self.states = states
        self.ran: list[int] = []
        self._captured: dict[int, Captured] = {}  # before the layers at these positions
        self._at_hand: tuple[State, Fingerprint] | None = None
        self.num_forwards = self.num_replayed = self.max_held = 0

    def copied(self, states: KeptStates, *, deep: bool) -> LayerPass:
        """The same with other states."""
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
        """A replay may start at the next layer."""
        self.end_run()
        self._captured[len(self.ran)] = Captured(fn, x)

    def end_run(self) -> None:
        """What follows is not part of the run of layers that `begin_run` began."""
        if self._captured:
            self._captured[max(self._captured)].done()

    def hold_at_hand(self, x: State) -> None:
        """Hold the input of the next layer, which is the last, for its backward."""
        self._at_hand = x, Fingerprint(x)

    def run(self, fn: LayerFn, x: State, layer: int, *, again: bool = False) -> State:
        """The output of a layer, without gradients: autograd would keep what is to be dropped."""
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
        """The output of the layer at `position`, kept or recomputed."""
        start, x = self._nearest(position)
        return self._replay(x, start + 1, position + 1, fn)

    def _nearest(self, position: int) -> tuple[int, State]:
        """The last state at or before `position` that is kept and that a replay can start from."""
        for start in range(position, INPUT - 1, -1):
            if start == position or start + 1 in self._captured:
                x = self.states.get(start)
                if x is not None:
                    return start, x
        raise StoreError("the input is no longer in the store: somebody else has removed it. Call forward again.")

    def _replay(
        self, x: State, first: int, end: int, fn: LayerFn, *, states: list[State] | None = None, capture: bool = False
    ) -> State:
        """Run the layers from position `first` to before `end` again, `x` being what the first is given.

        Outputs are added to `states`, which hold the inputs too. With `capture`, replays can start at `end` afterwards.
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
                    self._captured[end] = captured = Captured(fn, x)
                    captured.done()
        return x

    def replay_by_hand(self, x: State, layers: list[int], fn: LayerFn) -> State:
        """The output of `layers` that are not of this pass."""
        for layer in layers:
            x = self.run(fn, x, layer, again=True)
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
        """Back from the last layer to the first after position `start`, which is kept, with `slots` states in all."""
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
