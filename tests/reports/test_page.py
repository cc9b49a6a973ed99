"""Reports: totals equal the sum of their rows, thinning keeps peaks, names are escaped, and the page works offline."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from graphs import chain, random_graph, random_plan, repeated_blocks, seldom_saved
from lowtide import Plan, PlanError, StepGraph
from lowtide.api.report import report_facts
from lowtide.plans import Frontier, Recompute
from lowtide.reports import charts as series
from lowtide.reports import page, report_text
from lowtide.reports.charts import trace_json
from lowtide.reports.report_facts import Layers, ReportFacts
from lowtide.reports.report_text import to_markdown
from lowtide.simulator import KINDS, PHASES
from lowtide.solvers.baselines import recomputes
from sweeps import sweep

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def stack(num_blocks: int = 4) -> StepGraph:
    """Alike blocks, of sizes and times as a small model has them."""
    graph = repeated_blocks(3, num_blocks=num_blocks)
    ops = tuple(replace(op, seconds=op.seconds / 1024, workspace_bytes=op.workspace_bytes << 16) for op in graph.ops)
    values = tuple(replace(value, bytes=value.bytes << 16) for value in graph.values)
    graph = replace(graph, ops=ops, values=values, is_measured=True, versions={"torch": "2.13"})
    return replace(graph, step_s=sum(op.seconds for op in ops))


@cache
def solved(num_blocks: int = 8) -> Plan:
    graph = stack(num_blocks)
    frontier = lowtide.sweep(graph, [])
    plan = lowtide.solve(graph, (frontier.floor_bytes + frontier.plain_peak_bytes) // 2)
    assert plan.regions
    return plan


def moving() -> Plan:
    """A plan that moves values over a link so slow that the backward waits."""
    graph = chain([1 << 20] * 8, seconds=1 / 128, gradient_bytes=1 << 16, link_bytes_per_s=float(1 << 25))
    graph = replace(graph, step_s=sum(op.seconds for op in graph.ops))
    moves = tuple(lowtide.plans.Move(f"layers.{index}", 0, 0) for index in range(1, 6))
    return Plan(moves=moves, graph=graph)


def renamed(graph: StepGraph, old: str, new: str) -> StepGraph:
    """The same step with a part of its modules' names changed, and with it that of its values and ops."""
    calls = tuple(replace(call, path=call.path.replace(old, new), kind=new) for call in graph.calls)
    values = tuple(replace(value, name=f"{new}.{value.name}") for value in graph.values)
    ops = tuple(replace(op, name=f"{op.name}{new}") for op in graph.ops)
    return replace(graph, calls=calls, values=values, ops=ops, notes=(new,), versions={new: new})


@cache
def facts_of(kind: str) -> ReportFacts:
    plan = {"solved": solved, "moving": moving}[kind]()
    return report_facts(plan, time_limit_s=6.0)


def random_facts(seed: int) -> ReportFacts:
    graph = random_graph(seed) if seed % 2 else repeated_blocks(seed)
    return report_facts(replace(random_plan(seed, graph), graph=graph))


# What a report is made from


def test_a_plan_without_its_graph_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"replace\(plan, graph=graph\)"):
        Plan().report(tmp_path / "report.html")
    with pytest.raises(PlanError, match="comes with"):
        replace(solved(4), graph=stack(5)).report(tmp_path / "report.html")
    with pytest.raises(ValueError, match=r"\.html, \.png, \.md, \.json; .*report\.pdf"):
        solved(4).report(tmp_path / "report.pdf")
    assert not list(tmp_path.iterdir())


def test_a_plan_file_alone_is_enough(tmp_path: Path) -> None:
    plan = Plan.from_json(solved(4).to_json())
    told = plan.report(tmp_path / "report.html")
    assert told.path.stat().st_size == told.num_bytes
    assert "budgets" in str(told) and str(told.path) in str(told)


def test_reports_are_made_without_torch(tmp_path: Path) -> None:
    """Torch is there when lowtide is imported; no file of the reports asks for it."""
    for path in Path(page.__file__).parent.glob("*.py"):
        assert "torch" not in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)


def test_the_curve_takes_the_frontier_it_is_given() -> None:
    plan = solved(4)
    assert plan.graph is not None
    frontier = lowtide.sweep(plan.graph, [plan.plain_peak_bytes])
    facts = report_facts(plan, frontier=frontier, time_limit_s=5.0)
    assert facts.frontier is frontier and facts.notes == ()


