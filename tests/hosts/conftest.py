from __future__ import annotations

import pytest

from lowtide.hosts import planning


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without a trade-off curve, which would be searched for at the start of each training."""
    monkeypatch.setattr(planning, "REPORT_S", 0.0)
