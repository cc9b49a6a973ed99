"""Every Python block in README and docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    exec(compile(block, "<documentation>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
