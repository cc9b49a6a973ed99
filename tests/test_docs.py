"""Every Python block in README and docs runs, links lead somewhere, and the site has every page, name and result."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import chart
import pytest

import lowtide

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "lowtide"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page: Path) -> None:
    """In the order of the page, each after the ones before it, as a reader would type them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, f"<{page.name}>", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _without_code(page.read_text())):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), target
        assert not heading or heading in _headings(there.read_text()), target


def test_every_page_is_in_the_navigation() -> None:
    """And nothing else is, so that the strict build has nothing to complain about."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: lowtide\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == lowtide.__all__


def test_every_name_in_the_reference_exists() -> None:
    listed = re.findall(r"^::: (lowtide\.[\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    for module, _, name in (dotted.rpartition(".") for dotted in listed):
        assert getattr(importlib.import_module(module), name).__doc__, f"{module}.{name}"


def test_files_named_by_the_architecture_exist() -> None:
    """`solvers/solve.py: shortlist` is a file of the package, or of the repository, that defines that name."""
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", (DOCS / "architecture.md").read_text())
    assert len(named) > 30
    for path, names in named:
        file = next((file for file in (*PACKAGE.rglob(path), ROOT / path) if file.is_file()), None)
        assert file is not None, path
        for name in filter(None, names.split(".")):
            defined = rf"^\s*(?:def|class) {name}\b|^{name}\b"
            assert re.search(defined, file.read_text(), re.MULTILINE), f"{path}: {name}"


def test_every_result_is_among_the_benchmarks() -> None:
    listed = re.findall(r"\.\./bench/results/([\w.-]+)\)", (DOCS / "benchmarks.md").read_text())
    assert sorted(listed) == sorted(page.name for page in chart.RESULTS.glob("*.md"))


def test_charts_are_those_of_the_results() -> None:
    """`python bench/chart.py` draws them again."""
    drawn = chart.charts()
    assert drawn == {name: (chart.IMAGES / name).read_text() for name in drawn}


def test_the_command_page_has_every_exit_code() -> None:
    failing = pytest.importorskip("lowtide.cli.output")
    listed = re.findall(r"^\| (\d+) \|", (DOCS / "command.md").read_text(), re.MULTILINE)
    assert [int(code) for code in listed] == [int(code) for code in failing.ExitCode]


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def _headings(text: str) -> set[str]:
    """The anchors of a page, as Markdown's table of contents names them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
