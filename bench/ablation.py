"""What each part of the solver is worth: plans with one part switched off, against plans of the whole solver.

    python bench/ablation.py [--regimes regions ...] [--graphs unet ...] [--only PART ...] [--out FILE]

Every part of `lowtide.solvers` that adds candidates, and every constant that a search is tuned by, is replaced in turn.
For each graph of `solver.py` one search is made per part and asked for plans at eight budgets, shares of the way from
the floor to the plain peak. A part is worth the largest difference of a plan's predicted time, as a share of the plain
step. Results are one JSON object per line, and what FILE has already is not run again. `--table FILE ...` prints them
as Markdown.

Regimes: `regions` (recompute only, with the time line of the host as traced), `large` (the same without the generators
that are skipped above 3,000 ops, so that they do not make up for the others), `device only` (recompute only, the host's
work free), `offload` and `large offload` (host memory allowed), `lossy` (int8 allowed), `lossy offload` (both) and
`compiled`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from solver import GRAPHS

import lowtide
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.solvers import (
    baselines,
    compiled_search,
    compression,
    eager_search,
    hull,
    interpolation,
    local_search,
    min_cut,
    placement,
    segment_search,
)
from lowtide.solvers.solve import search_for

SHARES = (0.0, 0.07, 0.137, 0.293, 0.437, 0.613, 0.787, 0.913)
_TIME_LIMIT_S = 60.0  # far more than a search of these graphs takes: no result depends on the clock
_SEARCH = eager_search.EagerSearch

Patch = tuple[Any, str, Any]  # an object, its attribute, and what takes its place


def _nothing(*_: Any, **__: Any) -> Any:
    return []


def _empty() -> property:
    return property(lambda self: [])


def _cached(name: str, compute: Callable[[Any], Any]) -> property:
    def get(self: Any) -> Any:
        cache = vars(self)
        if "ablated " + name not in cache:
            cache["ablated " + name] = compute(self)
        return cache["ablated " + name]

    return property(get)


def _nested_by(splits: bool) -> property:
    inner = _SEARCH._sample_budgets.func  # type: ignore[attr-defined]
    return _cached("_sample_budgets", lambda self: [each for each in inner(self) if each[4] == splits])


def _smallest_of_ends() -> property:
    return _cached("_smallest_of_regions", lambda self: eager_search.smaller(*self._ends(regions_only=True)))


def _not_spread() -> Any:
    def all_chains(self: Any) -> Iterator[Any]:
        for discount, narrow, share, coded in self._path_kinds:
            yield self._path(discount, narrow, coded), share, coded
        if self.critical_points and self._movable_bytes:
            yield self._loads, eager_search._SHARES[-1], False

    return all_chains


def _no_loads() -> Any:
    inner = _SEARCH._all_paths

    def all_chains(self: Any) -> Iterator[Any]:
        return (each for each in inner(self) if not isinstance(each[0], placement.LinkLoads))

    return all_chains


def _all_retained(self: Any, call: int, kept: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...]:
    return held


def _without_retained(self: Any, *_: Any) -> None:
    return None


def _segments_alone() -> property:
    def smallest(self: Any) -> Any:
        return eager_search.smaller(*(each for each in self._segmented if not each.share and not each.codecs))

    return _cached("_smallest_of_segments", smallest)


def _not_coded() -> property:
    inner = _SEARCH._path_kinds.func  # type: ignore[attr-defined]
    return _cached("_path_kinds", lambda self: [each for each in inner(self) if not each[3]])


def _plain_peak_only() -> property:
    inner = compiled_search.CompiledSearch._cut_problems.func  # type: ignore[attr-defined]
    return _cached("_cut_problems", lambda self: inner(self)[:1])


_RECOMPUTE: dict[str, list[Patch]] = {
    "interpolation between hull points": [(interpolation, "_MOST_OPS", 0)],
    "paths without wide regions": [(eager_search, "contains_layers", lambda graph: [False] * len(graph.calls))],
    "nested regions": [(_SEARCH, "_sample_budgets", _empty())],
    "nesting: splits": [(_SEARCH, "_sample_budgets", _nested_by(False))],
    "nesting: regions inside": [(_SEARCH, "_sample_budgets", _nested_by(True))],
    "nesting at 32 -> 8 sizes": [(eager_search, "_NUM_NESTED", 8)],
    "segments": [(_SEARCH, "_segmented", _empty())],
    "segments: even parts": [(segment_search.SegmentSearch, "_equal_parts", property(lambda self: {}))],
    "segments: retained outputs": [(segment_search.SegmentSearch, "_retaining", _nothing)],
    "segments: regions inside items": [(segment_search.SegmentSearch, "_inner_levels", _nothing)],
    "segments: hull choices for items": [(segment_search.SegmentSearch, "_of_choices", _nothing)],
    "segments: fine slots": [(segment_search, "_FINE", ())],
    "segments: 256 -> 128 slots": [(segment_search, "_NUM_SLOTS", 128)],
    "segments: 100 -> 32 plans": [(segment_search, "_MOST_PLANS", 32)],
    "baselines": [(eager_search, "baseline_plans", _nothing)],
    "baselines: some blocks": [(baselines, "_some_blocks", _nothing)],
    "local search": [(_SEARCH, "_explored", _empty())],
    "local search: 60 -> 20 budgets": [(local_search, "_NUM_SAMPLES", 20)],
    "local search: 12 -> 4 sets filled": [(local_search, "_MOST_FILLED", 4)],
    "local search: 32 -> 8 seeds": [(local_search, "_NUM_SEEDS", 8)],
    "local search: 2000 -> 500 visits": [
        (local_search, "_MOST_VISITS", 500),
        (local_search, "_MOST_VISITED_OPS", 250_000),
    ],
    "local search: dispatch check": [(local_search.LocalSearch, "_worth_dispatch", _all_retained)],
    "local search: sets far from the fastest": [(local_search, "_FAR", math.inf)],
    "lowest-peak search": [(_SEARCH, "_smallest_of_regions", _smallest_of_ends())],
    "lowest-peak search: retained outputs": [(local_search.LowestPeakSearch, "_retain", _without_retained)],
    "lowest-peak search: single regions": [(local_search, "_NUM_SINGLES", 0)],
    "lowest-peak search: beside segments": [(_SEARCH, "_smallest_of_segments", _segments_alone())],
    "lowest-peak search: patience 16 -> 3": [(local_search, "_PATIENCE", 3)],
    "nesting: 12 -> 4 levels": [(eager_search, "_MOST_LEVELS", 4)],
    "hull: 64 -> 16 prices": [(hull, "_MOST_PRICES", 16)],
    "paths: 100,000 -> 0 simulated ops of stops": [(interpolation, "_STOPPED_OPS", 0)],
    "segments: 6 -> 2 hull choices": [(segment_search, "_MOST_WAYS", 2)],
    "segments: 4 -> 1 sets of retained outputs": [(segment_search, "_MOST_RETAINING", 1)],
    "segments: least gain 0.05 -> 0": [(segment_search, "_LEAST_GAIN", 0.0)],
    "segments: 3 -> 1 levels in items": [(segment_search, "_MOST_LEVELS", 1)],
}
_OFFLOAD: dict[str, list[Patch]] = {
    **{part: _RECOMPUTE[part] for part in ("interpolation between hull points", "nested regions")},
    "segments": _RECOMPUTE["segments"],
    "link share 0.5": [(eager_search, "_SHARES", (0.95,))],
    "link share 0.95": [(eager_search, "_SHARES", (0.5,))],
    "discount 0.0": [(eager_search, "_DISCOUNTS", (0.9,))],
    "discount 0.9": [(eager_search, "_DISCOUNTS", (0.0,))],
    "evenly spread paths": [(_SEARCH, "_all_paths", _not_spread())],
    "link loads": [(_SEARCH, "_all_paths", _no_loads())],
    "segments that move values": [(segment_search, "_MOST_MOVED", 0)],
    "link loads: 256 -> 64 rates": [(placement, "_NUM_RATES", 64)],
    "offload: lag 1/16 -> 1/4": [(placement, "_LAG", 1 / 4)],
    "offload: lag 1/16 -> 1": [(placement, "_LAG", 1.0)],
    "offload: lag 1/16 -> 1/64": [(placement, "_LAG", 1 / 64)],
    "offload: no small copies among large": [(placement, "_LARGE", 1 << 62)],
}
_LOSSY: dict[str, list[Patch]] = {
    "lossy baselines": [(eager_search.CompressionOptions, "baseline_choices", _nothing)],
    "lossy baselines: 8 -> 2 cuts": [(compression, "_MOST_CUTS", 2)],
    "lossy path": [(_SEARCH, "_path_kinds", _not_coded())],
}
_TWO_LINES: dict[str, list[Patch]] = {
    "the other line's search": [(eager_search, "_NEAR", 2.0)],
    "a trace of the other line": [(eager_search, "_HOST_SHARES", {"host": 1.0, "device": 0.0})],
}
_COMPILED: dict[str, list[Patch]] = {
    "anchors": [(compiled_search.CompiledSearch, "_anchors", _empty())],
    "critical points but the first": [(compiled_search.CompiledSearch, "_cut_problems", _plain_peak_only())],
    "references": [(compiled_search.CompiledSearch, "_references", _empty())],
    "narrow positions": [(compiled_search, "_narrow_positions", _nothing)],
    "256 -> 16 mixes": [(compiled_search, "_MOST_CUTS", 16)],
    "hull: 48 -> 16 prices": [(min_cut, "_MOST_PRICES", 16)],
    "hull: gain 1e-6 -> 1e-3": [(min_cut, "_LEAST_GAIN", 1e-3)],
}
_LOCAL = ("local", "lowest", "interpolation")
PARTS: dict[str, dict[str, list[Patch]]] = {
    "regions": _RECOMPUTE | _TWO_LINES,
    "large": {part: patches for part, patches in _RECOMPUTE.items() if not part.startswith(_LOCAL)},
    "device only": _RECOMPUTE,
    "offload": _OFFLOAD,
    "large offload": {part: patches for part, patches in _OFFLOAD.items() if not part.startswith(_LOCAL)},
    "lossy": _LOSSY,
    "lossy offload": _LOSSY,
    "compiled": _COMPILED,
}
_AS_LARGE: list[Patch] = [(eager_search, "MOST_OPS", 0), (interpolation, "_MOST_OPS", 0)]
_HOST_COSTS = ("dispatch_s", "spare_s", "region_s", "save_s", "move_s")


def traced(name: str) -> StepGraph:
    job = GRAPHS[name]()
    return lowtide.trace(job.model, job.loss_fn, *job.batch, mode="fake", device="H100")


def in_regime(graph: StepGraph, regime: str) -> StepGraph:
    if regime == "device only":
        free = replace(graph.hardware, **dict.fromkeys(_HOST_COSTS, 0.0))
        graph = replace(graph, hardware=free, ops=tuple(replace(op, host_s=0.0) for op in graph.ops))
    return graph


def searched(
    graph: StepGraph, regime: str, budgets: list[int] | None
) -> tuple[list[int], list[float | None], int, float]:
    """Budgets, the extra seconds of the plan for each (None: none fits), the floor, and seconds of CPU."""
    started = time.process_time()
    search = search_for(
        graph,
        "compiled" if regime == "compiled" else "eager",
        "1TiB" if "offload" in regime else 0,
        _TIME_LIMIT_S,
        "int8" if "lossy" in regime else None,
    )
    floor = search.floor.peak_bytes
    if budgets is None:
        budgets = [floor + int((search.plain.peak_bytes - floor) * share) for share in SHARES]
    extra: list[float | None] = []
    for budget in budgets:
        try:
            extra.append(search.plan(budget).extra_s)
        except InfeasibleBudgetError:
            extra.append(None)
    return budgets, extra, floor, time.process_time() - started


@contextmanager
def without(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        yield


def ablate(
    name: str, graph: StepGraph, regime: str, only: list[str], known: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of a graph and a regime that are not `known` yet, by part."""
    graph, always = in_regime(graph, regime), _AS_LARGE if "large" in regime else []
    step_s, whole = graph.step_s, known.get("")
    if whole is None:
        with without(always):
            budgets, extra, floor, cpu_s = searched(graph, regime, None)
        shares = [None if each is None else each / step_s for each in extra]
        whole = {"part": "", "cpu_s": cpu_s, "budgets": budgets, "floor": floor, "extra": shares}
        yield {"graph": name, "regime": regime, **whole}
    for part, patches in PARTS[regime].items():
        if part in known or (only and part not in only):
            continue
        with without([*always, *patches]):
            _, extra, floor, cpu_s = searched(graph, regime, whole["budgets"])
        losses = [
            None if e is None or w is None else e / step_s - w for e, w in zip(extra, whole["extra"], strict=True)
        ]
        row = {"part": part, "cpu_s": cpu_s, "floor": floor / whole["floor"] - 1, "losses": losses}
        yield {"graph": name, "regime": regime, **row}


