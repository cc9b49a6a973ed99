"""Plan: what happens to the activations of one step, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.errors import PlanError
from lowtide.graph import UNKNOWN_HARDWARE, Hardware, StepGraph

ENGINES = ("eager", "compiled")
PLACES = ("device", "host", "disk")  # where moved values are; on the device they are compressed


@dataclass(frozen=True, slots=True)
class Recompute:
    """One call of one module (its `nth`) whose activations are dropped and recomputed.

    `keep_ops` are ops, counted from the region's first, whose outputs are kept all the same and not computed again.
    """

    path: str
    nth: int = 0
    keep_ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is not held as it is: the one of the `save`-th save made directly in the `nth` call of `path`.

    It goes `to` the host or disk, or stays on the device; `codec` names how it is written there (`""`: as it is).
    """

    path: str
    nth: int = 0
    save: int = 0
    to: str = "host"
    codec: str = ""

    def __post_init__(self) -> None:
        if self.to not in PLACES:
            raise PlanError(f"a value moves to {', '.join(map(repr, PLACES))}, not {self.to!r}")
        if self.to == "device" and not self.codec:
            raise PlanError(f"a value of {self.path} is to stay on the device as it is: that is no move")


@dataclass(frozen=True, slots=True)
class Row:
    """One saved value, for people: where it is saved, by which op it was made, and what becomes of it.

    `seconds` is what making it again takes (its own op). `region` is the recomputed module it lies in, if any.
    """

    path: str
    nth: int
    op: str
    bytes: int
    action: str
    seconds: float
    region: str = ""


@dataclass(frozen=True)
class Plan:
    """Which regions are recomputed and which values are moved; everything else is kept. An empty plan keeps all.

    For the `engine` "compiled" it is the other way around: `keeps` are the forward ops whose outputs are saved, and
    whatever else the backward needs is recomputed, op by op. Without a budget and keeps such a plan is empty too.

    Made by `lowtide.solve`; frozen, and plain data: `to_json` and `from_json` go both ways. All its numbers are
    predicted. `peak_bytes` is the simulated peak and `plain_peak_bytes` that of the step without a plan; `extra_s` is
    what the plan adds to the step's `step_s`, and no plan adds less than `lower_bound_s`. `fingerprint` names the graph
    it was made for. `rows` say what becomes of each saved value.

    >>> import lowtide
    >>> lowtide.Plan(regions=(lowtide.plans.Recompute("layers.0"),)).regions[0].path
    'layers.0'
    """

    regions: tuple[Recompute, ...] = ()
    moves: tuple[Move, ...] = ()
    in_flight_bytes: int = 0
    engine: str = "eager"
    keeps: tuple[int, ...] = ()
    budget_bytes: int = 0
    peak_bytes: int = 0
    peak_path: str = ""
    peak_phase: str = ""
    plain_peak_bytes: int = 0
    step_s: float = 0.0
    extra_s: float = 0.0
    lower_bound_s: float = 0.0
    host_bytes: int = 0
    hardware: Hardware = UNKNOWN_HARDWARE
    fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PlanError(f"a plan is for the engine {' or '.join(map(repr, ENGINES))}, not {self.engine!r}")
        if self.engine == "eager" and self.keeps:
            raise PlanError(f"an eager plan has regions; {len(self.keeps)} single ops are to be kept")
        if self.engine == "compiled" and (self.regions or self.moves):
            raise PlanError(
                f"a compiled plan has ops to keep; {len(self.regions)} regions and {len(self.moves)} moves are given"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the plan asks for nothing, so that the step runs as it is."""
        if self.engine == "compiled":
            return not self.keeps and not self.budget_bytes
        return not self.regions and not self.moves

    @property
    def gap(self) -> float:
        """How much faster, as a share of the step's time, a plan within the same budget could be at the very most."""
        return (self.extra_s - self.lower_bound_s) / self.step_s if self.step_s else 0.0

    @property
    def slowdown(self) -> float:
        """The step's time under the plan over its plain time, less one."""
        return self.extra_s / self.step_s if self.step_s else 0.0

    def bytes_by_action(self) -> dict[str, int]:
        """Bytes of saved activations kept, recomputed and moved."""
        found = dict.fromkeys(("keep", "recompute", "host", "disk"), 0)
        for row in self.rows:
            found[row.action] = found.get(row.action, 0) + row.bytes
        return found

    def to_json(self) -> str:
        """The plan as text, with a version; `Plan.from_json` reads it."""
        from lowtide.plans.files import write

        return write(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `PlanError` where the text is damaged; nothing in it can run."""
        from lowtide.plans.files import read

        return read(text)

    def explain(self, path: str) -> str:
        """In words, what happens to each value saved in a module and below it, and why."""
        from lowtide.plans.wording import explain

        return explain(self, path)

    def __str__(self) -> str:
        from lowtide.plans.wording import summary

        return summary(self)

    def calls(self, graph: StepGraph) -> dict[int, Recompute]:
        """The recomputed calls of `graph`, by their number. Raises `PlanError` where the graph has no such call."""
        found: dict[int, Recompute] = {}
        for region in self.regions:
            call = _call(graph, region.path, region.nth)
            if call in found:
                raise PlanError(f"{region.path} is recomputed twice")
            length = graph.calls[call].end - graph.calls[call].first
            if any(not 0 <= op < length for op in region.keep_ops):
                raise PlanError(f"{region.path} has {length} ops; {region.keep_ops} are to be kept")
            found[call] = region
        return found

    def held_ops(self, graph: StepGraph) -> dict[int, tuple[int, ...]]:
        """The recomputed calls of `graph`, and for each the ops, counted from its first, whose outputs are kept."""
        return {call: region.keep_ops for call, region in self.calls(graph).items()}

    def kept_ops(self, graph: StepGraph) -> tuple[int, ...]:
        """The ops of a compiled plan whose outputs are saved. Raises `PlanError` where the graph has no such op."""
        if any(not 0 <= op < graph.num_forward for op in self.keeps):
            raise PlanError(
                f"the step has {graph.num_forward} forward ops; the plan keeps the output of op {max(self.keeps)}. "
                "Was the plan made for another model?"
            )
        return self.keeps

    def moved_values(self, graph: StepGraph) -> dict[int, str]:
        """The moved values of `graph`, and where they go."""
        if not self.moves:
            return {}
        saves_of: dict[int, list[int]] = {}
        for save in graph.saves:
            saves_of.setdefault(save.call, []).append(save.value)
        found: dict[int, str] = {}
        for move in self.moves:
            values = saves_of.get(_call(graph, move.path, move.nth), [])
            if not 0 <= move.save < len(values):
                raise PlanError(f"{move.path} makes {len(values)} saves; number {move.save} is to be moved")
            found[values[move.save]] = move.to
        return found


def _call(graph: StepGraph, path: str, nth: int) -> int:
    calls = graph.calls_by_path.get(path)
    if calls is None:
        near = [known for known in graph.calls_by_path if known.split(".")[-1] == path.split(".")[-1]][:3]
        hint = f" Calls with such a name: {', '.join(near)}." if near else ""
        raise PlanError(f"the step calls no module {path!r}.{hint} Was the plan made for another model?")
    if not 0 <= nth < len(calls):
        raise PlanError(f"{path!r} is called {len(calls)} times in the step; call {nth} is planned")
    return calls[nth]
