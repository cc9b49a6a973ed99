"""Random numbers of regions that are replayed inside a CUDA graph.

While a stream is capturing, a CUDA generator hides its position: ops count from where the generator will stand when the
graph runs, and neither `get_offset` nor `get_state` knows that count or can set it back. (torch 2.11: `get_state`
answers with the position at the start of the capture, and `set_state` to it does nothing, so that a replay would draw
the numbers after the forward's, without an error.) What can be set is which *state* a generator draws from
(`graphsafe_set_state`), and where each state registered with the graph starts when the graph runs.

So the step runs eagerly first, as a `Rehearsal` that records the generators' positions at each moment a region asks for
them or sets them. `GraphDraws` then answers from that record while the step is captured: to a question with the
recorded position, to a change of position with another state, registered with the graph, that stands there. A state
whose draws have ended where another replay begins is used again; before each run of the graph all of them start at the
generator's own position plus their recorded distance from it.

Cost: two small kernels per run of the graph and state that is drawn from, which is about one per region with dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowtide import _compat
from lowtide.errors import CaptureError

Position = tuple[int, int]  # seed and offset


class Moment(NamedTuple):
    """A region asked where a generator stands, or set it to `target`. Offsets as in the rehearsal."""

    generator: int
    offset: int
    target: int | None


class Rehearsal:
    """Records where generators stand whenever a region asks or sets it, in a step that runs eagerly."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = {_compat.generator_id(each): each for each in generators}
        self.starts = {key: position_of(each) for key, each in self.generators.items()}
        self.ends: dict[int, Position] = {}
        self.moments: list[Moment] = []

    def state_of(self, generator: torch.Generator) -> Position:
        position = position_of(generator)
        self.moments.append(Moment(self._key(generator), position[1], None))
        return position

    def set(self, generator: torch.Generator, position: Position) -> None:
        self.moments.append(Moment(self._key(generator), generator.get_offset(), position[1]))
        set_position(generator, position)

    def finish(self) -> None:
        """The step is over."""
        self.ends = {key: position_of(each) for key, each in self.generators.items()}
        if any(self.ends[key][0] != self.starts[key][0] for key in self.ends):
            raise CaptureError(
                "the step seeds a CUDA generator, which a captured graph cannot do: seed before the step instead"
            )

    def _key(self, generator: torch.Generator) -> int:
        key = _compat.generator_id(generator)
        if key not in self.generators:
            raise CaptureError(
                "a recomputed region draws from a CUDA generator that is neither an attribute of a module nor a "
                "variable of the loss function, and cannot be registered with the graph: make it one of these"
            )
        return key


@dataclass
class _Stream:
    """A state registered with the graph: where it starts, as an offset from the step's start, and how far it is drawn
    from.
    """

    state: torch.Generator
    start: int
    num_drawn: int = 0

    @property
    def position(self) -> int:
        return self.start + self.num_drawn


class GraphDraws:
    """Answers regions while a step is captured, and starts the states of the graph before it runs."""

    def __init__(self, rehearsal: Rehearsal, make: Callable[[torch.device], torch.Generator] = torch.Generator) -> None:
        self._rehearsal = rehearsal
        self._generators = rehearsal.generators
        # The first stream of a generator is its own state.
        self._streams = {key: [_Stream(each.graphsafe_get_state(), 0)] for key, each in rehearsal.generators.items()}
        self._switches: list[_Stream] = []
        current = {key: streams[0] for key, streams in self._streams.items()}
        for key, offset, target in rehearsal.moments:
            start = rehearsal.starts[key][1]
            current[key].num_drawn = offset - start - current[key].start
            if target is not None:
                current[key] = self._standing_at(key, target - start, make)
                self._switches.append(current[key])
        self._totals = {key: rehearsal.ends[key][1] - rehearsal.starts[key][1] for key in self._streams}
        for key, stream in current.items():
            stream.num_drawn = self._totals[key] - stream.start
        self._moments, self._next_switch = iter(rehearsal.moments), iter(self._switches)

    def _standing_at(self, key: int, position: int, make: Callable[[torch.device], torch.Generator]) -> _Stream:
        streams = self._streams[key]
        for stream in streams:
            if stream.position == position:
                return stream
        streams.append(_Stream(make(self._generators[key].device), position))
        return streams[-1]

    @property
    def num_states(self) -> int:
        """States beside the generators' own."""
        return sum(len(streams) - 1 for streams in self._streams.values())

    def register(self, graph: Any) -> None:
        """Before the capture."""
        for streams in self._streams.values():
            for stream in streams:
                graph.register_generator_state(stream.state)

    # While the step is captured.

    def state_of(self, generator: torch.Generator) -> Position:
        key = _compat.generator_id(generator)
        moment = next(self._moments, None)
        if moment is None or moment.generator != key or moment.target is not None:
            raise CaptureError(_OTHER_STEP)
        return self._rehearsal.starts[key][0], moment.offset

    def set(self, generator: torch.Generator, position: Position) -> None:
        key = _compat.generator_id(generator)
        moment = next(self._moments, None)
        if moment is None or moment.generator != key or moment.target != position[1]:
            raise CaptureError(_OTHER_STEP)
        generator.graphsafe_set_state(next(self._next_switch).state)

    def end_capture(self) -> None:
        """However the capture went, generators draw from their own states again."""
        for key, generator in self._generators.items():
            generator.graphsafe_set_state(self._streams[key][0].state)

    def check_complete(self) -> None:
        """The captured step must have asked for everything that the rehearsal asked for."""
        if next(self._moments, None) is not None:
            raise CaptureError(_OTHER_STEP)

    # When the graph runs.

    def run(self, graph: Any, *, check: bool = False) -> None:
        """Run the graph. Generators are afterwards where the eager step leaves them.

        With `check`, a `CaptureError` if it draws more or fewer numbers than the rehearsal.
        """
        bases = {key: position_of(generator) for key, generator in self._generators.items()}
        for key, (seed, base) in bases.items():
            for stream in self._streams[key][1:]:
                set_position(stream.state, (seed, base + stream.start))
        graph.replay()
        for key, generator in self._generators.items():
            base = bases[key][1]
            if check:
                for stream in self._streams[key]:
                    if stream.state.get_offset() - base - stream.start != stream.num_drawn:
                        generator.set_offset(base + self._totals[key])
                        raise CaptureError(_OTHER_DRAWS)
            if self._totals[key]:
                generator.set_offset(base + self._totals[key])


_OTHER_STEP = (
    "the step ran another way while it was captured than in the steps before: other regions, or in another order. A "
    "captured step must be the same each time"
)
_OTHER_DRAWS = (
    "the step draws other random numbers while it is captured than eagerly. A checkpoint of your own inside the model "
    "(torch.utils.checkpoint) does not redraw its numbers in a graph; and some models choose another attention kernel "
    "while a stream is capturing (Hugging Face's: set attn_implementation='eager', or dropout to 0)"
)


def position_of(generator: torch.Generator) -> Position:
    """Of a CUDA generator, outside of captures."""
    return generator.initial_seed(), generator.get_offset()


def set_position(generator: torch.Generator, position: Position) -> None:
    """Of a CUDA generator, outside of captures."""
    seed, offset = position
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)