def test_the_curve_is_cut_short_when_time_is_over() -> None:
    facts = report_facts(solved(4), time_limit_s=1e-9)
    assert facts.frontier is not None and len(facts.frontier.plans) == 1
    assert "were over before 17 more" in facts.notes[0]


def test_policies_have_no_report(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    with lowtide.apply(model, lowtide.EveryN(2)) as handle, pytest.raises(lowtide.LowtideError, match=r"lowtide\.fit"):
        handle.report(tmp_path / "report.html")


def test_a_handle_reports_what_was_measured(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    with lowtide.fit(model, lambda x: model(x).square().mean(), torch.randn(64, 32), budget="1GiB") as handle:
        handle.report(tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert handle.measured_peak_bytes is not None
    assert f"peak {report_text.size(handle.measured_peak_bytes)} measured" in text


# Numbers


def test_numbers_have_three_digits() -> None:
    assert [report_text.size(n) for n in (0, 1023, 1536, 12.34 * 1024**2, 999.9 * 1024**3)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "12.3 MiB",
        "1000 GiB",
    ]
    assert [report_text.duration(s) for s in (0, 4.2e-6, 0.0042, 12.5)] == ["0 s", "4.20 µs", "4.20 ms", "12.5 s"]


def test_the_verdict_says_what_was_measured_and_what_predicted() -> None:
    facts = facts_of("solved")
    said = report_text.verdict(facts)
    assert said.startswith(f"Fits in {report_text.size(facts.budget_bytes)}: peak ")
    assert "measured" not in said and said.count("predicted") == 2
    measured = replace(facts, measured_peak_bytes=facts.budget_bytes - 1, measured_step_s=1.5 * facts.graph.step_s)
    said = report_text.verdict(measured)
    assert "measured (predicted: " in said and "50.0 % slower measured (predicted: " in said
    over = replace(facts, measured_peak_bytes=facts.budget_bytes + 1)
    assert report_text.verdict(over).startswith("Over the budget of ") and not over.fits
    unmeasured = replace(measured, graph=replace(facts.graph, is_measured=False))
    assert unmeasured.measured_slowdown is None  # half of the comparison is a guess
    assert "as it is, nothing to do" in report_text.verdict(report_facts(Plan(graph=stack(2))))


def test_every_figure_has_a_source() -> None:
    facts = facts_of("solved")
    for each in (facts, replace(facts, measured_peak_bytes=5, measured_step_s=1.0)):
        assert {figure.source for figure in report_text.figures(each)} <= {"predicted", "measured", "given"}
    assert [figure.name for figure in report_text.figures(facts)] == ["Peak", "Budget", "Slower", "Gap to the bound"]


@pytest.mark.parametrize("seed", sweep(range(60), keep=12))
def test_totals_are_the_sums_of_their_rows(seed: int) -> None:
    facts = random_facts(seed)
    peak = report_text.peak_rows(facts, most=seed % 12)
    assert sum(row.bytes for row in peak) == facts.planned.peak_bytes
    assert all(row.bytes > 0 for row in peak)
    buffers = sum(value.bytes for value in facts.graph.values if value.kind == "buffer")  # there are no random states
    assert buffers or not any(row.what.startswith("held for replays") for row in peak)
    costs = report_text.cost_rows(facts)
    assert sum(row.seconds for row in costs) == pytest.approx(facts.planned.extra_s)
    layers = report_text.layer_rows(facts)
    assert sum(sum(row.bytes.values()) for row in layers) == sum(row.bytes for row in facts.plan.rows)
    freed = sum(row.bytes for row in facts.plan.rows if row.action != "keep")
    assert sum(row.bytes for row in costs) == freed


@pytest.mark.parametrize("host_s", [1e-3, 8.0])
def test_costs_with_two_time_lines_sum_to_what_the_plan_adds(host_s: float) -> None:
    graph = seldom_saved(3)
    ops = tuple(replace(op, host_s=host_s) for op in graph.ops)
    graph = replace(graph, ops=ops, hardware=replace(graph.hardware, region_s=1 / 4, save_s=1 / 8))
    facts = report_facts(Plan(recomputes(graph, {graph.calls_by_path["blocks.0"][0]: ()}), graph=graph))
    rows = report_text.cost_rows(facts)
    assert facts.planned.extra_s > 0 and facts.planned.lines.limit == ("host" if host_s == 8.0 else "device")
    assert sum(row.seconds for row in rows) == pytest.approx(facts.planned.extra_s)
    assert (rows[-1].what == "of that, beside the device's line") == (host_s < 1)


def test_retained_outputs_are_not_replayed() -> None:
    """In no row, and in no slice of a trace."""
    graph = seldom_saved(3)
    graph = replace(graph, hardware=replace(graph.hardware, dispatch_s=1 / 8, region_s=1 / 4))
    call = graph.calls_by_path["blocks.0"][0]
    kept = next(kept for op in range(9) if not graph.retainable.missing({call: (kept := (op,))}))
    facts = report_facts(Plan(recomputes(graph, {call: kept}), graph=graph))
    assert sum(row.seconds for row in report_text.cost_rows(facts)) == pytest.approx(facts.planned.extra_s)
    events = json.loads(trace_json(facts))["traceEvents"]
    replayed = sum(event["dur"] for event in events if event.get("cat") == "replay")
    assert replayed == pytest.approx(facts.planned.replayed_s * 1e6, abs=1)


def test_compiled_plans_are_reported_too(tmp_path: Path) -> None:
    graph = repeated_blocks(3)
    graph = replace(graph, step_s=sum(op.seconds for op in graph.ops))
    frontier = lowtide.sweep(graph, engine="compiled")
    plan = lowtide.solve(graph, (frontier.floor_bytes + frontier.plain_peak_bytes) // 2, engine="compiled")
    facts = report_facts(plan)
    assert sum(row.bytes for row in report_text.peak_rows(facts)) == facts.planned.peak_bytes == plan.peak_bytes
    assert sum(row.seconds for row in report_text.cost_rows(facts)) == pytest.approx(plan.extra_s)
    plan.report(tmp_path / "report.html")


def test_alike_values_of_all_layers_are_one_row() -> None:
    graph = chain([100] * 6)
    rows = report_text.peak_rows(report_facts(Plan(graph=graph)))
    assert [(row.what, row.where, row.bytes) for row in rows] == [
        ("batch", "", 1),
        ("6 x mm", "layers.*", 600),
        ("mm_backward", "layers.*", 100),
    ]
    layers = Layers(graph)
    assert layers.pattern_of("layers.3") == "layers.*" and layers.pattern_of("layers.3.mlp.1") == "layers.*.mlp.1"
    assert layers.layer_of("layers.3.mlp") == "layers.3" and layers.layer_of("head.0.x") == "head"
    assert layers.pattern_of("head.0") == "head.0"


# Charts


@pytest.mark.parametrize("most", [40, 200, 5000])
def test_thinning_keeps_peaks_and_ends(most: int) -> None:
    random = np.random.default_rng(most)
    total = random.integers(0, 1000, 4000).cumsum() % 10_007
    events = series.thinned(total, most)
    assert len(events) <= most and (np.diff(events) > 0).all()
    assert total[events].max() == total.max() and total[events].min() == total.min()
    assert events[0] == 0 and events[-1] == len(total) - 1


@pytest.mark.parametrize("kind", ["solved", "moving"])
def test_chart_data_is_the_timeline(kind: str) -> None:
    facts = facts_of(kind)
    data = series.chart_data(facts)
    planned = data["planned"]
    assert data["kinds"] == list(KINDS) and data["phases"] == list(PHASES)
    totals = np.array(planned["bytes"]).sum(axis=0)
    assert totals.max() == totals[planned["peak"]] == facts.planned.peak_bytes
    assert max(data["plain"]["total"]) == sum(data["plain"]["byKind"]) == facts.plain.peak_bytes
    assert planned["t"] == sorted(planned["t"]) and planned["end"] > planned["t"][-1]
    lengths = {len(planned[column]) for column in ("t", "op", "path", "phase", "live")}
    assert lengths == {len(planned["bytes"][0])}
    live = planned["lists"][planned["live"][planned["peak"]]]
    largest = sorted(facts.planned.live_at(facts.planned.peak_event).values(), reverse=True)
    assert live[1::2] == largest[: series._NUM_LIVE]
    assert all(0 <= name < len(data["names"]) for name in [*planned["op"], *planned["path"], *live[::2]])


def test_copies_and_stalls_are_drawn() -> None:
    facts = facts_of("moving")
    copies = series.chart_data(facts)["copies"]
    assert len(copies["out"]) == len(copies["in"]) == 5 and copies["stall"]
    assert facts.planned.stalled_s > 0
    stalled = sum(end - start for start, end, *_ in copies["stall"])
    assert stalled == pytest.approx(facts.planned.stalled_s * 1e9, abs=10)
    assert "Nothing is moved" in page.to_html(facts_of("solved"))
    assert "Nothing is moved" not in page.to_html(facts)


def test_the_curve_goes_down() -> None:
    curve = series.chart_data(facts_of("solved"))["curve"]
    peaks, slower = [point[0] for point in curve["plans"]], [point[1] for point in curve["plans"]]
    assert len(peaks) > 3 and peaks == sorted(peaks) and slower == sorted(slower, reverse=True)
    assert {name for name, *_ in curve["others"]} >= {"nothing", "a checkpoint per block"}
    assert all(least <= share + 1e-9 for _, share, _, least in curve["plans"])


def test_plans_that_another_beats_are_left_out_of_the_curve() -> None:
    facts = facts_of("solved")
    assert facts.frontier is not None
    best = series.chart_data(facts)["curve"]["plans"]
    plan = facts.frontier.plans[0]
    worse = replace(plan, peak_bytes=plan.peak_bytes + 1, extra_s=plan.extra_s * 2)
    padded = replace(facts.frontier, plans=(*facts.frontier.plans, worse))
    assert series.chart_data(replace(facts, frontier=padded))["curve"]["plans"] == best


# Traces and Markdown


@pytest.mark.parametrize("kind", ["solved", "moving"])
def test_traces_are_what_perfetto_reads(kind: str) -> None:
    facts = facts_of(kind)
    events = json.loads(trace_json(facts))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in timed:
        assert event["ts"] >= 0 and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in named
        else:
            assert set(event["args"]) == set(KINDS)
    totals = [sum(event["args"].values()) for event in timed if event["ph"] == "C" and event["pid"] == 1]
    assert max(totals) == facts.planned.peak_bytes
    replayed = sum(event["dur"] for event in timed if event.get("cat") == "replay")
    assert replayed == pytest.approx(facts.planned.replayed_s * 1e6, abs=1)
    copied = sum(event["dur"] for event in timed if event.get("cat") == "copy" and event["tid"] == 2)
    copied_s = sum(copy.end_s - copy.start_s for copy in facts.planned.copies if copy.kind == "out")
    assert copied == pytest.approx(copied_s * 1e6, abs=1)
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert ("stalls" in lanes) == (kind == "moving")


def test_markdown_has_tables_with_totals() -> None:
    facts = facts_of("solved")
    text = to_markdown(facts)
    assert text.startswith(report_text.verdict(facts).replace("_", r"\_"))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1
    total = next(line for line in text.splitlines() if line.startswith("| total"))
    assert report_text.size(facts.planned.peak_bytes) in total
    assert "a checkpoint per block" in text


# The page, as text


class Outline(HTMLParser):
    """Tags, attributes and text of a page, scripts' contents apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data
        elif self.lasttag != "style":
            self.text += data


def test_the_page_asks_for_nothing() -> None:
    html = page.to_html(facts_of("moving"))
    outline = Outline(html)
    for tag, attributes in outline.tags:
        assert tag not in ("iframe", "object", "embed")
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert not re.search(r"@import|url\(", html)
    assert "fetch(" not in html and "XMLHttpRequest" not in html and "eval(" not in html


def test_only_the_script_of_the_page_may_run() -> None:
    html = page.to_html(facts_of("solved"))
    outline = Outline(html)
    policy = next(a["content"] for _, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_names_stay_text_everywhere() -> None:
    graph = renamed(stack(6), "blocks", HOSTILE)
    plan = Plan((Recompute(f"{HOSTILE}.2"),), graph=graph)
    facts = report_facts(plan, time_limit_s=1.0)
    html = page.to_html(facts)
    outline = Outline(html)
    assert [tag for tag, _ in outline.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in outline.tags]
    assert HOSTILE in outline.text
    assert not set("<>&") & set(outline.scripts[0])
    names = json.loads(outline.scripts[0])["names"]
    assert any(HOSTILE in name for name in names)
    markdown = to_markdown(facts)
    assert "<script" not in markdown and "<img" not in markdown and "&lt;script&gt;" in markdown
    json.loads(trace_json(facts))


def test_a_name_cannot_break_a_markdown_table() -> None:
    graph = renamed(stack(4), "blocks", "a|b`c*\n| d |")
    text = to_markdown(report_facts(Plan((Recompute("a|b`c*\n| d |.1"),), graph=graph)))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_files_come_with_the_page() -> None:
    facts = facts_of("solved")
    packed = dict((name, base) for base, name in re.findall(r'base64,([^"]*)" download="([^"]*)"', page.to_html(facts)))
    assert set(packed) == {"plan.json.gz", "trace.json.gz", "report.md.gz"}
    text = {name: gzip.decompress(base64.b64decode(base)).decode() for name, base in packed.items()}
    again = Plan.from_json(text["plan.json.gz"])
    assert again == facts.plan and again.graph == facts.graph
    assert text["trace.json.gz"] == trace_json(facts)
    assert text["report.md.gz"] == to_markdown(facts)


def test_a_page_is_made_the_same_again() -> None:
    facts = facts_of("solved")
    assert page.to_html(facts) == page.to_html(facts)


@pytest.mark.slow  # 5,500 events
def test_the_page_of_a_hundred_layers_is_small() -> None:
    """With as many ops, values and long names as a transformer of a hundred layers has."""
    graph = chain([1 << 20] * 2500, seconds=1 / 1024, gradient_bytes=64)
    names = [f"model.decoder.layers.{index // 25}.self_attention.part_{index % 25}" for index in range(2500)]
    calls = (graph.calls[0], *(replace(call, path=name) for call, name in zip(graph.calls[1:], names, strict=True)))
    graph = replace(graph, calls=calls, step_s=12.0)
    facts = report_facts(Plan(tuple(Recompute(name) for name in names[::3]), graph=graph))
    assert len(facts.planned.ops) > 5500
    html = page.to_html(facts)
    assert len(html.encode()) < 2_000_000
    data = json.loads(Outline(html).scripts[0])
    assert max(map(sum, zip(*data["planned"]["bytes"], strict=True))) == facts.planned.peak_bytes


def test_of_very_many_layers_the_first_are_listed() -> None:
    facts = report_facts(Plan(graph=chain([10] * 999 + [5000])))
    rows = re.findall(r"<tr.*?</tr>", page.to_html(facts).split("Layer by layer")[1].split("</table>")[0])
    assert len(rows) == 1 + page._MOST_LAYERS + 2
    assert "more layers" in rows[-2] and "total" in rows[-1]


def test_steps_of_nothing_and_without_times_are_shown(tmp_path: Path) -> None:
    empty = StepGraph((), 0, (), (), (), lowtide.graph.Hardware("test"), other_bytes=5)
    Plan(graph=empty).report(tmp_path / "empty.html")
    for suffix in ("md", "json"):
        Plan(graph=empty).report(tmp_path / f"empty.{suffix}")
    timeless = chain([10, 20, 30], seconds=0.0)
    Plan((Recompute("layers.1"),), graph=timeless).report(tmp_path / "timeless.html")
    assert series.chart_data(report_facts(Plan(graph=timeless)))["planned"]["t"] == [1000 * n for n in range(7)]


# Figures


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = solved(4)
    assert plan.graph is not None
    axes = plan.plot().axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert {"static", "kept", "without a plan", f"budget {report_text.size(plan.budget_bytes)}"} <= set(labels)
    frontier = lowtide.sweep(plan.graph)
    (axes,) = frontier.plot().axes
    assert "a checkpoint per block" in axes.get_legend_handles_labels()[1]
    heights = axes.lines[0].get_ydata()
    assert max(heights) == pytest.approx(100 * max(p.extra_s for p in frontier.plans) / frontier.step_s)
    plan.report(tmp_path / "plan.png", measured_peak_bytes=5)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    replace(plan, graph=renamed(plan.graph, "x", "$x_{$"), fingerprint="").plot().canvas.draw()


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("pip install matplotlib")):
        Frontier((), (), 1.0, 1, 2).plot()
    with pytest.raises(ImportError, match=re.escape("pip install matplotlib")):
        solved().plot()


# The page, in a browser


class Visit:
    """A page opened in Chromium, with everything it complained about or asked for."""

    def __init__(self, context: Any, path: Path) -> None:
        self.page = context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message) or dialog.dismiss())
        self.page.on("request", lambda request: self._asked(request.url, path))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")

    def _asked(self, url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith(("data:", "blob:")):
            self.troubles.append(f"asked for {url}")

    def point_at(self, chart: str, x: float, y: float) -> None:
        """Move the pointer to a place in a chart, given as shares of its size."""
        where = self.page.locator(chart)
        where.scroll_into_view_if_needed()
        at = where.bounding_box()
        self.page.mouse.move(at["x"] + x * at["width"], at["y"] + y * at["height"])

    def text(self, chart: str) -> str:
        return self.page.locator(chart).inner_text()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages in a folder: of a solved plan with something measured, of one that moves, and one with hostile names."""
    folder = tmp_path_factory.mktemp("reports")
    facts = facts_of("solved")
    pages = {
        "solved": replace(facts, measured_peak_bytes=facts.planned.peak_bytes - 1000),
        "moving": facts_of("moving"),
        "hostile": report_facts(Plan((Recompute(f"{HOSTILE}.2"),), graph=renamed(stack(6), "blocks", HOSTILE))),
        "empty": report_facts(Plan(graph=StepGraph((), 0, (), (), (), lowtide.graph.Hardware("test"), other_bytes=5))),
    }
    for name, each in pages.items():
        (folder / f"{name}.html").write_text(page.to_html(each), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["solved", "moving", "hostile", "empty"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_render(chromium: Any, written: Path, name: str, width: int, scheme: str) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    visit = Visit(context, written / f"{name}.html")
    charts = visit.page.eval_on_selector_all(".chart svg", "all => all.map(svg => svg.childElementCount)")
    assert len(charts) == (4 if name != "empty" else 3) and all(charts)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width  # nothing to scroll sideways
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(251, 251, 250)") == (scheme == "light")
    for chart in ("#memory", "#curve", "#layers", "#bars"):
        visit.point_at(chart, 0.5, 0.4)
    assert visit.troubles == []
    if name == "hostile":
        assert HOSTILE in visit.text("#readout")
    context.close()


def test_charts_answer_the_pointer_and_the_keys(chromium: Any, written: Path) -> None:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    visit = Visit(context, written / "solved.html")
    facts = facts_of("solved")
    assert visit.text("#readout").startswith("At the peak")
    assert report_text.size(facts.planned.peak_bytes) in visit.text("#readout")
    assert "Largest live values" in visit.text("#readout") and "blocks." in visit.text("#readout")
    seen = set()
    for share in (0.2, 0.5, 0.8):
        visit.point_at("#memory", share, 0.4)
        seen.add(visit.text("#readout"))
    assert len(seen) == 3 and all(text.startswith("At ") and "At the peak" not in text for text in seen)

    drawn = visit.page.locator("#memory").inner_html()
    visit.point_at("#memory", 0.3, 0.4)
    visit.page.mouse.down()
    visit.point_at("#memory", 0.6, 0.4)
    visit.page.mouse.up()
    assert visit.page.locator("#memory").inner_html() != drawn
    assert visit.page.locator("#zoom-all").is_enabled()
    visit.page.locator("#zoom-all").click()
    assert visit.page.locator("#zoom-all").is_disabled()
    visit.point_at("#memory", 0.5, 0.4)
    visit.page.mouse.click(
        *visit.page.evaluate(
            "(b => [b.x + b.width / 2, b.y + 90])(document.querySelector('#memory').getBoundingClientRect())"
        )
    )
    assert visit.page.locator("#zoom-all").is_enabled()
    visit.page.locator("#memory").focus()
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("#zoom-all").is_disabled() and visit.text("#readout").startswith("At the peak")
    visit.page.keyboard.press("ArrowRight")
    assert not visit.text("#readout").startswith("At the peak")

    visit.page.evaluate("document.querySelector('#curve').scrollIntoView()")
    dot = visit.page.locator("#curve circle").last.bounding_box()
    visit.page.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    assert "this plan" in visit.text("#tip")
    visit.point_at("#layers", 0.5, 0.2)
    assert "recompute: " in visit.text("#tip")
    assert visit.troubles == []
    context.close()


def test_copies_are_named_where_they_run(chromium: Any, written: Path) -> None:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    visit = Visit(context, written / "moving.html")
    said = ""
    for share in range(15, 100, 5):
        visit.point_at("#memory", share / 100, 0.4)
        said += visit.text("#readout")
    assert "copies out layers." in said and "copies in layers." in said and "waits for layers." in said
    assert visit.troubles == []
    context.close()


def test_files_can_be_taken_along(chromium: Any, written: Path, tmp_path: Path) -> None:
    context = chromium.new_context(accept_downloads=True)
    visit = Visit(context, written / "solved.html")
    for name in ("plan.json", "trace.json", "report.md", "report.png"):
        with visit.page.expect_download() as download:
            visit.page.get_by_text(name, exact=True).click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == facts_of("solved").plan
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert visit.troubles == []
    context.close()
