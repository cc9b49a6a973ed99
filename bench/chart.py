"""The chart of measured results for the README and the docs: `python bench/chart.py`. Writes docs/images/eager.svg.

It is read from the page of bench/eager.py in bench/results, so it shows nothing that was not measured. It is written as
SVG by hand: a few kilobytes, sharp at any size, and with colours that follow the reader's light or dark theme.
"""

from __future__ import annotations

import argparse
import re
from html import escape
from pathlib import Path

import rows
from reporting import RESULTS
from rows import Row

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SOURCE = RESULTS / "eager-cuda.md"

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 78, 56
KINDS = {"recompute": "eager", "host": "eager, with host memory", "captured": "captured as a CUDA graph"}

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 11.5px; fill: #57606a }
  .title { font-size: 15px; font-weight: 600 }
  .axis { stroke: #8c959f; stroke-width: 1 }
  .grid { stroke: #8c959f; stroke-width: 1; opacity: .25 }
  .equal { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 5 4 }
  circle { fill-opacity: .75 }
  .recompute { fill: #0969da }
  .host { fill: #bc4c00 }
  .captured { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .recompute { fill: #58a6ff }
    .host { fill: #f0883e }
    .captured { fill: #3fb950 }
  }
"""


def draw(found: list[Row], conditions: str) -> str:
    """A dot for each family and budget: how much slower ours is than the plain step, over torch's best way."""
    least = 10 * min(0, int(min(min(row.peer_over, row.ours_over) for row in found) // 10))
    most = 10 * (int(max(max(row.peer_over, row.ours_over) for row in found) // 10) + 1)
    tick = 10 if most - least <= 120 else 50

    def x(percent: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (percent - least) / (most - least), 1)

    def y(percent: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (percent - least) / (most - least), 1)

    num_families = len({row.family for row in found})
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Slowdown of lowtide.fit over that of torch\'s checkpointing at the same peak">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="24" class="title">Slower than the plain step at the same peak memory</text>',
        f'<text x="{LEFT}" y="44" class="small">lowtide.fit over the fastest of torch\'s ways that hold the budget: '
        f"{num_families} families, {len(found)} budgets; below the line ours is faster</text>",
        f'<text x="{LEFT}" y="60" class="small">{escape(conditions)}; forward and backward, in turns</text>',
    ]
    for percent in range(-(-least // tick) * tick, most + 1, tick):
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(percent)}" y2="{y(percent)}" class="grid"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{y(percent) + 4}" text-anchor="end" class="small">{percent:+d} %</text>'
            f'<text x="{x(percent)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" class="small">{percent:+d} %'
            "</text>"
        )
    lines += [
        f'<line x1="{x(least)}" x2="{x(most)}" y1="{y(least)}" y2="{y(most)}" class="equal"/>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end" class="small">torch\'s best way</text>',
        f'<text x="{LEFT + 8}" y="{TOP + 12}" class="small">ours</text>',
    ]
    for row in found:
        title = (
            f"{row.family} at {row.budget}: {row.budget_gib:.2f} GiB, {row.peer} {row.peer_over:+.1f} %, "
            f"ours {row.ours_over:+.1f} %"
        )
        lines.append(
            f'<circle cx="{x(row.peer_over)}" cy="{y(row.ours_over)}" r="5" class="{_kind(row)}">'
            f"<title>{escape(title)}</title></circle>"
        )
    worst = max(found, key=lambda row: row.behind)
    # To the left, where no other dots are: the worst one is furthest above the line.
    anchor, shift = ("end", -9) if x(worst.peer_over) > LEFT + 180 else ("start", 9)
    lines.append(
        f'<text x="{x(worst.peer_over) + shift}" y="{y(worst.ours_over) - 6}" text-anchor="{anchor}" class="small">'
        f"worst: {escape(worst.family)}, {worst.behind:+.1f} points</text>"
    )
    used = [kind for kind in KINDS if any(_kind(row) == kind for row in found)]
    for number, kind in enumerate(used):
        at = HEIGHT - BOTTOM - 14 - 18 * (len(used) - 1 - number)
        lines.append(f'<circle cx="{WIDTH - 200}" cy="{at - 4}" r="5" class="{kind}"/>')
        lines.append(f'<text x="{WIDTH - 188}" y="{at}" class="small">{KINDS[kind]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _kind(row: Row) -> str:
    return "captured" if "captured" in row.budget else "host" if "host memory" in row.budget else "recompute"


def charts() -> dict[str, str]:
    """The chart by the name of its file; none for a page without rows."""
    page = SOURCE.read_text()
    found = rows.read(page)
    conditions = re.match(r"# .*, (.+)\n\n(\S+, torch \S+),", page)
    if not found:
        return {}
    if conditions is None:
        raise ValueError(f"{SOURCE} does not begin with a title and a date")
    return {"eager.svg": draw(found, ", ".join(conditions.groups()))}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, image in charts().items():
        (IMAGES / name).write_text(image)
        print(IMAGES / name)


if __name__ == "__main__":
    main()
