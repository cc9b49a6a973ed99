from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PATHS = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SLOW = (
    "hosts_accelerate",
    "hosts_diffusers",
    "hosts_transformers",
    "hosts_trl",
    "hosts_vision",
)  # tests/hosts runs these hosts too
EXAMPLES = [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem) for path in PATHS]


@pytest.mark.filterwarnings(
    "ignore:.*(many workers|num_workers|tensorboard|logging interval|LeafSpec)"
)  # Lightning's advice
@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: Path) -> None:
    for package in _hosts(example):
        pytest.importorskip(package)
    runpy.run_path(str(example), run_name="__main__")


def _hosts(example: Path) -> list[str]:
    """The packages that an example imports at its top, beside torch and lowtide."""
    names = re.findall(r"^(?:import|from) (\w+)", example.read_text(), re.MULTILINE)
    return [
        name
        for name in names
        if name in ("accelerate", "datasets", "diffusers", "lightning", "peft", "transformers", "trl")
    ]