def table(rows: list[dict[str, Any]], regime: str) -> list[str]:
    """Parts by graphs: the largest loss in points of a step, budgets that nothing fits any more, seconds of CPU."""
    here = [row for row in rows if row["regime"] == regime]
    graphs = list(dict.fromkeys(row["graph"] for row in here))
    cells = {(row["part"], row["graph"]): row for row in here}
    lines = ["| without | " + " | ".join(graphs) + " | most |", "|" + "---|" * (len(graphs) + 2)]
    whole = [cells["", graph] for graph in graphs]
    lines.append("| (nothing) | " + " | ".join(f"{row['cpu_s']:.1f} s" for row in whole) + " | |")
    for part in dict.fromkeys(row["part"] for row in here if row["part"]):
        texts, most, is_short = [], 0.0, False
        for graph in graphs:
            row = cells.get((part, graph))
            if row is None:
                texts.append("not run")
                continue
            known = [loss for loss in row["losses"] if loss is not None]
            num_none = len(row["losses"]) - len(known)
            worst = max(known, default=0.0, key=abs)
            worst = max(known, default=0.0) if max(known, default=0.0) > 5e-5 else worst
            most, is_short = max(most, worst), is_short or num_none > 0
            texts.append(
                f"{100 * worst:.2f}" + (f", {num_none} x none" if num_none else "") + f" ({row['cpu_s']:.1f} s)"
            )
        lines.append(f"| {part} | " + " | ".join(texts) + f" | **{100 * most:.2f}**{', none' if is_short else ''} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regimes", nargs="*", default=list(PARTS))
    parser.add_argument("--graphs", nargs="*", default=["unet", "hf_resnet", "gpt, 2 layers", "hf_vit", "hf_llama"])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="*", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        rows = [json.loads(line) for path in options.table for line in path.read_text().splitlines()]
        for regime in dict.fromkeys(row["regime"] for row in rows):
            print("\n".join(["", f"### {regime}", "", *table(rows, regime)]))
        return
    is_known = options.out is not None and options.out.exists()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if is_known else []
    for name in options.graphs:
        graph = traced(name)
        for regime in options.regimes:
            known = {row["part"]: row for row in rows if (row["graph"], row["regime"]) == (name, regime)}
            for row in ablate(name, graph, regime, options.only, known):
                line = json.dumps(row)
                print(line, file=sys.stderr, flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
