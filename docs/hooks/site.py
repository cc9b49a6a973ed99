"""Adds the results of bench/ to the site, and rewrites links to them.

Pages link to `../bench/results/x.md` (`../../` from docs/hosts) and `../README.md`, which is right in the repository.
On the site the results are pages below `benchmarks/`, generated here from the files, and the index replaces the README.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"


def on_config(config: Any) -> Any:
    """A page for each file of results, in the navigation below the benchmarks' own page."""
    pages = [{page.stem: f"benchmarks/{page.name}"} for page in sorted(RESULTS.glob("*.md"))]
    background = next(section["Background"] for section in config.nav if "Background" in section)
    entry = next(entry for entry in background if "Benchmarks" in entry)
    entry["Benchmarks"] = [entry["Benchmarks"], *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    for page in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{page.name}", content=page.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    results = r"\]\(\.\./((?:\.\./)*)bench/results/([\w.-]+\.md(?:#[\w-]+)?)\)"
    markdown = re.sub(results, r"](\1benchmarks/\2)", markdown)
    return re.sub(r"\]\(\.\./README\.md(?:#[\w-]+)?\)", "](index.md)", markdown)
