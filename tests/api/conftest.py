from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.tuned_job import Clock, Job, candidates, trace
from lowtide.api import measure
from lowtide.eager.replanning import Limits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Clock]]:
    monkeypatch.setattr(measure, "perf_counter", lambda: Clock.now)
    Clock.part_s = Clock.moved_s = 0.0
    yield Clock
    Clock.part_s = Clock.moved_s = 0.0


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, quick_search: None) -> Job:
    monkeypatch.setattr(measure, "trace", trace)
    monkeypatch.setattr(Limits, "candidates", candidates)
    return Job()
