"""Charts of measured results, for the README and the docs: `python bench/chart.py`. Writes docs/images/*.svg.

Each is read from a page in bench/results, so that a chart shows nothing that was not measured. They are written as
SVG by hand: a few kilobytes, sharp at any size, and with colours that follow the reader's light or dark theme.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from reporting import RESULTS

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SOURCE = RESULTS / "eager-cuda.md"

# What the models of bench/eager.py are, in words.
MODELS = {
    "gpt": "GPT, 16 layers of width 2048, 8 x 2048 tokens, bf16, eager",
    "hf_llama": "Hugging Face Llama, 16 layers of width 2048, 8 x 2048 tokens, bf16, eager",
}
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 78, 56

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 11.5px; fill: #57606a }
  .title { font-size: 15px; font-weight: 600 }
  .axis { stroke: #8c959f; stroke-width: 1 }
  .grid { stroke: #8c959f; stroke-width: 1; opacity: .25 }
  .line { stroke: #0969da; stroke-width: 2.5; fill: none }
  .ours { fill: #0969da }
  .peer { fill: #bc4c00 }
  .ours-text { fill: #0969da; font-weight: 600 }
  .peer-text { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .line { stroke: #58a6ff }
    .ours, .ours-text { fill: #58a6ff }
    .peer, .peer-text { fill: #f0883e }
  }
"""


@dataclass(frozen=True)
class Point:
    name: str
    peak_gib: float
    slower: float  # share of the plain step's time


@dataclass(frozen=True)
class Measurements:
    """One model of the page: the plain step, peers, and ours at many budgets."""

    model: str
    conditions: str
    plain: Point
    peers: tuple[Point, ...]
    ours: tuple[Point, ...]


def read(page: str) -> list[Measurements]:
    """The measurements on a page that bench/eager.py wrote."""
    title, conditions = re.match(r"# .*?, (.+)\n\n(\S+, torch \S+),", page).groups()  # type: ignore[union-attr]
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        head = re.match(r"(\w+): plain ([\d.]+) ms, ([\d.]+) GiB", section)
        if head is None:
            raise ValueError(f"no section of bench/eager.py: {section.splitlines()[0]}")
        table = itertools.takewhile(lambda line: "|" in line, section.splitlines()[2:])
        rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
        names = ["label", *rows[0]]  # the first heading is empty, and stripped
        peers, ours = {}, []
        for cells in rows[2:]:
            if len(cells) != len(names):
                continue  # a budget that was infeasible
            row = dict(zip(names, cells, strict=True))
            label = row["label"].removeprefix("at the peak of: ")
            if "with host memory" in label:
                continue  # another line than what recomputing alone comes to
            if row["theirs ms"]:
                peers[label] = Point(label, float(row["budget GiB"]), _share(row["theirs +"]))
            ours.append(Point("lowtide.fit", float(row["ours GiB"]), _share(row["ours +"])))
        ours.sort(key=lambda point: point.peak_gib)
        plain = Point("plain step", float(head[3]), 0.0)
        found.append(Measurements(head[1], f"{title}, {conditions}", plain, tuple(peers.values()), tuple(ours)))
    return found


def _share(percent: str) -> float:
    return float(percent.rstrip("% ")) / 100


def draw(data: Measurements) -> str:
    """Slowdown over measured peak: a line for ours, a dot for each peer."""
    points = [data.plain, *data.peers, *data.ours]
    most_gib = 5 * (int(max(point.peak_gib for point in points) / 5) + 2)  # with room for names at the right
    most_slower = 0.1 * (int(max(point.slower for point in points) / 0.1) + 1)

    def x(gib: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * gib / most_gib, 1)

    def y(slower: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * slower / most_slower, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(MODELS[data.model])}: slowdown over measured peak">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="24" class="title">Slower than the plain step, over measured peak memory</text>',
        f'<text x="{LEFT}" y="44" class="small">{escape(MODELS[data.model])}</text>',
        f'<text x="{LEFT}" y="60" class="small">{escape(data.conditions)}; forward and backward, measured in one run'
        f"</text>",
    ]
    for step in range(round(most_slower / 0.1) + 1):
        at = y(step / 10)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end" class="small">{10 * step} %</text>')
    for gib in range(0, most_gib + 1, 5):
        lines.append(f'<text x="{x(gib)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" class="small">{gib}</text>')
    lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(0)}" y2="{y(0)}" class="axis"/>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end" class="small">peak, GiB</text>')
    path = " ".join(f"{x(point.peak_gib)},{y(point.slower)}" for point in (*data.ours, data.plain))
    lines.append(f'<polyline points="{path}" class="line"/>')
    lines += [_dot(x(point.peak_gib), y(point.slower), 4, "ours", point) for point in data.ours]
    lines += [_dot(x(point.peak_gib), y(point.slower), 5, "peer", point) for point in (*data.peers, data.plain)]
    for point, dy in _labels((*data.peers, data.plain)):
        is_ahead = point.slower < _interpolated((*data.ours, data.plain), point.peak_gib)
        anchor, dx, dy = ("end", -9, 15) if is_ahead else ("start", 9, dy)
        lines.append(
            f'<text x="{x(point.peak_gib) + dx}" y="{y(point.slower) + dy}" text-anchor="{anchor}" '
            f'class="peer-text">{escape(point.name)}</text>'
        )
    middle = data.ours[len(data.ours) // 2]
    lines.append(
        f'<text x="{x(middle.peak_gib) - 10}" y="{y(middle.slower) + 16}" text-anchor="end" class="ours-text">'
        "lowtide.fit</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _dot(x: float, y: float, radius: int, kind: str, point: Point) -> str:
    title = f"{point.name}: {point.peak_gib:.2f} GiB, {100 * point.slower:+.1f} %"
    return f'<circle cx="{x}" cy="{y}" r="{radius}" class="{kind}"><title>{escape(title)}</title></circle>'


def _labels(points: tuple[Point, ...]) -> list[tuple[Point, int]]:
    """Points with the shift of their label, so that those at nearly the same place stand below one another."""
    placed: list[tuple[Point, int]] = []
    for point in points:
        near = [p for p, _ in placed if abs(p.slower - point.slower) < 0.02 and abs(p.peak_gib - point.peak_gib) < 9]
        placed.append((point, -8 + 17 * len(near)))
    return placed


def _interpolated(points: tuple[Point, ...], gib: float) -> float:
    """What the line through `points` says at `gib`; where it does not reach, that of its nearest end."""
    for left, right in itertools.pairwise(points):
        if left.peak_gib <= gib < right.peak_gib:
            share = (gib - left.peak_gib) / (right.peak_gib - left.peak_gib)
            return left.slower + share * (right.slower - left.slower)
    return points[0].slower if gib < points[0].peak_gib else points[-1].slower


def charts() -> dict[str, str]:
    """Every chart, by the name of its file."""
    return {f"eager-{data.model}.svg": draw(data) for data in read(SOURCE.read_text())}


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, image in charts().items():
        (IMAGES / name).write_text(image)
        print(IMAGES / name)


if __name__ == "__main__":
    main()
