"""`lowtide demo`: its gradients equal the plain run's, its peak is within the budget, and it writes a report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtide.cli import demo


@pytest.mark.usefixtures("quick_fit")
def test_the_demo_is_exact_and_holds_its_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {
        "WIDTH": 32,
        "HEADS": 4,
        "LAYERS": 3,
        "CONTEXT": 32,
        "BATCH": 4,
        "STEPS": 2,
        "ROUNDS": 1,
    }.items():
        monkeypatch.setattr(demo, name, value)
    demo.main(str(tmp_path / "demo.html"))
    shown = capsys.readouterr().out
    assert "held, with the same gradients" in shown
    assert "losses over 2 steps equal to the last bit: True" in shown
    assert re.search(r"(slower|faster) measured", shown.split("made in")[-1])
    assert (tmp_path / "demo.html").stat().st_size > 10_000
